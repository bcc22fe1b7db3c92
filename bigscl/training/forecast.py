"""What a run will need, derived from its config, its shards and its plan: pure functions."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bigscl.config import Config
from bigscl.data.plan import Plan
from bigscl.store import (
    GroupSpec,
    StoreSpec,
    array_plans,
    history_bytes,
    shard_bytes,
)

MANY_BYTES = 100e9
UNEVEN = 0.05
CHECKSUM_BYTES = 4
# Small files: a zarr.json; a snapshot, and a number in it.
METADATA_BYTES = 1_000
SNAPSHOT_BYTES = 500
NUMBER_BYTES = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPhase:
    """A stretch of epochs in which the store has one layout."""

    epochs: range
    group: GroupSpec
    version_bytes: int
    """One version of one shard."""
    slot_bytes: int
    """One version of every shard."""
    versions: int
    """Of every shard on disk at most."""
    disk_bytes: int
    """All these versions."""
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
    last = config.schedule.epochs
    change = min(config.compact_after or last, last)
    layouts = zip((range(change), range(change, last)), _groups(config, spec), strict=False)
    ahead, behind = config.store.prefetch_batches, config.store.writeback_batches
    peak = max(open_shards(plan, rank, spec.rows_per_shard, ahead, behind) for rank in range(plan.world_size))
    moments = list(disk_moments(config, plan.num_steps))
    return [
        _phase(spec, group, epochs, peak, max(moment.versions[place] for moment in moments))
        for place, (epochs, group) in enumerate(layouts)
        if epochs
    ]


def _groups(config: Config, spec: StoreSpec) -> list[GroupSpec]:
    """The layout at first, and the one after the change if there is one."""
    counts, slots = config.store.ema == "debiased", config.store.slots
    groups = [GroupSpec(name="", layout=config.store.warmup_heatmaps, counts=counts, slots=slots)]
    if config.compact_after is not None:
        top = min(config.store.top or 0, spec.num_classes)
        groups.append(GroupSpec(name="", layout="topk", top=top, counts=counts, slots=slots))
    return groups


def _phase(spec: StoreSpec, group: GroupSpec, epochs: range, peak_shards: int, versions: int) -> MemoryPhase:
    version = shard_bytes(spec, group)
    return MemoryPhase(
        epochs=epochs,
        group=group,
        version_bytes=version,
        slot_bytes=version * spec.num_shards,
        versions=versions,
        disk_bytes=version * spec.num_shards * versions,
        image_bytes=2 * version * spec.num_shards / spec.num_samples,
        resident_bytes=version * peak_shards,
    )


def ram_needed(config: Config, phase: MemoryPhase) -> int:
    """Bytes of shards in RAM per process, within the limit if there is one."""
    limit = config.store.resident_gb
    return phase.resident_bytes if limit is None else min(int(limit * 2**30), phase.resident_bytes)


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
    config: Config,
    plan: Plan,
    phases: list[MemoryPhase],
    disk_bytes: int,
    free_bytes: int | None,
    ram_bytes: int,
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
    if free_bytes is not None and config.store.kind == "disk" and disk_bytes > free_bytes:
        yield f"the store needs {disk_bytes / 1e9:,.1f} GB, {free_bytes / 1e9:,.1f} GB are free at its place"


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskMoment:
    """What is on disk when an epoch, or a part of it, has been written, or old arrays were deleted."""

    recorded: int
    """Epochs in the history of the tracked samples."""
    versions: tuple[int, int]
    """Of every shard, in the layout at first and in the one after the change."""


def disk_moments(config: Config, num_steps: int) -> Iterator[DiskMoment]:
    """Follow what the trainer writes and deletes over the epochs.

    Slots that are free again keep their bytes until they are written again. The arrays of the layout at first
    are deleted when no kept checkpoint names them. Within an epoch a checkpoint counts as one of all shards.
    """
    on_disk: tuple[set[int], set[int]] = (set(), set())
    kept: list[tuple[int, int]] = []
    current = (0, -1)
    for epoch in range(config.schedule.epochs):
        for last in _saves(config, num_steps):
            layout = current[0]
            current = (layout, _free_slot({*kept, current}, layout, config.store.slots))
            on_disk[layout].add(current[1])
            yield DiskMoment(recorded=epoch, versions=(len(on_disk[0]), len(on_disk[1])))
            if last and epoch + 1 == config.compact_after:
                current = (1, 0)
                on_disk[1].add(0)
                yield DiskMoment(recorded=epoch, versions=(len(on_disk[0]), len(on_disk[1])))
            if not last or (epoch + 1) % config.checkpoint.every_epochs == 0:
                kept = [*kept, current][-config.keep_checkpoints :]
            if all(layout == 1 for layout, _ in (*kept, current)):
                on_disk[0].clear()
        yield DiskMoment(recorded=epoch + 1, versions=(len(on_disk[0]), len(on_disk[1])))


def _saves(config: Config, num_steps: int) -> list[bool]:
    """The commits of an epoch: whether each is its last. More than are kept change nothing."""
    every = config.checkpoint.every_steps
    steps = -(-num_steps // config.optimizer.accumulate)
    within = 0 if every is None else min((steps - 1) // every, config.keep_checkpoints + 1)
    return [False] * within + [True]


def _free_slot(named: set[tuple[int, int]], layout: int, slots: int) -> int:
    """The lowest slot that no retained snapshot names."""
    return next((slot for slot in range(slots) if (layout, slot) not in named), slots - 1)


def disk_needed(config: Config, spec: StoreSpec, plan: Plan) -> int:
    """Bytes of the store at the worst moment of the run, at most; less where chunks are compressed."""
    if config.store.kind == "none":
        return 0
    groups = _groups(config, spec)
    return max(
        _small_bytes(config, spec, groups)
        + _history_bytes(config, spec, moment.recorded)
        + sum(
            versions * spec.num_shards * (shard_bytes(spec, group) + _checksum_bytes(spec, group))
            for versions, group in zip(moment.versions, groups, strict=False)
        )
        for moment in disk_moments(config, plan.num_steps)
    )


def _checksum_bytes(spec: StoreSpec, group: GroupSpec) -> int:
    """Of all chunks of one version of a shard."""
    return sum(CHECKSUM_BYTES * -(-array.shape[2] // array.chunks[2]) for array in array_plans(spec, group))


def _small_bytes(config: Config, spec: StoreSpec, groups: list[GroupSpec]) -> int:
    """Of snapshots and zarr.json files."""
    arrays = max(len(array_plans(spec, group)) for group in groups)
    snapshot = SNAPSHOT_BYTES + NUMBER_BYTES * (spec.num_shards * (1 + arrays) + 2 * spec.num_classes)
    retained = config.keep_checkpoints + 2
    return retained * snapshot + METADATA_BYTES * (len(groups) * (arrays + 1) + 5)


def _history_bytes(config: Config, spec: StoreSpec, epochs: int) -> int:
    """Of the tracked samples over so many epochs."""
    tracked = min(config.store.tracked, spec.num_samples)
    without = epochs if config.compact_after is None else min(epochs, config.compact_after - 1)
    without = without if config.store.warmup_heatmaps == "scores" else 0
    whole, scores = (history_bytes(spec, tracked, heatmaps=heatmaps) for heatmaps in (True, False))
    return (epochs - without) * whole + without * scores
