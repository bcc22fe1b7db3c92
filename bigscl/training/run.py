"""What a run is made of before it trains: its folder, its data, its store, and the sums it must pay."""

import json
import logging
import os
from dataclasses import dataclass

import torch

from bigscl.config import Config, ConfigError, changed_settings, to_yaml
from bigscl.data.index import Index, load_index
from bigscl.data.plan import Plan
from bigscl.evaluation.metrics import estimate_k
from bigscl.evaluation.predictions import true_labels
from bigscl.files import append_lines, read_json_object, write_text
from bigscl.processes.ranks import Ranks
from bigscl.store import (
    Annotations,
    HeatmapStore,
    NotAStore,
    Snapshot,
    StoreError,
    on_rank_zero,
    open_backend,
    read_spec,
    spec_for,
)
from bigscl.text import size
from bigscl.training.checkpoint import Checkpoints
from bigscl.training.forecast import disk_needed, memory_phases, ram_needed
from bigscl.training.log import environment

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Data:
    """The shards of a run, by their indexes."""

    train: Index
    val: Index | None
    annotations: Annotations
    """The positives that training may see."""
    positives_per_image: float | None
    """K, if the objective needs it."""


def open_data(config: Config) -> Data:
    """The indexes of the run's shards, with the labels that training may see."""
    train = load_index(config.data.train, config.data.train_index)
    if config.data.observed is not None:
        drawn = config.data.observed
        train = train.draw_observed(drawn.seed, drawn.positives, drawn.negatives)
    val = None if config.data.val is None else load_index(config.data.val, config.data.val_index)
    if val is not None and val.class_names != train.class_names:
        raise ValueError(
            f"data.val: its {val.num_classes} classes are not the {train.num_classes} of data.train. "
            f"Both need the same classes.txt."
        )
    return Data(
        train=train,
        val=val,
        annotations=train.annotations(config.data.labels),
        positives_per_image=_positives_per_image(config, val),
    )


def _positives_per_image(config: Config, val: Index | None) -> float | None:
    if not config.objective.needs.k:
        return None
    if config.selection.K != "auto":
        return float(config.selection.K)
    assert val is not None
    k = estimate_k(torch.from_numpy(true_labels(val, val.ids())[0]))
    logger.info("K = %.3f positives per image, from the %d validation images", k, val.num_samples)
    return k


class RunFolder:
    """The folder of a run: what it was started with, and its checkpoints."""

    def __init__(self, config: Config) -> None:
        self.path = config.run
        self.checkpoints = Checkpoints(self.path / "checkpoints", config.keep_checkpoints)
        self.id = ""
        """A name for the run that no other run has, wherever its folder is moved; known once it starts."""
        self.origin: set[int] = set()
        """The snapshot that the run started from, until it has saved a checkpoint of its own."""

    def read_id(self) -> str | None:
        """The run's id; None where there is no run.json, or a damaged one, which is a warning."""
        path = self.path / "run.json"
        if not path.exists():
            return None
        found = (read_json_object(path) or {}).get("id")
        if isinstance(found, str) and found:
            return found
        logger.warning(
            "%s: damaged, expected the run's id. It is recovered from a checkpoint or the store", path
        )
        return None

    def write_start(self, config: Config, command: list[str], world_size: int) -> None:
        """Write down the run's id, what it is started with, and what changed since it was last."""
        self.path.mkdir(parents=True, exist_ok=True)
        if self.read_id() != self.id:
            write_text(self.path / "run.json", json.dumps({"id": self.id}))
        self._compare(config)
        write_text(self.path / "config.yaml", to_yaml(config))
        started = json.dumps({**environment(command), "world_size": world_size})
        append_lines(self.path / "environment.jsonl", [started])

    def _compare(self, config: Config) -> None:
        try:
            changed = changed_settings(self.path / "config.yaml", config)
        except ConfigError as error:
            logger.warning("%s. It is written again with the settings of this start", error)
            return
        if changed:
            logger.warning("the config has changed since the run was started: %s", "; ".join(changed))

    def needed_snapshots(self) -> set[int]:
        """Snapshots that the run may have to resume from if it is killed now."""
        return self.checkpoints.snapshots() | self.origin


def open_store(
    config: Config,
    annotations: Annotations,
    heatmap_size: int,
    run: RunFolder,
    ranks: Ranks,
    snapshot: int | None,
) -> HeatmapStore | None:
    """The store at the snapshot of the checkpoint; without one, at its beginning (created if need be)."""
    settings = config.store
    if settings.kind == "none":
        return None
    url = store_url(config, run, ranks)

    def create() -> bytes:
        backend = open_backend(url, settings.options())
        if settings.kind == "memory":
            backend.delete_tree("")  # what an earlier start of this run left, when it was killed
        try:
            read_spec(backend)
        except NotAStore:
            HeatmapStore.create(
                url,
                annotations,
                heatmap_size=heatmap_size,
                layout=settings.warmup_heatmaps,
                slots=settings.slots,
                codec=settings.codec,
                checksum=settings.checksum,
                counts=settings.ema == "debiased",
                tracked=settings.tracked,
                options=settings.options(),
            )
        return b""

    if snapshot is None:
        on_rank_zero(ranks, create)
    return HeatmapStore.open(
        url,
        annotations=annotations,
        mode="w",
        snapshot=0 if snapshot is None else snapshot,
        run=run.id,
        transport=ranks,
        options=settings.options(),
    )


def store_url(config: Config, run: RunFolder, ranks: Ranks) -> str:
    """Where the run's store lives: on disk, in this process, or in memory that the ranks share."""
    if config.store.kind == "disk":
        return config.store_url
    if ranks.world_size == 1:
        return f"memory://{run.id}"
    if int(os.environ.get("LOCAL_WORLD_SIZE", ranks.world_size)) != ranks.world_size:
        raise ValueError("store.kind: memory is for one machine; ranks on several need store.kind: disk")
    return f"/dev/shm/bigscl-{run.id}"


def check_store(config: Config, annotations: Annotations, heatmap_size: int) -> list[Snapshot]:
    """The retained snapshots of the store on disk; none if there is no store. Refuses one of other data."""
    url = config.store_url
    try:
        store = HeatmapStore.open(url, annotations=annotations, options=config.store.options())
    except NotAStore:
        return []  # creating it, if a run may, finds out what is there instead
    if store.spec.heatmap_size != heatmap_size:
        raise StoreError(
            f"{url}: has heatmaps of side {store.spec.heatmap_size}, this network at data.size "
            f"{config.data.size} needs {heatmap_size}. Use another store.url."
        )
    return store.snapshots()


def summary(config: Config, data: Data, plan: Plan, heatmap_size: int, device: torch.device) -> list[str]:
    """What the run will do and what it needs, in lines for people."""
    index, world = data.train, plan.world_size
    lines = [
        f"run {config.run}: {index.num_samples:,} samples in {len(index.urls)} shards, "
        f"{index.num_classes} classes",
        f"world size {world} on {device.type}, {config.data.workers} loader workers each, "
        f"{plan.num_steps} steps of {world} x {config.data.batch_size} images per epoch, "
        f"{config.schedule.epochs} epochs",
    ]
    if config.store.kind == "none":
        return [*lines, "no store: this objective remembers nothing"]
    spec = spec_for(data.annotations, heatmap_size, 0)
    disk = size(disk_needed(config, spec, plan))
    lines.append(f"store: at most {disk} on {config.store.kind}, heatmaps {heatmap_size} x {heatmap_size}")
    for phase in memory_phases(config, spec, plan):
        layout = phase.group.layout if phase.group.top is None else f"top {phase.group.top}"
        lines.append(
            f"epochs {phase.epochs.start} - {phase.epochs.stop - 1}: {layout}, {size(phase.disk_bytes)} in "
            f"{phase.versions} versions, {size(ram_needed(config, phase))} RAM per process, "
            f"{size(phase.image_bytes * 1000)}/s for 1,000 images/s"
        )
    return lines
