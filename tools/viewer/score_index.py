"""An index of one snapshot's scores on disk: pairs of sample and class, sorted as they are looked at.

A pass over the store writes it once per snapshot, into a folder that appears whole. Of few samples all pairs
are kept; of many, those of the 10 highest classes of a sample and all that is annotated, expected or there.
"""

# Shapes: n samples of a shard, L classes.

import hashlib
import itertools
import json
import os
import re
import shutil
import time
import uuid
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from bigscl.files import atomic_write, read_json_object, sync, write_text
from bigscl.store import Array, HeatmapStore
from bigscl.tools.choosing import snapshot_before
from bigscl.tools.expected import Expected, count_by_class, expected_at
from bigscl.tools.halves import to_float32
from bigscl.tools.opening import Data
from bigscl.tools.passes import pass_over
from bigscl.training.score_log import highest_classes

FORMAT = 1
ALL_PAIRS = 2**24
KEPT = 10
BINS = 20
INDEXES_KEPT = 2
SECONDS_OF_A_BUILD = 86_400
PART = 2**20
PAIR = np.dtype(
    [
        ("row", "<u4"),
        ("class", "<u4"),
        ("score", "<u2"),
        ("change", "<u2"),
        ("peak", "u1"),
        ("flags", "u1"),
    ]
)
"""A sample and a class. Score and change are the bits of a float16, which have the order of their values; the
peak is the hottest cell of the heatmap in 255ths. Change is that of the score since the snapshot before."""
ANNOTATED, EXPECTED, PRESENT, ABSENT, KNOWN = 1, 2, 4, 8, 16
"""Flags of a pair. ABSENT: a known negative. KNOWN: the full labels say whether it is present."""
ORDERS = ("surprise", "change", "heat")
NAME = re.compile(r"snapshot-\d{8}-[0-9a-f]{12}")
Advance = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ClassCounts:
    """What the index knows of each class."""

    annotated: NDArray[np.int64]
    expected: NDArray[np.int64]
    mined: NDArray[np.int64]
    """Expected and not annotated, where the full labels say whether it is right; all, if there are none."""
    right: NDArray[np.int64]
    missing: NDArray[np.int64]
    """Present and not annotated."""
    histogram: NDArray[np.int64]
    """`[L,BINS]` of the scores of all samples."""
    together: NDArray[np.int64]
    """`[m,3]`: a named class, a mined one, and the number of images that have both."""


class ScoreIndex:
    """The pairs of one snapshot, mapped from disk."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        head = read_json_object(folder / "index.json") or {}
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
        cuts = {name: arrays.pop(name) for name in ("tau", "last_id")}
        self.expected = Expected(**cuts, recomputed=head["recomputed"], note=head["note"])
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
        found: Array = np.fromfile(self._pairs, PAIR, end - first, offset=first * PAIR.itemsize)
        return found


def value_of(pairs: Array, order: str) -> NDArray[np.float32]:
    """Return the value by which pairs are ordered: falling."""
    if order == "change":
        return to_float32(pairs["change"])
    scores = to_float32(pairs["score"])
    return np.abs(scores - pairs["peak"] / np.float32(255)) if order == "heat" else scores


def open_index(folder: Path, store: HeatmapStore) -> ScoreIndex | None:
    """Return the index of the store's snapshot in this folder; None if there is none of this format."""
    place = folder / _name(store)
    head = read_json_object(place / "index.json") if (place / "index.json").is_file() else None
    if head is None or head.get("format") != FORMAT:
        return None
    try:
        return ScoreIndex(place)
    except (OSError, KeyError, ValueError, TypeError, EOFError, zipfile.BadZipFile):
        # Damaged: it is made again.
        shutil.rmtree(place, ignore_errors=True)
        return None


def _name(store: HeatmapStore) -> str:
    """Return the name of a snapshot's index: another state of the store has another one."""
    at = store.snapshot
    state = [FORMAT, store.backend.url, store.spec.fingerprint, at.id, at.time, at.run, at.group, at.slots]
    return f"snapshot-{at.id:08d}-{hashlib.sha256(json.dumps(state).encode()).hexdigest()[:12]}"


def build_index(folder: Path, store: HeatmapStore, data: Data, advance: Advance | None = None) -> ScoreIndex:
    """Return the index of the store's snapshot, made now; `advance` is told (shards done, of all)."""
    start = time.monotonic()
    before = snapshot_before(store)
    older = None if before is None else HeatmapStore(store.backend, store.spec, before, data.annotations)
    expected = expected_at(store)
    with _new_folder(folder, _name(store)) as unfinished:
        pass_ = _Pass(store, older, data, expected)
        title = f"index of snapshot {store.snapshot.id}"
        with (unfinished / "parts.bin").open("wb+") as parts, (unfinished / "pairs.bin").open("wb+") as out:
            stores = [store] if older is None else [store, older]
            for shard, found in pass_over(title, range(store.spec.num_shards), pass_.read, stores):
                pass_.add(found)
                parts.write(found.pairs.tobytes())
                if advance is not None:
                    advance(shard + 1, store.spec.num_shards)
            offsets = _by_class(parts, out, pass_.num_pairs, store.spec.num_classes)
        (unfinished / "parts.bin").unlink()
        pass_.save(unfinished, offsets)
        head = {
            "format": FORMAT,
            "snapshot": store.snapshot.id,
            "epoch": store.snapshot.epoch,
            "before": None if before is None else before.id,
            "complete": pass_.keep_all,
            "heatmaps": store.group.layout != "scores",
            "full_labels": data.index.labels is not None,
            "note": expected.note,
            "recomputed": expected.recomputed,
            "seconds": time.monotonic() - start,
        }
        write_text(unfinished / "index.json", json.dumps(head))
    _remove_old(folder, keep=_name(store))
    return ScoreIndex(folder / _name(store))


def disagreement(one: HeatmapStore, other: HeatmapStore, index: ScoreIndex, name: str) -> NDArray[Any]:
    """Return pairs of all samples, those on which two runs differ most first: `change` is by how much.

    The scores, peaks and flags are those of `one`, whose index it is. Made in one pass over the scores of
    both, and kept under a name of the other's index.
    """
    file = index.folder / f"against-{name}.npy"
    if not file.exists():
        shards = range(one.spec.num_shards)
        parts = [part for _, part in pass_over("comparing", shards, _Comparison(one, other), [one, other])]
        pairs = np.array(index.orders["row"])
        for field, values in zip(("class", "change", "score"), zip(*parts, strict=True), strict=True):
            pairs[field] = np.concatenate(values)
        pairs["peak"], pairs["flags"] = _known_of(index, pairs)
        with atomic_write(file, suffix=str(os.getpid())) as partial, partial.open("wb") as out:
            np.save(out, _sorted(pairs, "change"))
    found: NDArray[Any] = np.load(file, mmap_mode="r")
    return found


@dataclass(frozen=True, slots=True)
class _Comparison:
    """For each sample of a shard the class on which two stores differ most, by how much, and its score."""

    one: HeatmapStore
    other: HeatmapStore

    def __call__(self, shard: int) -> tuple[Array, Array, Array]:
        (ids, mine), (_, its) = (next(store.scores_by_shard([shard])) for store in (self.one, self.other))
        apart = np.abs(to_float32(mine) - to_float32(its))
        places = np.arange(len(ids)), apart.argmax(axis=1)
        return places[1], _bits(apart[places].astype(np.float16)), _bits(mine)[places]


def _known_of(index: ScoreIndex, pairs: Array) -> tuple[Array, Array]:
    """Return (peaks, flags) of pairs, as far as the index keeps them."""
    peaks, flags = np.zeros(len(pairs), np.uint8), np.zeros(len(pairs), np.uint8)
    order = np.argsort(pairs["class"], kind="stable")
    bounds = np.searchsorted(pairs["class"][order], np.arange(len(index.offsets)))
    for number in range(len(index.offsets) - 1):
        wanted = order[bounds[number] : bounds[number + 1]]
        kept = index.of_class(number)
        if len(wanted) and len(kept):
            places, found = find_rows(kept, pairs["row"][wanted])
            peaks[wanted[found]], flags[wanted[found]] = kept["peak"][places], kept["flags"][places]
    return peaks, flags


def find_rows(pairs: Array, rows: Array) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return (place in `pairs` of each row that is there, which rows are there)."""
    order = np.argsort(pairs["row"], kind="stable")
    places = np.minimum(np.searchsorted(pairs["row"], rows, sorter=order), len(pairs) - 1)
    found = pairs["row"][order[places]] == rows
    return order[places[found]], found


# One shard


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Shard:
    """What the pass keeps of one shard."""

    pairs: Array
    orders: dict[str, Array]
    counts: dict[str, NDArray[np.int64]]
    together: NDArray[np.int64]


class _Pass:
    """One pass over a store: what it reads of a shard, and what it adds up."""

    def __init__(
        self, store: HeatmapStore, older: HeatmapStore | None, data: Data, expected: Expected
    ) -> None:
        self._store, self._older, self._data, self._expected = store, older, data, expected
        self._classes = store.spec.num_classes
        self.keep_all = store.spec.num_samples * self._classes <= ALL_PAIRS
        self.num_pairs = 0
        self._counts: dict[str, Any] = {}
        self._orders: dict[str, list[Array]] = {name: [] for name in (*ORDERS, "row")}
        self._together: list[NDArray[np.int64]] = []

    def read(self, shard: int) -> _Shard:
        """Return what is kept of a shard."""
        ids = self._store.spec.sample_ids(shard)
        rows = self._store.load_shard(shard).take(slice(0, len(ids)))
        flags = self._flags(ids, self._expected.of(rows.ranked_by(), ids))
        change = self._change(shard, rows.scores)
        peaks, has_heat = self._peaks(rows, ids)
        values: dict[str, Array] = {
            "score": _bits(rows.scores),
            "change": _bits(change),
            "peak": peaks,
            "flags": flags,
        }
        kept = self._kept(rows.scores, flags)
        places: dict[str, tuple[Array, Array]] = {}
        open_ = np.where(flags & (ANNOTATED | ABSENT), 0, values["score"])
        apart = np.where(has_heat, np.abs(to_float32(rows.scores) - peaks / np.float32(255)), -1)
        for name, by in {"surprise": open_, "change": values["change"], "heat": apart}.items():
            places[name] = np.arange(len(ids)), by.argmax(axis=1)
        orders = {name: _pairs(ids, values, at) for name, at in places.items()}
        return _Shard(
            pairs=_pairs(ids, values, np.nonzero(kept)),
            orders={**orders, "row": orders["surprise"]},
            counts=_counted(flags, values["score"], self._data.index.labels is not None),
            together=_together(flags),
        )

    def _flags(self, ids: NDArray[np.int64], expected: NDArray[np.bool_]) -> NDArray[np.uint8]:
        index = self._data.index
        flags = np.where(expected, np.uint8(EXPECTED), np.uint8(0))
        flags[self._data.annotated(ids)] |= ANNOTATED
        if self._data.labels == "observed":
            flags[index.negatives.entries(ids)] |= ABSENT
        if index.labels is not None:
            truth = index.labels_of(ids, "labels")
            flags |= np.where(truth >= 0, np.uint8(KNOWN), np.uint8(0))
            flags |= np.where(truth == 1, np.uint8(PRESENT), np.uint8(0))
        return flags

    def _change(self, shard: int, scores: Array) -> NDArray[np.float16]:
        if self._older is None:
            return np.zeros(scores.shape, np.float16)
        now, then = self._store.snapshot, self._older.snapshot
        if (now.group, now.slots[shard]) == (then.group, then.slots[shard]):
            return np.zeros(scores.shape, np.float16)
        _, earlier = next(self._older.scores_by_shard([shard]))
        change: NDArray[np.float16] = np.abs(to_float32(scores) - to_float32(earlier)).astype(np.float16)
        return change

    def _peaks(self, rows: Any, ids: NDArray[np.int64]) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
        """Return `[n,L]` the hottest cells in 255ths, and which classes have a heatmap."""
        peaks, has_heat = np.zeros(rows.scores.shape, np.uint8), np.zeros(rows.scores.shape, bool)
        if rows.heatmaps is None:
            return peaks, has_heat
        start = self._store.start_values
        heat = np.asarray((rows if start is None else start.evidence(rows, ids)).heatmaps)
        hottest = _bits(heat).reshape(*heat.shape[:2], -1).max(axis=2)
        kept = rows.kept_classes().astype(np.int64)
        np.put_along_axis(peaks, kept, to_bytes(hottest.view(np.float16)), axis=1)
        np.put_along_axis(has_heat, kept, True, axis=1)
        return peaks, has_heat

    def _kept(self, scores: Array, flags: NDArray[np.uint8]) -> NDArray[np.bool_]:
        if self.keep_all:
            return np.ones(scores.shape, bool)
        kept: NDArray[np.bool_] = flags & (ANNOTATED | EXPECTED | PRESENT) != 0
        highest = highest_classes(scores, np.zeros(scores.shape, bool), min(KEPT, self._classes))
        np.put_along_axis(kept, highest, True, axis=1)
        return kept

    def add(self, found: _Shard) -> None:
        """Add up one shard."""
        self.num_pairs += len(found.pairs)
        for name, counts in found.counts.items():
            self._counts[name] = self._counts.get(name, 0) + counts
        for name, pairs in found.orders.items():
            self._orders[name].append(pairs)
        self._together.append(found.together)
        if len(self._together) > 64:
            self._together = [_summed(self._together)]

    def save(self, folder: Path, offsets: NDArray[np.int64]) -> None:
        """Write the orders of the samples, and the counts of the classes."""
        for name, parts in self._orders.items():
            pairs = np.concatenate(parts)
            parts.clear()
            np.save(folder / f"{name}.npy", pairs if name == "row" else _sorted(pairs, name))
        np.savez(
            folder / "classes.npz",
            offsets=offsets,
            tau=self._expected.tau,
            last_id=self._expected.last_id,
            together=_summed(self._together),
            **self._counts,
        )


def to_bytes(values: Array) -> NDArray[np.uint8]:
    """Return values in 0 to 1 in 255ths; damaged ones are cut to that."""
    found: NDArray[np.uint8] = np.rint(np.nan_to_num(to_float32(values)).clip(0, 1) * 255).astype(np.uint8)
    return found


def _bits(halves: Array) -> NDArray[np.uint16]:
    return np.ascontiguousarray(halves).view(np.uint16)


def _pairs(ids: NDArray[np.int64], values: dict[str, Array], places: tuple[Array, ...]) -> Array:
    pairs = np.empty(len(places[0]), PAIR)
    pairs["row"], pairs["class"] = ids[places[0]], places[1]
    for name, array in values.items():
        pairs[name] = array[places]
    return pairs


def _sorted(pairs: Array, order: str) -> Array:
    return pairs[np.argsort(-value_of(pairs, order), kind="stable")]


_EDGES = np.linspace(0, 1, BINS + 1, dtype=np.float32)[1:-1]
_BIN = np.searchsorted(_EDGES, to_float32(np.arange(2**16, dtype=np.uint16)), side="right").astype(np.uint8)
"""The bin of each of the 65,536 scores, by its bits."""


def _counted(flags: NDArray[np.uint8], scores: NDArray[np.uint16], known: bool) -> dict[str, Any]:
    mined = (flags & (EXPECTED | ANNOTATED) == EXPECTED) & (not known or flags & KNOWN != 0)
    missing = flags & (PRESENT | ANNOTATED) == PRESENT
    masks = {
        "annotated": flags & ANNOTATED != 0,
        "expected": flags & EXPECTED != 0,
        "mined": mined,
        "right": mined & missing,
        "missing": missing,
    }
    num_classes = flags.shape[1]
    places = np.arange(num_classes, dtype=np.int64) * BINS + _BIN[scores]
    histogram = np.bincount(places.ravel(), minlength=num_classes * BINS).reshape(num_classes, BINS)
    return {**{name: count_by_class(mask) for name, mask in masks.items()}, "histogram": histogram}


def _together(flags: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Return `[m,3]`: named class, mined class, and in how many images both are."""
    named, mined = flags & ANNOTATED != 0, flags & (EXPECTED | ANNOTATED) == EXPECTED
    (rows, classes), (of, new) = np.nonzero(named), np.nonzero(mined)
    first, end = np.searchsorted(rows, of), np.searchsorted(rows, of, side="right")
    # Each mined class with each of the classes that its image names.
    places = np.repeat(first - np.cumsum(end - first) + (end - first), end - first)
    both = classes[places + np.arange(len(places))], np.repeat(new, end - first)
    return _summed([np.column_stack([*both, np.ones(len(places), np.int64)])])


def _summed(parts: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    if not parts:
        return np.empty((0, 3), np.int64)
    rows = np.concatenate(parts)
    pairs, places = np.unique(rows[:, :2], axis=0, return_inverse=True)
    counts = np.bincount(places.ravel(), rows[:, 2], len(pairs)).astype(np.int64)
    return np.column_stack([pairs, counts])


# By class


def _by_class(parts: BinaryIO, out: BinaryIO, num_pairs: int, num_classes: int) -> NDArray[np.int64]:
    """Write the pairs of `parts` sorted by class and falling score; return where each class starts.

    A part at a time: they may be more than fit into RAM.
    """
    counts = np.zeros(num_classes, np.int64)
    for part in _in_parts(parts, num_pairs):
        counts += np.bincount(part["class"], minlength=num_classes)
    offsets = np.concatenate([[0], np.cumsum(counts)])
    place = offsets[:-1].copy()
    for part in _in_parts(parts, num_pairs):
        part = part[np.argsort(part["class"], kind="stable")]
        numbers, firsts = np.unique(part["class"], return_index=True)
        for number, run in zip(numbers, np.split(part, firsts[1:]), strict=True):
            out.seek(int(place[number]) * PAIR.itemsize)
            out.write(run.tobytes())
            place[number] += len(run)
    for first, end in itertools.pairwise(offsets):
        out.seek(int(first) * PAIR.itemsize)
        pairs = np.frombuffer(out.read(int(end - first) * PAIR.itemsize), PAIR)
        out.seek(int(first) * PAIR.itemsize)
        out.write(_sorted(pairs, "score").tobytes())
    return offsets


def _in_parts(file: BinaryIO, num_pairs: int) -> Iterator[Array]:
    file.seek(0)
    for _ in range(0, num_pairs, PART):
        yield np.frombuffer(file.read(PART * PAIR.itemsize), PAIR)


# The folder


@contextmanager
def _new_folder(folder: Path, name: str) -> Iterator[Path]:
    """Yield a folder of a private name; it gets its own name, synced, if the block succeeds."""
    unfinished = folder / f".{name}.{uuid.uuid4().hex}"
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
        for file in unfinished.iterdir():
            sync(file)
        _rename(unfinished, folder / name)
        sync(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _rename(unfinished: Path, whole: Path) -> None:
    """Give a folder its name, unless another process has made the same index meanwhile."""
    if not (whole / "index.json").exists():
        shutil.rmtree(whole, ignore_errors=True)
        try:
            unfinished.rename(whole)
        except OSError:
            if not (whole / "index.json").exists():
                raise


def _remove_old(folder: Path, keep: str) -> None:
    """Remove indexes of older snapshots but the newest, and what a killed build left a day ago."""
    ours = [one for one in folder.iterdir() if NAME.fullmatch(one.name.lstrip(".").partition(".")[0])]
    whole = sorted((one for one in ours if NAME.fullmatch(one.name) and one.name != keep), reverse=True)
    left = [
        one
        for one in ours
        if one.name.startswith(".") and time.time() - one.stat().st_mtime > SECONDS_OF_A_BUILD
    ]
    for one in [*whole[INDEXES_KEPT - 1 :], *left]:
        shutil.rmtree(one, ignore_errors=True)
