"""Log lines at the start of a run: what it will do, and what it needs."""

import torch

from bigscl.config import Config
from bigscl.store import spec_for
from bigscl.text import size
from bigscl.training.epoch_plan import plan_epoch
from bigscl.training.forecast import MemoryPhase, forecast
from bigscl.training.run import Data


def summary(
    config: Config, data: Data, world_size: int, heatmap_size: int, device: torch.device
) -> list[str]:
    """Return lines for people about what the run will do and what it needs."""
    index, spec = data.train, spec_for(data.annotations, heatmap_size, 0)
    plan = plan_epoch(config, index.shard_sizes, index.rows_per_shard, epoch=0, world_size=world_size)
    needs = forecast(config, spec, plan)
    lines = [
        f"run {config.run}: {index.num_samples:,} samples in {len(index.urls)} shards, "
        f"{index.num_classes} classes",
        f"world size {world_size} on {device.type}, {config.data.workers} loader workers each, "
        f"{plan.whole.num_steps} batches of {world_size} x {config.data.batch_size} images in "
        f"{needs.num_steps} steps per epoch, {config.schedule.epochs} epochs",
    ]
    if config.store.kind == "none":
        return [*lines, "no store: this objective remembers nothing"]
    disk = size(needs.disk_bytes)
    lines.append(f"store: at most {disk} on {config.store.kind}, heatmaps {heatmap_size} x {heatmap_size}")
    return [*lines, *map(_describe, needs.phases)]


def _describe(phase: MemoryPhase) -> str:
    layout = phase.group.layout if phase.group.top is None else f"top {phase.group.top}"
    return (
        f"epochs {phase.epochs.start} - {phase.epochs.stop - 1}: {layout}, {size(phase.disk_bytes)} in "
        f"{phase.versions} versions, {size(phase.ram_bytes)} RAM per process, "
        f"{size(phase.image_bytes * 1000)} read and as much written per 1,000 images"
    )
