"""Samples worth a look, chosen from all that a store remembers."""

from collections.abc import Iterator
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from bigscl.store import HeatmapStore
from bigscl.tools.halves import to_float32
from bigscl.tools.opening import Data
from bigscl.tools.passes import pass_over

Choice = Literal["random", "tracked", "most-changed", "confident"]
Scored = tuple[NDArray[np.int64], NDArray[np.float32]]


def choose_samples(
    store: HeatmapStore, data: Data, choice: Choice, count: int, number: int | None, seed: int
) -> NDArray[np.int64]:
    """Ids of up to `count` samples, the most interesting first; `number` is the only class that matters."""
    if choice == "tracked":
        return _tracked(store, data, count, number)
    if choice == "random":
        return _random(data, count, number, seed)
    ranked = _confident if choice == "confident" else _changes
    return _best(ranked(store, data, number))[:count]


def _interest(values: NDArray[np.float32], number: int | None) -> NDArray[np.float32]:
    """What a sample counts: its largest value over the classes, or that of the one class."""
    return values.max(axis=1) if number is None else values[:, number]


def _tracked(store: HeatmapStore, data: Data, count: int, number: int | None) -> NDArray[np.int64]:
    ids = np.array(store.spec.tracked, np.int64)
    if not len(ids):
        raise ValueError(f"{store.backend.url}: no samples are tracked in it (store.tracked of its run is 0)")
    return ids[_with_class(data, ids, number)][:count]


def _random(data: Data, count: int, number: int | None, seed: int) -> NDArray[np.int64]:
    ids = data.index.ids()
    ids = ids[_with_class(data, ids, number)]
    return np.sort(np.random.default_rng(seed).choice(ids, min(count, len(ids)), replace=False))


def _with_class(data: Data, ids: NDArray[np.int64], number: int | None) -> NDArray[np.bool_]:
    """Which samples are annotated with the class; all, if there is none."""
    if number is None:
        return np.ones(len(ids), bool)
    positives = data.annotations.classes == number
    rows = np.searchsorted(data.annotations.offsets, np.flatnonzero(positives), side="right") - 1
    found = np.isin(ids, rows)
    if not found.any():
        raise ValueError(f"--class: no sample is annotated with {data.index.class_names[number]!r}")
    return found


def _confident(store: HeatmapStore, data: Data, number: int | None) -> Iterator[Scored]:
    """The score of a class that is not annotated, shard by shard; annotated ones count nothing."""

    def work(shard: int) -> Scored:
        ids, scores = next(store.scores_by_shard([shard]))
        return ids, _interest(np.where(data.annotated(ids), -1, to_float32(scores)), number)

    shards = range(store.spec.num_shards)
    return (found for _, found in pass_over("looking for confident ones", shards, work, [store]))


def _changes(store: HeatmapStore, data: Data, number: int | None) -> Iterator[Scored]:
    """How far scores moved since the snapshot before, shard by shard; untouched shards are left out."""
    at = store.snapshot
    # A writer that opens the store gives its state a new number: that is no change to look at.
    same = (at.group, at.slots)
    older = [one for one in store.snapshots() if one.id < at.id and (one.group, one.slots) != same]
    if not older:
        raise ValueError(
            f"{store.backend.url}: snapshot {store.snapshot.id} is the oldest there is: no change to look at"
        )
    before = HeatmapStore(store.backend, store.spec, older[-1], data.annotations, writable=False)
    changed = [
        shard
        for shard, (new, old) in enumerate(zip(store.snapshot.slots, older[-1].slots, strict=True))
        if (store.snapshot.group, new) != (older[-1].group, old)
    ]

    def work(shard: int) -> Scored:
        (ids, now), (_, then) = (next(one.scores_by_shard([shard])) for one in (store, before))
        return ids, _interest(np.abs(to_float32(now) - to_float32(then)), number)

    return (found for _, found in pass_over("looking for changes", changed, work, [store, before]))


def _best(ranked: Iterator[Scored]) -> NDArray[np.int64]:
    """All ids by falling interest, ties to the lowest id."""
    parts = list(ranked)
    if not parts:
        return np.empty(0, np.int64)
    ids, interest = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return ids[np.lexsort((ids, -interest))]
