"""What a run needs, derived from its config, its shards and its plan: disk, RAM, I/O, and a fair division."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bigscl.common.text import size
from bigscl.config import Config
from bigscl.data.plan import Plan
from bigscl.memory.score_history import epoch_bytes
from bigscl.store import GroupSpec, StoreSpec, shard_bytes, stored_bytes
from bigscl.training.disk_forecast import disk_moments, disk_needed, layouts
from bigscl.training.schedule import EpochPlan

MANY_BYTES = 100e9
UNEVEN = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPhase:
    """A range of epochs in which the store has one layout."""

    epochs: range
    group: GroupSpec
    slot_bytes: int
    """One version of every shard."""
    versions: int
    """Versions of every shard on disk, at most."""
    disk_bytes: int
    """All these versions."""
    image_bytes: float
    """Bytes that are read for each image; as many are written."""
    resident_bytes: int
    """Shards in RAM at the worst moment of an epoch, on the rank that has most, if there is no limit."""
    ram_bytes: int
    """The same within the limit `store.resident_gb`, if there is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The smallest and the largest share of a rank, or of a worker."""

    fewest: int
    most: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What a run needs. The trainer and `bigscl plan` print these figures."""

    phases: tuple[MemoryPhase, ...]
    """The layouts of the store over the run; none without a store."""
    disk_bytes: int
    """The store at the worst moment of the run, at most."""
    score_log_bytes: int
    """The scores of all epochs in the folder of the run."""
    num_steps: int
    """Optimizer steps of an epoch."""
    samples_per_rank: Share
    shards_per_rank: Share
    shards_per_worker: Share
    idle_workers: int
    """Loader workers without a shard."""
    imbalance: float
    """The fraction by which the busiest rank's samples exceed the mean: the other ranks wait for it."""
    busy_share: float
    """Samples of an epoch as a share of what full batches on all ranks in all its steps would hold."""


def forecast(config: Config, spec: StoreSpec, plan: EpochPlan) -> Forecast:
    """Return what a run needs, from the rows of its store and the plan of its first epoch."""
    samples = [plan.whole.num_samples(rank) for rank in range(plan.whole.world_size)]
    workers = [len(stream.shards) for streams in plan.whole.streams for stream in streams]
    ranks = [sum(len(stream.shards) for stream in streams) for streams in plan.whole.streams]
    return Forecast(
        phases=tuple(_phases(config, spec, plan.whole)),
        disk_bytes=disk_needed(config, spec, plan.whole.num_steps),
        score_log_bytes=_score_log_bytes(config, spec),
        num_steps=plan.num_steps,
        samples_per_rank=Share(fewest=min(samples), most=max(samples)),
        shards_per_rank=Share(fewest=min(ranks), most=max(ranks)),
        shards_per_worker=Share(fewest=min(workers), most=max(workers)),
        idle_workers=workers.count(0),
        imbalance=max(samples) / (sum(samples) / len(samples)) - 1,
        busy_share=sum(samples) / (len(samples) * plan.whole.batch_size * plan.whole.num_steps),
    )


def _score_log_bytes(config: Config, spec: StoreSpec) -> int:
    kept = config.log.score_classes if config.store.kind == "disk" else 0
    return config.schedule.epochs * epoch_bytes(spec.num_samples, spec.num_classes, kept)


def _phases(config: Config, spec: StoreSpec, plan: Plan) -> Iterator[MemoryPhase]:
    if config.store.kind == "none":
        return
    last = config.schedule.epochs
    change = min(config.compact_after or last, last)
    ahead, behind = config.store.prefetch_batches, config.store.writeback_batches
    peak = max(open_shards(plan, rank, spec.rows_per_shard, ahead, behind) for rank in range(plan.world_size))
    moments = list(disk_moments(config, plan.num_steps))
    ranges = (range(change), range(change, last))
    for place, (epochs, group) in enumerate(zip(ranges, layouts(config, spec), strict=False)):
        if epochs:
            versions = max(moment.versions[place] for moment in moments)
            yield _phase(spec, group, epochs, peak, versions, config.store.resident_gb)


def _phase(
    spec: StoreSpec, group: GroupSpec, epochs: range, peak_shards: int, versions: int, limit_gb: float | None
) -> MemoryPhase:
    version = stored_bytes(spec, group)
    resident = shard_bytes(spec, group) * peak_shards
    return MemoryPhase(
        epochs=epochs,
        group=group,
        slot_bytes=version * spec.num_shards,
        versions=versions,
        disk_bytes=version * spec.num_shards * versions,
        image_bytes=version * spec.num_shards / spec.num_samples,
        resident_bytes=resident,
        ram_bytes=resident if limit_gb is None else min(int(limit_gb * 2**30), resident),
    )


def open_shards(plan: Plan, rank: int, rows_per_shard: int, ahead: int, behind: int) -> int:
    """Return how many shards of a rank are in RAM at once, at most: each from its first batch to its last.

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
    """Return the largest number of the intervals [first, last] that share a step."""
    opened = np.bincount(first, minlength=last.max() + 2)
    closed = np.bincount(last + 1, minlength=last.max() + 2)
    return int(np.cumsum(opened - closed).max())


def warnings(config: Config, needs: Forecast, free_bytes: int | None, ram_bytes: int) -> Iterator[str]:
    """Yield what will fail or be slow, and what to do about it."""
    if needs.idle_workers:
        yield (
            f"{needs.idle_workers} loader workers get no shard: write more, smaller shards, or lower "
            f"data.workers"
        )
    if needs.imbalance > UNEVEN:
        yield (
            f"the busiest rank has {needs.imbalance:.0%} more samples than the mean, and the others "
            f"wait for it: write more, smaller shards"
        )
    for phase in needs.phases:
        yield from _warnings_of(config, phase, ram_bytes)
    # Of a store elsewhere, the scores are at another place.
    beside = needs.score_log_bytes if config.store.url is None else 0
    if free_bytes is not None and config.store.kind == "disk" and needs.disk_bytes + beside > free_bytes:
        scores = f" and the scores of its epochs {size(beside)}" if beside else ""
        yield f"the store needs {size(needs.disk_bytes)}{scores}, {size(free_bytes)} are free at its place"


def _warnings_of(config: Config, phase: MemoryPhase, ram_bytes: int) -> Iterator[str]:
    if phase.group.layout == "dense" and phase.disk_bytes > MANY_BYTES:
        advice = "store.warmup_heatmaps: scores" if config.store.top else "store.top: 10"
        yield f"dense heatmaps take {size(phase.disk_bytes)}: consider {advice}"
    if phase.resident_bytes > phase.ram_bytes:
        yield (
            f"store.resident_gb: {config.store.resident_gb:g}, but {phase.resident_bytes / 2**30:.2f} "
            f"GiB of shards are open at once: some are read and written more than once per epoch"
        )
    elif phase.ram_bytes > ram_bytes / 2:
        yield (
            f"{size(phase.ram_bytes)} of shards are open at once, more than half of this "
            f"machine's RAM: lower data.shuffle_buffer or data.workers"
        )
