"""Samples worth a look, chosen from all that a store remembers."""

from collections.abc import Iterator
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from store import HeatmapStore
from store.spec import Array
from tools.opening import Data
from tools.progress import progress

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
    ranked = _confident(store, data) if choice == "confident" else _changes(store, data)
    best = _best((ids, _interest(values, number)) for ids, values in ranked)
    return best[:count]


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


def _confident(store: HeatmapStore, data: Data) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32]]]:
    """Scores of the classes that are not annotated, shard by shard; annotated ones count nothing."""
    with progress("reading scores", store.spec.num_shards, "shards") as advance:
        for ids, scores in store.scores_by_shard(range(store.spec.num_shards)):
            yield ids, np.where(data.annotated(ids), -1, scores.astype(np.float32))
            advance(1, "looking for confident ones")


def _changes(store: HeatmapStore, data: Data) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32]]]:
    """How far scores moved since the snapshot before, shard by shard; untouched shards are left out."""
    older = [one for one in store.snapshots() if one.id < store.snapshot.id]
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
    pairs = zip(store.scores_by_shard(changed), before.scores_by_shard(changed), strict=True)
    with progress("reading scores", len(changed), "shards") as advance:
        for (ids, now), (_, then) in pairs:
            yield ids, np.abs(_float(now) - _float(then))
            advance(1, "looking for changes")


def _float(scores: Array) -> NDArray[np.float32]:
    return scores.astype(np.float32)


def _best(ranked: Iterator[Scored]) -> NDArray[np.int64]:
    """All ids by falling interest, ties to the lowest id."""
    parts = list(ranked)
    if not parts:
        return np.empty(0, np.int64)
    ids, interest = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return ids[np.lexsort((ids, -interest))]
