"""How many bytes the store of a run takes on disk at most: what the trainer writes and deletes, followed."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from bigscl.config import Config
from bigscl.memory.open_memory import first_group
from bigscl.store import GroupSpec, StoreSpec, array_plans, history_bytes, stored_bytes

CHECKSUM_BYTES = 4
# Small files: a zarr.json; a snapshot, and a number in it.
METADATA_BYTES = 1_000
SNAPSHOT_BYTES = 500
NUMBER_BYTES = 20


def layouts(config: Config, spec: StoreSpec) -> list[GroupSpec]:
    """Return the first layout, and the one after the compaction if there is one."""
    first = first_group(config.store, ranking=config.selection.by == "spatial")
    if config.compact_after is None:
        return [first]
    return [first, replace(first, layout="topk", top=min(config.store.top or 0, spec.num_classes))]


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskMoment:
    """What is on disk after an epoch or a part of it was written, or after old arrays were deleted."""

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
            versions * spec.num_shards * (stored_bytes(spec, group) + _checksum_bytes(spec, group))
            for versions, group in zip(moment.versions, groups, strict=False)
        )
        for moment in disk_moments(config, num_steps)
    )


def _checksum_bytes(spec: StoreSpec, group: GroupSpec) -> int:
    """Return the bytes of the checksums of one version of a shard."""
    return sum(CHECKSUM_BYTES * -(-array.shape[2] // array.chunks[2]) for array in array_plans(spec, group))


def _small_bytes(config: Config, spec: StoreSpec, groups: list[GroupSpec]) -> int:
    """Return the bytes of snapshots and zarr.json files."""
    arrays = max(len(array_plans(spec, group)) for group in groups)
    snapshot = SNAPSHOT_BYTES + NUMBER_BYTES * (spec.num_shards * (1 + arrays) + 2 * spec.num_classes)
    retained = config.keep_checkpoints + 2
    return retained * snapshot + METADATA_BYTES * (len(groups) * (arrays + 1) + 5)


def _history_bytes(config: Config, spec: StoreSpec, epochs: int) -> int:
    """Return the bytes that the history of the tracked samples takes after so many epochs."""
    tracked = min(config.store.tracked, spec.num_samples)
    without = epochs if config.compact_after is None else min(epochs, config.compact_after - 1)
    without = without if config.store.warmup_heatmaps == "scores" else 0
    whole, scores = (history_bytes(spec, tracked, heatmaps=heatmaps) for heatmaps in (True, False))
    return (epochs - without) * whole + without * scores
