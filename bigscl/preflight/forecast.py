"""Forecast of a run from its config, shards and plan: disk, RAM, I/O, a fair division; and its summary."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from bigscl.common.text import size
from bigscl.config import Config
from bigscl.config.schedule import EpochPlan, plan_epoch
from bigscl.data.epoch_plan import Plan
from bigscl.data.index import Index
from bigscl.memory.open_memory import first_group
from bigscl.memory.score_history import epoch_bytes
from bigscl.selection.k import expectation, has_full_labels
from bigscl.store import (
    GroupSpec,
    StoreSpec,
    history_bytes,
    label_counts,
    shard_bytes,
    spec_for,
    stored_bytes,
    stored_plans,
)
from bigscl.training.run_folder import Data

MANY_BYTES = 100e9
CHECKSUM_BYTES = 4
# Small files: a zarr.json; a snapshot, and a number in it.
METADATA_BYTES = 1_000
SNAPSHOT_BYTES = 500
NUMBER_BYTES = 20


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
    shard_files: int
    """Files of a version of a shard: so many are read, and as many created, for a shard and epoch."""
    resident_bytes: int
    """Shards in RAM at the worst moment of an epoch, on the rank that has most, if there is no limit."""
    ram_bytes: int
    """The same within the limit `store.resident_gb`, if there is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Needs of a run. The trainer and `bigscl plan` print these figures."""

    phases: tuple[MemoryPhase, ...]
    """The layouts of the store over the run; none without a store."""
    disk_bytes: int
    """The store at the worst moment of the run, at most."""
    score_log_bytes: int
    """The scores of all epochs in the folder of the run."""
    num_steps: int
    """Optimizer steps of an epoch."""
    idle_workers: int
    """Loader workers without a batch."""
    busy_share: float
    """Samples of an epoch as a share of what full batches on all ranks in all its steps would hold."""


def forecast(config: Config, spec: StoreSpec, plan: EpochPlan) -> Forecast:
    """Return what a run needs, from the rows of its store and the plan of its first epoch."""
    streams = [stream for of_rank in plan.whole.streams for stream in of_rank]
    room = plan.whole.world_size * plan.whole.batch_size * plan.whole.num_steps
    return Forecast(
        phases=tuple(_phases(config, spec, plan.whole)),
        disk_bytes=disk_needed(config, spec, plan.whole.num_steps),
        score_log_bytes=_score_log_bytes(config, spec),
        num_steps=plan.num_steps,
        idle_workers=sum(len(stream.ids) == 0 for stream in streams),
        busy_share=sum(len(stream.ids) for stream in streams) / room,
    )


def _score_log_bytes(config: Config, spec: StoreSpec) -> int:
    kept = config.log.score_classes if config.store.kind == "disk" else 0
    return config.schedule.epochs * epoch_bytes(
        spec.num_samples, spec.num_classes, min(kept, spec.top_scores or kept)
    )


def _phases(config: Config, spec: StoreSpec, plan: Plan) -> Iterator[MemoryPhase]:
    if config.store.kind == "none":
        return
    last = config.schedule.epochs
    change = min(config.compact_after or last, last)
    ahead, behind = config.store.prefetch_batches, config.store.writeback_batches
    peak = max(open_shards(plan, rank, spec.rows_per_shard, ahead, behind) for rank in range(plan.world_size))
    moments = list(disk_moments(config, plan.num_steps))
    ranges = (range(change), range(change, last))
    for number, (epochs, group) in enumerate(zip(ranges, layouts(config, spec), strict=False)):
        if epochs:
            versions = max(moment.versions[number] for moment in moments)
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
        shard_files=_shard_files(spec, group),
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
    # The first and the last shard, which other ranks train too, stay, and updates of the first.
    return _most_at_once(first, last + ahead + behind) + 3 * (plan.world_size > 1)


def _most_at_once(first: NDArray[np.int64], last: NDArray[np.int64]) -> int:
    """Return the largest number of the intervals [first, last] that share a step."""
    opened = np.bincount(first, minlength=last.max() + 2)
    closed = np.bincount(last + 1, minlength=last.max() + 2)
    return int(np.cumsum(opened - closed).max())


def warnings(config: Config, needs: Forecast, free_bytes: int | None, ram_bytes: int) -> Iterator[str]:
    """Yield what will fail or be slow, and what to do about it."""
    if needs.idle_workers:
        yield (
            f"{needs.idle_workers} loader workers get no batch: lower data.workers or data.batch_size, or "
            f"start fewer processes"
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


# Bytes on disk: follows what the trainer writes and deletes


def layouts(config: Config, spec: StoreSpec) -> list[GroupSpec]:
    """Return the first layout, and the one after the compaction if there is one."""
    first = first_group(config.store, ranking=config.selection.by == "spatial")
    if config.compact_after is None:
        return [first]
    return [first, replace(first, layout="topk", top=min(config.store.top or 0, spec.num_classes))]


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskMoment:
    """Bytes on disk after an epoch or a part of it was written, or after old arrays were deleted."""

    recorded: int
    """Epochs in the history of the tracked samples."""
    versions: tuple[int, int]
    """Versions of every shard, in the first layout and in the one after the compaction."""


def disk_moments(config: Config, num_steps: int) -> Iterator[DiskMoment]:
    """Yield what is on disk after everything that the trainer writes or deletes over the epochs.

    Slots that are free again keep their bytes until they are written again. The arrays of the first layout
    are deleted when no kept checkpoint names them. A checkpoint within an epoch counts as one of all shards.
    """
    on_disk: tuple[set[int], set[int]] = (set(), set())
    kept: list[tuple[int, int]] = []
    current = (0, -1)
    # Until the first checkpoint a killed run starts over, from the empty first layout.
    start = [current]
    for epoch in range(config.schedule.epochs):
        for last in _saves(config, num_steps):
            layout = current[0]
            current = (layout, _free_slot({*kept, current}, layout, config.store.slots))
            on_disk[layout].add(current[1])
            if last and epoch + 1 == config.compact_after:
                current = (1, 0)
                on_disk[1].add(0)
            # The history is recorded with the last commit of an epoch, before anything is deleted.
            yield DiskMoment(recorded=epoch + last, versions=(len(on_disk[0]), len(on_disk[1])))
            if not last or (epoch + 1) % config.checkpoint.every_epochs == 0:
                kept = [*kept, current][-config.keep_checkpoints :]
                start = []
            if all(layout == 1 for layout, _ in (*start, *kept, current)):
                on_disk[0].clear()
        yield DiskMoment(recorded=epoch + 1, versions=(len(on_disk[0]), len(on_disk[1])))


def _saves(config: Config, num_steps: int) -> list[bool]:
    """Return for each commit of an epoch whether it is the last; no more commits than can matter."""
    # By time a save may come after any step.
    every = 1 if config.checkpoint.every_minutes is not None else config.checkpoint.every_steps
    steps = -(-num_steps // config.optimizer.accumulate)
    within = 0 if every is None else min((steps - 1) // every, config.keep_checkpoints + 1)
    return [False] * within + [True]


def _free_slot(named: set[tuple[int, int]], layout: int, slots: int) -> int:
    """Return the lowest slot that no retained snapshot names."""
    return next((slot for slot in range(slots) if (layout, slot) not in named), slots - 1)


def disk_needed(config: Config, spec: StoreSpec, num_steps: int) -> int:
    """Return the bytes of the store at the worst moment of the run, at most; compressed chunks take less."""
    if config.store.kind == "none":
        return 0
    groups = layouts(config, spec)
    return max(
        _small_bytes(config, spec, groups)
        + _history_bytes(config, spec, moment.recorded)
        + sum(
            versions
            * spec.num_shards
            * (stored_bytes(spec, group) + CHECKSUM_BYTES * _shard_files(spec, group))
            for versions, group in zip(moment.versions, groups, strict=False)
        )
        for moment in disk_moments(config, num_steps)
    )


def _shard_files(spec: StoreSpec, group: GroupSpec) -> int:
    """Return the files of one version of a shard: its chunks, each with a checksum."""
    return sum(-(-array.shape[2] // array.chunks[2]) for array in stored_plans(spec, group))


def _small_bytes(config: Config, spec: StoreSpec, groups: list[GroupSpec]) -> int:
    arrays = max(len(stored_plans(spec, group)) for group in groups)
    snapshot = SNAPSHOT_BYTES + NUMBER_BYTES * (spec.num_shards * (1 + arrays) + 2 * spec.num_classes)
    retained = config.keep_checkpoints + 2
    return retained * snapshot + METADATA_BYTES * (len(groups) * (arrays + 1) + 5)


def _history_bytes(config: Config, spec: StoreSpec, epochs: int) -> int:
    """Return the bytes that the history of the tracked samples takes after so many epochs."""
    history_samples = min(config.store.history_samples, spec.num_samples)
    without = epochs if config.compact_after is None else min(epochs, config.compact_after - 1)
    without = without if config.store.warmup_heatmaps == "scores" else 0
    whole, scores = (history_bytes(spec, history_samples, heatmaps=heatmaps) for heatmaps in (True, False))
    return (epochs - without) * whole + without * scores


# Summary at the start of a run


def summary(
    config: Config, data: Data, world_size: int, heatmap_size: int, device: torch.device
) -> list[str]:
    """Return lines for people about what the run will do and what it needs."""
    kept = config.store.kept_scores(data.annotations.num_classes)
    index, spec = data.train, spec_for(data.annotations, heatmap_size, 0, kept)
    plan = plan_epoch(config, index.shard_sizes, index.rows_per_shard, epoch=0, world_size=world_size)
    needs = forecast(config, spec, plan)
    lines = [
        f"run {config.run}: {index.num_samples:,} samples in {len(index.urls)} shards, "
        f"{index.num_classes} classes",
        f"world size {world_size} on {device.type}, {config.data.workers} loader workers each, "
        f"{plan.whole.num_steps} batches of {world_size} x {config.data.batch_size} images in "
        f"{needs.num_steps} steps per epoch, {config.schedule.epochs} epochs",
        f"ranks are idle {1 - needs.busy_share:.1%} of an epoch: the last batch of each is not full",
    ]
    if data.positives_per_image is not None:
        counts = data.annotations.counts()
        labels = label_counts(data.annotations, data.answered)
        lines.append(str(expectation(data.positives_per_image, labels, index.num_samples, counts)))
    if config.store.kind == "none":
        return [*lines, "no store: this objective remembers nothing"]
    disk = size(needs.disk_bytes)
    lines.append(f"store: at most {disk} on {config.store.kind}, heatmaps {heatmap_size} x {heatmap_size}")
    return [*lines, *map(_describe, needs.phases)]


def doubtful_validation(config: Config, val: Index | None) -> Iterator[str]:
    """Yield a warning if the metric that chooses the best epoch does not suit the validation labels."""
    if val is not None and config.validation.metric == "map" and not has_full_labels(val):
        yield (
            f"validation.metric: map, but none of the {val.num_samples:,} images of data.val has two labels: "
            f"it counts every other class that an image shows as a mistake, and chooses the best epoch by "
            f"that. Set validation.metric: top1, or give full labels (data.val_labels_file)"
        )


def _describe(phase: MemoryPhase) -> str:
    layout = phase.group.layout if phase.group.top is None else f"top {phase.group.top}"
    return (
        f"epochs {phase.epochs.start + 1} - {phase.epochs.stop}: {layout}, {size(phase.disk_bytes)} in "
        f"{phase.versions} versions, {size(phase.ram_bytes)} RAM per process, "
        f"{size(phase.image_bytes * 1000)} read and as much written per 1,000 images"
    )
