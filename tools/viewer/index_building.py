"""Build the index of a snapshot's scores, in one pass over the store, into a folder that appears whole."""

# Shapes: n samples of a shard, L classes.

import itertools
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from bigscl.common.digests import FILES, file_digest, write_sealed
from bigscl.common.files import sync
from bigscl.store import Array, HeatmapStore, Snapshot, StoreError, choose_classes
from bigscl.tools.shared.open_store import Data
from bigscl.tools.shared.shard_passes import (
    SnapshotThresholds,
    count_by_class,
    expected_at,
    pass_over,
    to_float32,
)
from bigscl.tools.viewer.score_index import (
    ABSENT,
    ANNOTATED,
    EXPECTED,
    FORMAT,
    HEAD,
    KNOWN,
    ORDERS,
    PAIR,
    PRESENT,
    ScoreIndex,
    index_name,
    score_bits,
    sorted_pairs,
    to_bytes,
)

ALL_PAIRS = 2**24
KEPT = 10
BINS = 20
INDEXES_KEPT = 2
SECONDS_OF_A_BUILD = 86_400
PART = 2**20
NAME = re.compile(r"snapshot-\d{8}-[0-9a-f]{12}")
Advance = Callable[[int, int], None]


def build_index(folder: Path, store: HeatmapStore, data: Data, advance: Advance | None = None) -> ScoreIndex:
    """Return the index of the store's snapshot, made now; `advance` is told (shards done, of all)."""
    while True:
        before = snapshot_before(store)
        try:
            return _build_index(folder, store, data, before, advance)
        except StoreError:
            # The run may drop the snapshot before while it is read: then another one is compared with.
            if before is None or any(snapshot.id == before.id for snapshot in store.snapshots()):
                raise


def snapshot_before(store: HeatmapStore) -> Snapshot | None:
    """Return the retained snapshot before the store's own that has another state; None if there is none."""
    at = store.snapshot
    # Opening the store for writing creates a snapshot of the same state: no change.
    same = (at.group, at.slots)
    older = [
        snapshot
        for snapshot in store.snapshots()
        if snapshot.id < at.id and (snapshot.group, snapshot.slots) != same
    ]
    return older[-1] if older else None


def _build_index(
    folder: Path, store: HeatmapStore, data: Data, before: Snapshot | None, advance: Advance | None
) -> ScoreIndex:
    start = time.monotonic()
    older = None if before is None else HeatmapStore(store.backend, store.spec, before, data.annotations)
    expected = expected_at(store)
    with _new_folder(folder, index_name(store)) as unfinished:
        pass_ = _Pass(store, older, data, expected)
        title = f"index of snapshot {store.snapshot.id}"
        with (unfinished / "parts.bin").open("wb+") as parts, (unfinished / "pairs.bin").open("wb+") as out:
            stores = [store] if older is None else [store, older]
            for shard, result in pass_over(title, range(store.spec.num_shards), pass_.read, stores):
                pass_.add(result)
                parts.write(result.pairs.tobytes())
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
            "full_labels": data.index.full is not None,
            "note": expected.note,
            "recomputed": expected.recomputed,
            "seconds": time.monotonic() - start,
            FILES: {file.name: file_digest(file) for file in sorted(unfinished.iterdir())},
        }
        write_sealed(unfinished / HEAD, head)
    _remove_old(folder, keep=index_name(store))
    return ScoreIndex(folder / index_name(store))


# One shard


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Shard:
    """Values that the pass keeps for one shard."""

    pairs: Array
    orders: dict[str, Array]
    counts: dict[str, NDArray[np.int64]]
    together: NDArray[np.int64]


class _Pass:
    """One pass over a store: what it reads of a shard, and what it adds up."""

    def __init__(
        self, store: HeatmapStore, older: HeatmapStore | None, data: Data, expected: SnapshotThresholds
    ) -> None:
        self._store, self._older, self._data, self._expected = store, older, data, expected
        self._classes = store.spec.num_classes
        self.keep_all = store.spec.num_samples * self._classes <= ALL_PAIRS
        self.num_pairs = 0
        self._counts: dict[str, Any] = {}
        self._orders: dict[str, list[Array]] = {name: [] for name in (*ORDERS, "row")}
        self._together: list[NDArray[np.int64]] = []

    def read(self, shard: int) -> _Shard:
        ids = self._store.spec.sample_ids(shard)
        rows = self._store.load_shard(shard).take(slice(0, len(ids)))
        flags = self._flags(ids, self._expected.expected(rows.ranked_by(), ids))
        change = self._change(shard, rows.scores)
        seen = self._store.scores_without_initial_value(rows, ids).astype(np.float16)
        peaks, has_heat = self._peaks(rows, ids)
        values: dict[str, Array] = {
            "score": score_bits(seen),
            "change": score_bits(change),
            "peak": peaks,
            "flags": flags,
        }
        kept = self._kept(seen, flags)
        places: dict[str, tuple[Array, Array]] = {}
        open_ = np.where(flags & (ANNOTATED | ABSENT), 0, values["score"])
        apart = np.where(has_heat, np.abs(to_float32(seen) - peaks / np.float32(255)), -1)
        for name, by in {"surprise": open_, "change": values["change"], "heat": apart}.items():
            places[name] = np.arange(len(ids)), by.argmax(axis=1)
        orders = {name: _pairs(ids, values, at) for name, at in places.items()}
        return _Shard(
            pairs=_pairs(ids, values, np.nonzero(kept)),
            orders={**orders, "row": orders["surprise"]},
            counts=_counted(flags, values["score"], self._data.index.full is not None),
            together=_together(flags),
        )

    def _flags(self, ids: NDArray[np.int64], expected: NDArray[np.bool_]) -> NDArray[np.uint8]:
        index = self._data.index
        flags = np.where(expected, np.uint8(EXPECTED), np.uint8(0))
        flags[self._data.annotated(ids)] |= ANNOTATED
        if self._data.labels == "given":
            flags[index.negatives.entries(ids)] |= ABSENT
        if index.full is not None:
            truth = index.labels_of(ids, "full")
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
        start = self._store.initial_values
        heat = np.asarray((rows if start is None else start.without_initial_value(rows, ids)).heatmaps)
        hottest = score_bits(heat).reshape(*heat.shape[:2], -1).max(axis=2)
        kept = rows.kept_classes().astype(np.int64)
        np.put_along_axis(peaks, kept, to_bytes(hottest.view(np.float16)), axis=1)
        np.put_along_axis(has_heat, kept, True, axis=1)
        return peaks, has_heat

    def _kept(self, scores: Array, flags: NDArray[np.uint8]) -> NDArray[np.bool_]:
        if self.keep_all:
            return np.ones(scores.shape, bool)
        kept: NDArray[np.bool_] = flags & (ANNOTATED | EXPECTED | PRESENT) != 0
        highest = choose_classes(scores, np.zeros(scores.shape, bool), min(KEPT, self._classes))
        np.put_along_axis(kept, highest, True, axis=1)
        return kept

    def add(self, found: _Shard) -> None:
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
            np.save(folder / f"{name}.npy", pairs if name == "row" else sorted_pairs(pairs, name))
        np.savez(
            folder / "classes.npz",
            offsets=offsets,
            score=self._expected.score,
            tie_id=self._expected.tie_id,
            together=_summed(self._together),
            **self._counts,
        )


def _pairs(ids: NDArray[np.int64], values: dict[str, Array], places: tuple[Array, ...]) -> Array:
    pairs = np.empty(len(places[0]), PAIR)
    pairs["row"], pairs["class"] = ids[places[0]], places[1]
    for name, array in values.items():
        pairs[name] = array[places]
    return pairs


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
    ends = offsets[:-1].copy()
    for part in _in_parts(parts, num_pairs):
        part = part[np.argsort(part["class"], kind="stable")]
        numbers, firsts = np.unique(part["class"], return_index=True)
        for number, run in zip(numbers, np.split(part, firsts[1:]), strict=True):
            out.seek(int(ends[number]) * PAIR.itemsize)
            out.write(run.tobytes())
            ends[number] += len(run)
    for first, end in itertools.pairwise(offsets):
        out.seek(int(first) * PAIR.itemsize)
        pairs = np.frombuffer(out.read(int(end - first) * PAIR.itemsize), PAIR)
        out.seek(int(first) * PAIR.itemsize)
        out.write(sorted_pairs(pairs, "score").tobytes())
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
    try:
        unfinished.rename(whole)
    except OSError:
        # Only what has no head may go: the other process reads its index by now.
        if not (whole / HEAD).exists():
            shutil.rmtree(whole, ignore_errors=True)
            unfinished.rename(whole)


def _remove_old(folder: Path, keep: str) -> None:
    """Remove indexes of older snapshots but the newest, and what a killed build left a day ago."""
    ours = [path for path in folder.iterdir() if NAME.fullmatch(path.name.lstrip(".").partition(".")[0])]
    whole = sorted((path for path in ours if NAME.fullmatch(path.name) and path.name != keep), reverse=True)
    for path in whole[INDEXES_KEPT - 1 :]:
        shutil.rmtree(path, ignore_errors=True)
    for path in ours:
        # Another process may give it its name meanwhile.
        with suppress(FileNotFoundError):
            if path.name.startswith(".") and time.time() - path.stat().st_mtime > SECONDS_OF_A_BUILD:
                shutil.rmtree(path, ignore_errors=True)
