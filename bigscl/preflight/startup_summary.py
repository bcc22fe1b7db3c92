"""Log lines at the start of a run: what it will do, and what it needs."""

import torch

from bigscl.common.text import size
from bigscl.config import Config
from bigscl.config.schedule import plan_epoch
from bigscl.preflight.forecast import Forecast, MemoryPhase, forecast
from bigscl.selection.k import expectation
from bigscl.store import label_counts, spec_for
from bigscl.training.run_folder import Data


def summary(
    config: Config, data: Data, world_size: int, heatmap_size: int, device: torch.device
) -> list[str]:
    """Return lines for people about what the run will do and what it needs."""
    index, spec = (
        data.train,
        spec_for(data.annotations, heatmap_size, 0, config.store.kept_scores(data.annotations.num_classes)),
    )
    plan = plan_epoch(config, index.shard_sizes, index.rows_per_shard, epoch=0, world_size=world_size)
    needs = forecast(config, spec, plan)
    lines = [
        f"run {config.run}: {index.num_samples:,} samples in {len(index.urls)} shards, "
        f"{index.num_classes} classes",
        f"world size {world_size} on {device.type}, {config.data.workers} loader workers each, "
        f"{plan.whole.num_steps} batches of {world_size} x {config.data.batch_size} images in "
        f"{needs.num_steps} steps per epoch, {config.schedule.epochs} epochs",
        _describe_division(needs, len(index.urls), world_size),
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


def _describe_division(needs: Forecast, num_shards: int, world_size: int) -> str:
    """Return how busy the ranks are, and what would change that."""
    idle = 1 - needs.busy_share
    line = f"ranks are idle {idle:.1%} of an epoch"
    if needs.imbalance > idle / 2:
        fit = max(1, num_shards // world_size) * world_size
        return (
            f"{line}: shards go whole to one rank, {needs.shards_per_rank.fewest} to "
            f"{needs.shards_per_rank.most} each. {fit} or {fit + world_size} shards of equal size, or "
            f"several times as many, would divide evenly"
        )
    return f"{line}: the last batch of each loader worker is not full. Fewer workers or more images lower it"


def _describe(phase: MemoryPhase) -> str:
    layout = phase.group.layout if phase.group.top is None else f"top {phase.group.top}"
    return (
        f"epochs {phase.epochs.start + 1} - {phase.epochs.stop}: {layout}, {size(phase.disk_bytes)} in "
        f"{phase.versions} versions, {size(phase.ram_bytes)} RAM per process, "
        f"{size(phase.image_bytes * 1000)} read and as much written per 1,000 images"
    )
