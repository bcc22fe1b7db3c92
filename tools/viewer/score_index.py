"""An index of one snapshot's scores on disk: pairs of sample and class, sorted as they are looked at.

`index_building` makes it, once per snapshot. Of few samples it has all pairs; of many, those of the 10
highest classes of a sample and all that is annotated, expected or there.
"""

# Shapes: n samples of a shard, L classes.

import hashlib
import json
import logging
import os
import shutil
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from bigscl.common.digests import FILES, check_file, read_array, read_sealed, write_array
from bigscl.common.files import BadFile
from bigscl.common.user_error import UserError
from bigscl.data.index import Index
from bigscl.store import Array, HeatmapStore
from bigscl.tools.shared.shard_passes import SnapshotThresholds, pass_over, to_float32

logger = logging.getLogger(__name__)

FORMAT = 2
HEAD, AGAIN = "index.json", "It is made again."
PAIR = np.dtype(
    [("row", "<u4"), ("class", "<u4"), ("score", "<u2"), ("change", "<u2"), ("peak", "u1"), ("flags", "u1")]
)
"""A sample and a class. Score and change are the bits of a float16, which have the order of their values; the
peak is the hottest cell of the heatmap in 255ths. Change is that of the score since the snapshot before."""
ANNOTATED, EXPECTED, PRESENT, ABSENT, KNOWN = 1, 2, 4, 8, 16
"""Flags of a pair. ABSENT: a known negative. KNOWN: the full labels say whether it is present."""
ORDERS = ("surprise", "change", "heat")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ClassCounts:
    """Values of the index for each class."""

    annotated: NDArray[np.int64]
    expected: NDArray[np.int64]
    mined: NDArray[np.int64]
    """Expected and not annotated, where the full labels say whether it is right; all, if there are none."""
    right: NDArray[np.int64]
    missing: NDArray[np.int64]
    """Present and not annotated."""
    histogram: NDArray[np.int64]
    """Of the scores of all samples, `[L,bins]`."""
    together: NDArray[np.int64]
    """`[m,3]`: a named class, a mined one, and the number of images that have both."""


class ScoreIndex:
    """The pairs of one snapshot, mapped from disk."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        head = read_sealed(folder / HEAD, AGAIN)
        for name, digest in head[FILES].items():
            check_file(folder / name, HEAD, digest, AGAIN)
        self.snapshot: int = head["snapshot"]
        self.epoch: int = head["epoch"]
        self.before: int | None = head["before"]
        """The snapshot with which scores are compared; None if there is no earlier one."""
        self.complete: bool = head["complete"]
        """Whether all pairs are kept."""
        self.heatmaps: bool = head["heatmaps"]
        self.full_labels: bool = head["full_labels"]
        self.seconds: float = head["seconds"]
        """How long it took to build."""
        with np.load(folder / "classes.npz", allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        self.offsets: NDArray[np.int64] = arrays.pop("offsets")
        cuts = {name: arrays.pop(name) for name in ("score", "tie_id")}
        self.expected = SnapshotThresholds(**cuts, recomputed=head["recomputed"], note=head["note"])
        self.classes = ClassCounts(**arrays)
        self._pairs = folder / "pairs.bin"
        self.orders = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in (*ORDERS, "row")}
        if self._pairs.stat().st_size != self.offsets[-1] * PAIR.itemsize:
            raise OSError(f"{self._pairs}: has not {self.offsets[-1]} pairs")

    def of_class(self, number: int) -> Array:
        """Return the pairs of a class, the highest score first."""
        return self.part(int(self.offsets[number]), int(self.offsets[number + 1]))

    def part(self, first: int, end: int) -> Array:
        """Return some of the pairs of all classes. Read, not mapped: mapped pages would stay in memory."""
        pairs: Array = np.fromfile(self._pairs, PAIR, end - first, offset=first * PAIR.itemsize)
        return pairs


def value_of(pairs: Array, order: str) -> NDArray[np.float32]:
    if order == "change":
        return to_float32(pairs["change"])
    scores = to_float32(pairs["score"])
    return np.abs(scores - pairs["peak"] / np.float32(255)) if order == "heat" else scores


def open_index(folder: Path, store: HeatmapStore) -> ScoreIndex | None:
    """Return the index of the store's snapshot in this folder; None if there is none of this format."""
    folder_of_index = folder / index_name(store)
    if not (folder_of_index / HEAD).is_file():
        return None
    try:
        return ScoreIndex(folder_of_index)
    except (OSError, KeyError, ValueError, TypeError, EOFError, zipfile.BadZipFile) as error:
        logger.warning("%s", error)
        shutil.rmtree(folder_of_index, ignore_errors=True)
        return None


def index_name(store: HeatmapStore) -> str:
    """Return the name of a snapshot's index: another state of the store has another one."""
    at = store.snapshot
    state = [FORMAT, store.backend.url, store.spec.fingerprint, at.id, at.time, at.run, at.group, at.slots]
    return f"snapshot-{at.id:08d}-{hashlib.sha256(json.dumps(state).encode()).hexdigest()[:12]}"


def disagreement(one: HeatmapStore, other: HeatmapStore, index: ScoreIndex, name: str) -> NDArray[Any]:
    """Return pairs of all samples, those on which two runs differ most first: `change` is by how much.

    The scores, peaks and flags are those of `one`, whose index it is. Made in one pass over the scores of
    both, and kept under a name of the other's index.
    """
    file = index.folder / f"against-{name}.npy"
    if file.exists():
        try:
            return read_array(file, "a comparison", AGAIN)
        except BadFile as error:
            logger.warning("%s", error)
    shards = range(one.spec.num_shards)
    parts = [part for _, part in pass_over("comparing", shards, _Comparison(one, other), [one, other])]
    pairs = np.array(index.orders["row"])
    for field, values in zip(("class", "change", "score"), zip(*parts, strict=True), strict=True):
        pairs[field] = np.concatenate(values)
    pairs["peak"], pairs["flags"] = _known_of(index, pairs)
    write_array(file, sorted_pairs(pairs, "change"), suffix=str(os.getpid()))
    return read_array(file, "a comparison", AGAIN)


@dataclass(frozen=True, slots=True)
class _Comparison:
    """For each sample of a shard the class on which two stores differ most, by how much, and its score."""

    one: HeatmapStore
    other: HeatmapStore

    def __call__(self, shard: int) -> tuple[Array, Array, Array]:
        (ids, mine), (_, its) = (next(store.scores_by_shard([shard])) for store in (self.one, self.other))
        apart = np.abs(to_float32(mine) - to_float32(its))
        places = np.arange(len(ids)), apart.argmax(axis=1)
        return places[1], score_bits(apart[places].astype(np.float16)), score_bits(mine)[places]


def _known_of(index: ScoreIndex, pairs: Array) -> tuple[Array, Array]:
    """Return (peaks, flags) of pairs, as far as the index keeps them."""
    peaks, flags = np.zeros(len(pairs), np.uint8), np.zeros(len(pairs), np.uint8)
    order = np.argsort(pairs["class"], kind="stable")
    bounds = np.searchsorted(pairs["class"][order], np.arange(len(index.offsets)))
    for number in range(len(index.offsets) - 1):
        wanted = order[bounds[number] : bounds[number + 1]]
        kept = index.of_class(number)
        if len(wanted) and len(kept):
            places, is_kept = find_rows(kept, pairs["row"][wanted])
            peaks[wanted[is_kept]], flags[wanted[is_kept]] = kept["peak"][places], kept["flags"][places]
    return peaks, flags


def find_rows(pairs: Array, rows: Array) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return (place in `pairs` of each row that is there, which rows are there)."""
    order = np.argsort(pairs["row"], kind="stable")
    places = np.minimum(np.searchsorted(pairs["row"], rows, sorter=order), len(pairs) - 1)
    is_there = pairs["row"][order[places]] == rows
    return order[places[is_there]], is_there


def to_bytes(values: Array) -> NDArray[np.uint8]:
    """Return values in 0 to 1 in 255ths; damaged ones are cut to that."""
    in_255ths: NDArray[np.uint8] = np.rint(np.nan_to_num(to_float32(values)).clip(0, 1) * 255).astype(
        np.uint8
    )
    return in_255ths


def score_bits(halves: Array) -> NDArray[np.uint16]:
    """Return the bits of scores: integers in the same order."""
    return np.ascontiguousarray(halves).view(np.uint16)


def sorted_pairs(pairs: Array, order: str) -> Array:
    return pairs[np.argsort(-value_of(pairs, order), kind="stable")]


# Pages of samples: which pairs are shown, and in which order

BLOCK = 2**22
Order = Literal["surprise", "change", "heat", "against", "score", "row"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """A request of the grid. It shows one pair for each sample: of the class, or of the order's own class."""

    order: Order = "surprise"
    number: int | None = None
    """A class."""
    annotated: bool | None = None
    expected: bool | None = None
    present: bool | None = None
    low: float = 0.0
    high: float = 1.0
    """Bounds of the score."""
    key: str = ""
    """A part of the key."""
    reverse: bool = False


def listed(index: ScoreIndex, query: Query, samples: Index, against: "Against | None" = None) -> Array:
    """Return all pairs that a query asks for, in its order. Ties are by row."""
    if query.order == "against" and against is None:
        raise UserError("sort: there is no second run to compare with")
    pairs = (
        _of_class(index, query, against) if query.number is not None else _of_samples(index, query, against)
    )
    if (wanted := _wanted(pairs, query, samples)) is not None:
        pairs = pairs[wanted]
    return pairs[::-1] if query.reverse else pairs


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Against:
    """Another run of the same samples."""

    index: ScoreIndex
    pairs: NDArray[Any]
    """Those on which the runs differ most, one for each sample: see `disagreement`."""


def _of_samples(index: ScoreIndex, query: Query, against: Against | None) -> Array:
    if query.order == "against":
        assert against is not None
        return against.pairs
    # The highest score of any class would be that of the annotated one: the surprise is the highest other.
    pairs: Array = index.orders["surprise" if query.order == "score" else query.order]
    return pairs


def _of_class(index: ScoreIndex, query: Query, against: Against | None) -> Array:
    assert query.number is not None
    pairs = index.of_class(query.number)
    if query.order == "surprise":
        return np.asarray(pairs[pairs["flags"] & (ANNOTATED | ABSENT) == 0])
    if query.order == "score":
        return pairs
    if query.order == "row":
        return pairs[np.argsort(pairs["row"])]
    if query.order == "against":
        assert against is not None
        pairs = _differing(pairs, against.index.of_class(query.number))
    value = value_of(pairs, "change" if query.order == "against" else query.order)
    return pairs[np.lexsort((pairs["row"], -value))]


def _differing(pairs: Array, other: Array) -> Array:
    """Return the pairs with the difference of two runs as their change; what the other lacks counts as 0."""
    its = np.zeros(len(pairs), np.float32)
    if len(other):
        places, is_there = find_rows(other, pairs["row"])
        its[is_there] = to_float32(other["score"][places])
    pairs = pairs.copy()
    pairs["change"] = np.abs(to_float32(pairs["score"]) - its).astype(np.float16).view(np.uint16)
    return pairs


def _wanted(pairs: Array, query: Query, samples: Index) -> NDArray[np.bool_] | None:
    """Return which pairs match; None if all do, so that they need not be copied."""
    if query == Query(order=query.order, number=query.number, reverse=query.reverse):
        return None
    wanted: NDArray[np.bool_] = np.ones(len(pairs), bool)
    for flag, asked in ((ANNOTATED, query.annotated), (EXPECTED, query.expected), (PRESENT, query.present)):
        if asked is not None:
            wanted &= (pairs["flags"] & flag != 0) == asked
    if query.low > 0 or query.high < 1:
        scores = to_float32(pairs["score"])
        wanted &= (scores >= query.low) & (scores <= query.high)
    if query.key:
        matching = np.zeros(len(samples.keys), bool)
        matching[rows_with(query.key, samples)] = True
        wanted &= matching[pairs["row"]]
    return wanted


def rows_with(part: str, samples: Index) -> NDArray[np.int64]:
    """Return the rows whose keys contain this text."""
    wanted = np.frombuffer(part.encode(errors="surrogateescape"), np.uint8)
    content, offsets, parts = samples.keys.values, samples.keys.offsets, [np.empty(0, np.int64)]
    # A part of the bytes at a time: a common letter is at millions of places.
    for first in range(0, len(content), BLOCK):
        block = content[first : first + BLOCK + len(wanted) - 1]
        places = np.flatnonzero(block[: len(block) - len(wanted) + 1] == wanted[0])
        for position, letter in enumerate(wanted[1:], 1):
            places = places[block[places + position] == letter]
        rows = np.searchsorted(offsets, places + first, side="right") - 1
        parts.append(np.unique(rows[places + first + len(wanted) <= offsets[rows + 1]]))
    return np.unique(np.concatenate(parts))
