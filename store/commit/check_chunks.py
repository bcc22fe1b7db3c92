"""Reading everything that a snapshot names, and reporting what is wrong with it."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from bigscl.store.errors import ChunkCorrupt
from bigscl.store.format.array_types import ARRAYS, Domain
from bigscl.store.heatmap_store import HeatmapStore


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
    domain = Domain(num_classes=store.spec.num_classes, last_epoch=store.snapshot.epoch)
    for plan in store.arrays.plans:
        try:
            values = store.arrays.read(shard, slot, (plan.name,), digests)[plan.name][: len(ids)]
        except ChunkCorrupt as error:
            bad, reason = store.arrays.unreadable(plan, shard, slot)[: len(ids)], str(error)
            # Every chunk is whole, but not all are of the version that the snapshot names.
            bad = bad if bad.any() else np.ones_like(bad)
        else:
            array = ARRAYS[plan.name]
            bad, reason = array.invalid(values, domain), f"expected {array.expected(domain)}"
        if bad.any():
            samples = ids[bad.reshape(len(ids), -1).any(axis=1)]
            yield Problem(shard=shard, array=plan.name, samples=tuple(samples.tolist()), reason=reason)
