"""What a run is made of before it trains: its folder, its data, its store, and the sums it must pay."""

import json
import logging
import os
import uuid
from dataclasses import dataclass
from pathlib import Path

import torch

from bigscl.checkpoint import Checkpoint, Checkpoints
from bigscl.config import Config
from bigscl.config_file import NEEDS_K, changed_settings, to_yaml
from bigscl.data.index import Index, load_index
from bigscl.data.plan import Plan
from bigscl.forecast import disk_needed, memory_phases, ram_needed
from bigscl.log import environment
from bigscl.metrics import estimate_k
from bigscl.predictions import true_labels
from bigscl.ranks import Ranks
from bigscl.units import size
from store import Annotations, HeatmapStore, StoreError
from store.backends import open_backend
from store.errors import NotAStore
from store.opening import read_spec, spec_for
from store.transport import on_rank_zero

logger = logging.getLogger(__name__)
Resume = str
"""`auto`, `never`, or the path of a checkpoint."""


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
    if config.objective.base not in NEEDS_K:
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

    def start(self, config: Config, resume: Resume, command: list[str], ranks: Ranks) -> Checkpoint | None:
        """The checkpoint to go on from, if any; on a new run, its folder with config and environment."""

        def prepare() -> bytes:
            found = self._choose(resume)
            self.path.mkdir(parents=True, exist_ok=True)
            self._compare(config)
            if not (self.path / "run.json").exists():
                (self.path / "run.json").write_text(json.dumps({"id": uuid.uuid4().hex}))
            (self.path / "config.yaml").write_text(to_yaml(config))
            with (self.path / "environment.jsonl").open("a") as file:
                file.write(json.dumps({**environment(command), "world_size": ranks.world_size}) + "\n")
            return b"" if found is None else os.fsencode(found.path)

        chosen = on_rank_zero(ranks, prepare)
        return Checkpoint(Path(os.fsdecode(chosen))) if chosen else None

    @property
    def id(self) -> str:
        """A name for the run that no other run has, wherever its folder is moved."""
        return str(json.loads((self.path / "run.json").read_text())["id"])

    def _choose(self, resume: Resume) -> Checkpoint | None:
        latest = self.checkpoints.latest()
        if resume == "auto":
            return latest
        if resume == "never":
            if latest is not None:
                raise ValueError(
                    f"{self.path}: has checkpoints up to {latest.path.name}, and --resume is never. "
                    f"Choose another run folder, or leave --resume away to go on."
                )
            return None
        path = Path(resume)
        if not (path / "progress.json").exists():
            raise ValueError(f"--resume {resume}: not a checkpoint folder (no progress.json in it)")
        return Checkpoint(path)

    def _compare(self, config: Config) -> None:
        if changed := changed_settings(self.path / "config.yaml", config):
            logger.warning("the config has changed since the run was started: %s", "; ".join(changed))


def open_store(
    config: Config,
    annotations: Annotations,
    heatmap_size: int,
    run: RunFolder,
    ranks: Ranks,
    snapshot: int | None,
) -> HeatmapStore | None:
    """The run's store, made if it is not there, at the snapshot of the checkpoint (or at its beginning)."""
    settings = config.store
    if settings.kind == "none":
        return None
    if settings.kind == "memory" and snapshot is not None:
        raise ValueError(
            f"{run.path}: its store was in memory (store.kind: memory) and ended with the process, so it "
            f"cannot be resumed. Start again in another folder, with store.kind: disk if it should be."
        )
    url = _store_url(config, run, ranks)

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

    on_rank_zero(ranks, create)
    _check_ours(url, config, run, heatmap_size, snapshot)
    return HeatmapStore.open(
        url,
        annotations=annotations,
        mode="w",
        snapshot=0 if snapshot is None else snapshot,
        run=run.id,
        transport=ranks,
        options=settings.options(),
    )


def _store_url(config: Config, run: RunFolder, ranks: Ranks) -> str:
    if config.store.kind == "disk":
        return config.store_url
    if ranks.world_size == 1:
        return f"memory://{run.id}"
    if int(os.environ.get("LOCAL_WORLD_SIZE", ranks.world_size)) != ranks.world_size:
        raise ValueError("store.kind: memory is for one machine; ranks on several need store.kind: disk")
    return f"/dev/shm/bigscl-{run.id}"


def _check_ours(url: str, config: Config, run: RunFolder, heatmap_size: int, snapshot: int | None) -> None:
    """Refuse a store that another run has written, or that was made for maps of another size."""
    store = HeatmapStore.open(url, options=config.store.options())
    if store.spec.heatmap_size != heatmap_size:
        raise StoreError(
            f"{url}: has heatmaps of side {store.spec.heatmap_size}, this network at data.size "
            f"{config.data.size} needs {heatmap_size}. Use another store.url."
        )
    if snapshot is None and store.snapshot.id > 0 and store.snapshot.run != run.id:
        raise StoreError(
            f"{url}: was written by run {store.snapshot.run}, this is a new one. Use another store.url, "
            f"or go on with that run in its own folder."
        )


def summary(config: Config, data: Data, plan: Plan, heatmap_size: int, device: torch.device) -> list[str]:
    """What the run will do and what it needs, in lines for people."""
    index, world = data.train, plan.world_size
    lines = [
        f"run {config.run}: {index.num_samples:,} samples in {len(index.urls)} shards, "
        f"{index.num_classes} classes",
        f"world size {world} on {device.type}, {config.data.workers} loader workers each, "
        f"{plan.num_steps} steps of {world} x {config.data.batch_size} images per epoch, "
        f"{config.phases().epochs} epochs",
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
