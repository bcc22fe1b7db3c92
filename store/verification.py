"""Reading everything a snapshot names, and saying what is wrong with it."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from bigscl.store.errors import ChunkCorrupt
from bigscl.store.heatmap_store import HeatmapStore
from bigscl.store.layout import NEVER, ONE_BITS
from bigscl.store.spec import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Something wrong with one array of one shard, and the samples it touches."""

    shard: int
    array: str
    samples: tuple[int, ...]
    reason: str


def verify(store: HeatmapStore, shards: Iterable[int] | None = None) -> Iterator[tuple[int, list[Problem]]]:
    """(shard, its problems) for each shard the snapshot names; nothing is changed."""
    slots = store.snapshot.slots
    for shard in range(store.spec.num_shards) if shards is None else shards:
        if slots[shard] >= 0:
            yield shard, list(_problems(store, shard, slots[shard]))


def _problems(store: HeatmapStore, shard: int, slot: int) -> Iterator[Problem]:
    ids, digests = store.spec.sample_ids(shard), store.snapshot.digests_of(shard)
    for plan in store.arrays.plans:
        try:
            values = store.arrays.read(shard, slot, (plan.name,), digests)[plan.name][: len(ids)]
        except ChunkCorrupt as error:
            bad, reason = store.arrays.unreadable(plan, shard, slot)[: len(ids)], str(error)
            # Every chunk is whole, but not all are of the version that the snapshot names.
            bad = bad if bad.any() else np.ones_like(bad)
        else:
            bad, reason = _invalid(store, plan.name, values)
        if bad.any():
            samples = ids[bad.reshape(len(ids), -1).any(axis=1)]
            yield Problem(shard=shard, array=plan.name, samples=tuple(samples.tolist()), reason=reason)


def _invalid(store: HeatmapStore, name: str, values: Array) -> tuple[Array, str]:
    """Where an array holds what it cannot, and what it should hold."""
    if name in ("scores", "heatmaps"):
        # The maximum first: comparing every value would cost a third of the whole reading.
        fine = not values.size or values.view(np.uint16).max() <= ONE_BITS
        bad = np.zeros(len(values), bool) if fine else values.view(np.uint16) > ONE_BITS
        return bad, "values outside [0, 1]"
    if name == "classes":
        rising = np.diff(values.astype(np.int64), axis=1, prepend=-1) > 0
        last = store.spec.num_classes - 1
        return ~rising | (values > last), f"class ids not ascending within 0..{last}"
    if name == "visited":
        last = store.snapshot.epoch
        return (values < NEVER) | (values > last), f"visit stamps outside -1..{last}, the snapshot's epoch"
    return np.zeros(len(values), bool), ""
