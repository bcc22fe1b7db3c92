"""What a run is made of before it trains: its data, its folder and its store."""

import json
import logging
import os
from dataclasses import dataclass

import torch

from bigscl.config import Config, ConfigError, changed_settings, to_yaml
from bigscl.data.index import Index, load_index
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
)
from bigscl.training.checkpoint import Checkpoints
from bigscl.training.log import environment

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Data:
    """The indexes of a run's shards, and the labels that training may see."""

    train: Index
    val: Index | None
    annotations: Annotations
    """The positives that training may see."""
    positives_per_image: float | None
    """K, if the objective needs it."""


def open_data(config: Config) -> Data:
    """Read the indexes of the run's shards, and choose the labels that training may see."""
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
    """The folder of a run: its id, the settings it was started with, and its checkpoints."""

    def __init__(self, config: Config) -> None:
        self.path = config.run
        self.checkpoints = Checkpoints(self.path / "checkpoints", config.keep_checkpoints)
        self.id = ""
        """A unique name of the run, which it keeps when its folder is moved; known once it starts."""
        self.origin: set[int] = set()
        """The snapshot that the run started from, until it has saved a checkpoint of its own."""

    def read_id(self) -> str | None:
        """Return the run's id; None without a run.json. A damaged one gives None and a warning."""
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
        """Write the run's id, settings and environment; warn of settings that have changed."""
        self.path.mkdir(parents=True, exist_ok=True)
        if self.read_id() != self.id:
            write_text(self.path / "run.json", json.dumps({"id": self.id}))
        self._warn_of_changes(config)
        write_text(self.path / "config.yaml", to_yaml(config))
        started = json.dumps({**environment(command), "world_size": world_size})
        append_lines(self.path / "environment.jsonl", [started])

    def _warn_of_changes(self, config: Config) -> None:
        try:
            changed = changed_settings(self.path / "config.yaml", config)
        except ConfigError as error:
            logger.warning("%s. It is replaced with the settings of this start", error)
            return
        if changed:
            logger.warning("the config has changed since the run was started: %s", "; ".join(changed))

    def needed_snapshots(self) -> set[int]:
        """Snapshots that the run may have to resume from if it is killed now."""
        return self.checkpoints.snapshots() | self.origin


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Run:
    """What stays the same over a run, on one of its ranks."""

    config: Config
    folder: RunFolder
    data: Data
    ranks: Ranks
    heatmap_size: int
    """W, the side of the heatmaps that the network needs."""


# The store


def read_store(config: Config, annotations: Annotations, snapshot: int | None = None) -> HeatmapStore:
    """Open the store of a run for reading, at a snapshot or at the newest one."""
    return HeatmapStore.open(
        config.store_url, annotations=annotations, snapshot=snapshot, options=config.store.options()
    )


def open_store(run: Run, snapshot: int | None) -> HeatmapStore | None:
    """Open the store for writing at a checkpoint's snapshot; without one, empty, and created if missing."""
    settings = run.config.store
    if settings.kind == "none":
        return None
    url = _writable_url(run)
    if snapshot is None:
        on_rank_zero(run.ranks, lambda: _create_store(run, url))
    return HeatmapStore.open(
        url,
        annotations=run.data.annotations,
        mode="w",
        snapshot=0 if snapshot is None else snapshot,
        run=run.folder.id,
        transport=run.ranks,
        options=settings.options(),
    )


def _create_store(run: Run, url: str) -> None:
    settings = run.config.store
    backend = open_backend(url, settings.options())
    if settings.kind == "memory":
        backend.delete_tree("")  # what an earlier start of this run left, when it was killed
    try:
        read_spec(backend)
    except NotAStore:
        HeatmapStore.create(
            url,
            run.data.annotations,
            heatmap_size=run.heatmap_size,
            layout=settings.warmup_heatmaps,
            slots=settings.slots,
            codec=settings.codec,
            checksum=settings.checksum,
            counts=settings.ema == "debiased",
            tracked=settings.tracked,
            options=settings.options(),
        )


def _writable_url(run: Run) -> str:
    """Return where the run's store lives: on disk, in this process, or in memory that the ranks share."""
    if run.config.store.kind == "disk":
        return run.config.store_url
    world_size = run.ranks.world_size
    if world_size == 1:
        return f"memory://{run.folder.id}"
    if int(os.environ.get("LOCAL_WORLD_SIZE", world_size)) != world_size:
        raise ValueError("store.kind: memory is for one machine; ranks on several need store.kind: disk")
    return f"/dev/shm/bigscl-{run.folder.id}"


def check_store(run: Run) -> list[Snapshot]:
    """Return the snapshots of the store on disk, none if there is no store. Refuse a store of other data."""
    try:
        store = read_store(run.config, run.data.annotations)
    except NotAStore:
        return []  # if the run may create one, creating reports what is there instead
    if store.spec.heatmap_size != run.heatmap_size:
        raise StoreError(
            f"{run.config.store_url}: has heatmaps of side {store.spec.heatmap_size}, this network at "
            f"data.size {run.config.data.size} needs {run.heatmap_size}. Use another store.url."
        )
    return store.snapshots()
