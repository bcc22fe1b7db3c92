"""Samples to look at, chosen from all samples of a store."""

from collections.abc import Iterator
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from bigscl.common.user_error import UserError
from bigscl.memory.snapshot_state import SnapshotState
from bigscl.store import HeatmapStore, Snapshot
from bigscl.tools.halves import to_float32
from bigscl.tools.opening import Data
from bigscl.tools.passes import pass_over

Choice = Literal["random", "tracked", "most-changed", "confident"]
Scored = tuple[NDArray[np.int64], NDArray[np.float32]]


def choose_samples(
    store: HeatmapStore, data: Data, choice: Choice, count: int, number: int | None, seed: int
) -> NDArray[np.int64]:
    """Return the ids of up to `count` samples, the most interesting first; of class `number` if given."""
    if choice == "tracked":
        return _tracked(store, data, count, number)
    if choice == "random":
        return _random(data, count, number, seed)
    ranked = _confident if choice == "confident" else _changes
    return _best(ranked(store, data, number))[:count]


def _largest(values: NDArray[np.float32], number: int | None) -> NDArray[np.float32]:
    """Return the largest value of each sample over the classes, or its value of one class."""
    return values.max(axis=1) if number is None else values[:, number]


def _tracked(store: HeatmapStore, data: Data, count: int, number: int | None) -> NDArray[np.int64]:
    ids = np.array(store.spec.history_samples, np.int64)
    if not len(ids):
        raise UserError(
            f"{store.backend.url}: has no tracked samples (store.history_samples of its run is 0)"
        )
    return ids[_with_class(data, ids, number)][:count]


def _random(data: Data, count: int, number: int | None, seed: int) -> NDArray[np.int64]:
    ids = data.index.ids()
    ids = ids[_with_class(data, ids, number)]
    return np.sort(np.random.default_rng(seed).choice(ids, min(count, len(ids)), replace=False))


def _with_class(data: Data, ids: NDArray[np.int64], number: int | None) -> NDArray[np.bool_]:
    """Return which samples are annotated with the class; all, if no class is given."""
    if number is None:
        return np.ones(len(ids), bool)
    positives = data.annotations.classes == number
    rows = np.searchsorted(data.annotations.offsets, np.flatnonzero(positives), side="right") - 1
    found = np.isin(ids, rows)
    if not found.any():
        raise UserError(f"--class: no sample is annotated with {data.index.class_names[number]!r}")
    return found


def _confident(store: HeatmapStore, data: Data, number: int | None) -> Iterator[Scored]:
    """Yield the highest score of a class that is not annotated, for each sample, shard by shard."""

    def work(shard: int) -> Scored:
        ids, scores = next(store.scores_by_shard([shard]))
        return ids, _largest(np.where(data.annotated(ids), -1, to_float32(scores)), number)

    shards = range(store.spec.num_shards)
    return (found for _, found in pass_over("searching confident samples", shards, work, [store]))


def _changes(store: HeatmapStore, data: Data, number: int | None) -> Iterator[Scored]:
    """Yield the change of the scores since the previous snapshot, for the shards that changed."""
    older = snapshot_before(store)
    if older is None:
        raise UserError(
            f"{store.backend.url}: snapshot {store.snapshot.id} is the oldest one, so there is no "
            f"change to show. Use another --choose."
        )
    before = HeatmapStore(store.backend, store.spec, older, data.annotations)
    changed = [
        shard
        for shard, (new, old) in enumerate(zip(store.snapshot.slots, older.slots, strict=True))
        if (store.snapshot.group, new) != (older.group, old)
    ]

    def work(shard: int) -> Scored:
        (ids, now), (_, then) = (next(one.scores_by_shard([shard])) for one in (store, before))
        return ids, _largest(np.abs(to_float32(now) - to_float32(then)), number)

    return (found for _, found in pass_over("searching changed samples", changed, work, [store, before]))


def snapshot_before(store: HeatmapStore) -> Snapshot | None:
    """Return the retained snapshot before the store's own that has another state; None if there is none."""
    at = store.snapshot
    # Opening the store for writing creates a snapshot of the same state: no change.
    same = (at.group, at.slots)
    older = [one for one in store.snapshots() if one.id < at.id and (one.group, one.slots) != same]
    return older[-1] if older else None


def _best(ranked: Iterator[Scored]) -> NDArray[np.int64]:
    """Return all ids by falling value; equal values by id."""
    parts = list(ranked)
    if not parts:
        return np.empty(0, np.int64)
    ids, values = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return ids[np.lexsort((ids, -values))]


def next_epoch(store: HeatmapStore) -> int:
    """Return the first epoch that the store's snapshot has not finished."""
    return SnapshotState.of(store.snapshot, store.spec.num_classes).next_epoch
