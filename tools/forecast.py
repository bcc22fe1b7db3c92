"""What a run will need, worked out from its config, its shards and its plan. Pure functions."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from bigscl.config import Config
from bigscl.data.plan import Plan
from store import GroupSpec, StoreSpec
from store.layout import shard_bytes

MANY_BYTES = 100e9
UNEVEN = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPhase:
    """A stretch of epochs in which the store has one layout."""

    epochs: range
    group: GroupSpec
    version_bytes: int
    """One version of one shard."""
    slot_bytes: int
    """One version of every shard."""
    disk_bytes: int
    """As many versions as there are slots."""
    image_bytes: float
    """Read and written again for each image."""
    resident_bytes: int
    """Shards in RAM at the worst moment of an epoch, on the rank that has most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What each rank, or each worker, is dealt."""

    fewest: int
    most: int


def memory_phases(config: Config, spec: StoreSpec, plan: Plan) -> list[MemoryPhase]:
    """The layouts of the store over the run; none where there is no store."""
    if config.store.kind == "none":
        return []
    counts, last = config.store.ema == "debiased", config.phases().epochs
    change = config.compact_after or last
    first = GroupSpec(name="", layout=config.store.warmup_heatmaps, counts=counts, slots=config.store.slots)
    layouts = [(range(min(change, last)), first)]
    if change < last:
        top = min(config.store.top or 0, spec.num_classes)
        later = GroupSpec(name="", layout="topk", top=top, counts=counts, slots=config.store.slots)
        layouts.append((range(change, last), later))
    ahead, behind = config.store.prefetch_batches, config.store.writeback_batches
    peak = max(open_shards(plan, rank, spec.rows_per_shard, ahead, behind) for rank in range(plan.world_size))
    return [_phase(spec, group, epochs, peak) for epochs, group in layouts]


def _phase(spec: StoreSpec, group: GroupSpec, epochs: range, peak_shards: int) -> MemoryPhase:
    version = shard_bytes(spec, group)
    return MemoryPhase(
        epochs=epochs,
        group=group,
        version_bytes=version,
        slot_bytes=version * spec.num_shards,
        disk_bytes=version * spec.num_shards * group.slots,
        image_bytes=2 * version * spec.num_shards / spec.num_samples,
        resident_bytes=version * peak_shards,
    )


def open_shards(plan: Plan, rank: int, rows_per_shard: int, ahead: int, behind: int) -> int:
    """Shards of a rank that are in RAM at once, at most: each from its first batch to its last.

    Rows are read `ahead` batches before their step and written up to `behind` batches after it.
    """
    batches = list(plan.batches(rank))
    if not batches:
        return 0
    shards = np.concatenate(batches) // rows_per_shard
    steps = np.repeat(np.arange(len(batches)), [len(ids) for ids in batches])
    _, places = np.unique(shards, return_inverse=True)
    first = np.full(places.max() + 1, len(batches))
    last = np.zeros(places.max() + 1, np.int64)
    np.minimum.at(first, places, steps)
    np.maximum.at(last, places, steps)
    return _most_at_once(first, last + ahead + behind)


def _most_at_once(first: NDArray[np.int64], last: NDArray[np.int64]) -> int:
    """The largest number of the intervals [first, last] that share a step."""
    opened = np.bincount(first, minlength=last.max() + 2)
    closed = np.bincount(last + 1, minlength=last.max() + 2)
    return int(np.cumsum(opened - closed).max())


def samples_per_rank(plan: Plan) -> Share:
    """Samples of the rank with fewest and of the one with most."""
    counts = [plan.num_samples(rank) for rank in range(plan.world_size)]
    return Share(fewest=min(counts), most=max(counts))


def shards_per_rank(plan: Plan) -> Share:
    """Shards of the rank with fewest and of the one with most."""
    counts = [sum(len(stream.shards) for stream in streams) for streams in plan.streams]
    return Share(fewest=min(counts), most=max(counts))


def shards_per_worker(plan: Plan) -> Share:
    """Shards of the loader worker with fewest and of the one with most."""
    counts = [len(stream.shards) for streams in plan.streams for stream in streams]
    return Share(fewest=min(counts), most=max(counts))


def imbalance(plan: Plan) -> float:
    """How much more than the mean the busiest rank has to do: the others wait for it."""
    counts = [plan.num_samples(rank) for rank in range(plan.world_size)]
    return max(counts) / (sum(counts) / len(counts)) - 1


def warnings(
    config: Config, plan: Plan, phases: list[MemoryPhase], free_bytes: int | None, ram_bytes: int
) -> Iterator[str]:
    """What will go wrong or slowly, and what to do about it."""
    if shards_per_worker(plan).fewest == 0:
        idle = sum(not len(stream.shards) for streams in plan.streams for stream in streams)
        yield f"{idle} loader workers get no shard: write more, smaller shards, or lower data.workers"
    if imbalance(plan) > UNEVEN:
        yield (
            f"the busiest rank has {imbalance(plan):.0%} more samples than the mean, and the others "
            f"wait for it: write more, smaller shards"
        )
    for phase in phases:
        if phase.group.layout == "dense" and phase.disk_bytes > MANY_BYTES:
            advice = "store.warmup_heatmaps: scores" if config.store.top else "store.top: 10"
            yield f"dense heatmaps take {phase.disk_bytes / 1e9:,.0f} GB: consider {advice}"
        limit = None if config.store.resident_gb is None else config.store.resident_gb * 2**30
        if limit is not None and phase.resident_bytes > limit:
            yield (
                f"store.resident_gb: {config.store.resident_gb:g}, but {phase.resident_bytes / 2**30:.2f} "
                f"GiB of shards are open at once: some are read and written more than once per epoch"
            )
        elif phase.resident_bytes > ram_bytes / 2:
            yield (
                f"{phase.resident_bytes / 1e9:.1f} GB of shards are open at once, more than half of this "
                f"machine's RAM: lower data.shuffle_buffer or data.workers"
            )
    needed = disk_needed(phases)
    if free_bytes is not None and config.store.kind == "disk" and needed > free_bytes:
        yield f"the store needs {needed / 1e9:,.1f} GB, {free_bytes / 1e9:,.1f} GB are free at its place"


def disk_needed(phases: list[MemoryPhase]) -> int:
    """Bytes at the worst moment: full slots; or, at a change of layout, those and a version of the new."""
    worst = max((phase.disk_bytes for phase in phases), default=0)
    changes = (old.disk_bytes + new.slot_bytes for old, new in pairwise(phases))
    return max([worst, *changes])
