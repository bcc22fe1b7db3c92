"""The data, the folder and the store of a run, before it trains."""

import json
import logging
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bigscl.common.digests import write_sealed
from bigscl.common.files import append_lines, read_json_object, write_text
from bigscl.common.text import first_few
from bigscl.common.user_error import UserError
from bigscl.config import Config, ConfigError, DataConfig, changed_settings, to_yaml, with_digest
from bigscl.data.answers import Answers
from bigscl.data.index import SAMPLES_FILE, Index, is_list_of, load_index, write_sample_list
from bigscl.data.labels.label_files import with_evaluation_labels
from bigscl.data.labels.training_labels import TrainingLabels, training_labels, with_given_labels
from bigscl.distributed.ranks import Ranks
from bigscl.selection.k import k_per_class, positives_per_image
from bigscl.store import (
    Annotations,
    Answered,
    HeatmapStore,
    IndexMismatch,
    NotAStore,
    Snapshot,
    SnapshotLog,
    StoreError,
    Transport,
    open_backend,
    seal_fault,
)
from bigscl.training.checkpoint_folder import Checkpoints
from bigscl.training.metrics_log import environment

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Data:
    """The indexes of a run's shards, and the labels that training may see."""

    train: Index
    val: Index | None
    annotations: Annotations
    """The positives that training may see."""
    labelled: Annotations
    """The same without answers of people: for readers of a store, whose snapshot says which it has."""
    answered: Answered
    """Answers of people that are among them."""
    positives_per_image: float | None
    """K, if the objective needs it."""
    k_per_class: bool | NDArray[np.float64]
    """Whether each class has its own K; that K if it is known."""


def open_data(config: Config, ranks: Transport | None = None) -> Data:
    """Read the indexes of the run's shards, and choose the labels that training may see.

    If all `ranks` call it together, they have the same answers, even while people give more.
    """
    labels = open_labels(config.data, ranks)
    train, val = labels.index, open_val(config.data)
    if val is not None and val.class_names != train.class_names:
        raise UserError(
            f"data.val: its {val.num_classes} classes are not the {train.num_classes} of data.train. "
            f"Both need the same classes.txt."
        )
    return Data(
        train=train,
        val=val,
        annotations=labels.annotations,
        labelled=labels.labelled.annotations(labels.labels),
        answered=labels.answered,
        positives_per_image=positives_per_image(config, val),
        k_per_class=k_per_class(config, labels.counts(), train.num_samples, val),
    )


def open_labels(data: DataConfig, ranks: Transport | None = None) -> TrainingLabels:
    """Read the index of the training shards, with the labels that training may see: see `open_data`."""
    index = load_index(data.train, data.train_index, allow_pipe=data.allow_pipe)
    index = with_given_labels(index, data.labels_file, data.given, data.canaries)
    found = training_labels(index, data.labels, data.answers, ranks)
    if data.answers is not None:
        _log_answers(found.answers, data.answers)
    if not len(found.annotations.given.values):
        raise UserError(
            "data.train: no image has a positive label. Give data.labels_file, or shards with labels."
        )
    return found


def open_val(data: DataConfig) -> Index | None:
    """Read the index of the validation shards, with the labels to evaluate against; None without them."""
    if data.val is None:
        return None
    val = load_index(data.val, data.val_index, allow_pipe=data.allow_pipe)
    return val if data.val_labels_file is None else with_evaluation_labels(val, data.val_labels_file)


def _log_answers(answers: Answers, path: Path) -> None:
    yes = sum(bool(one.yes) for one in answers.standing.values())
    logger.info("%s: %d answers, %d of them yes", path, len(answers.standing), yes)
    if answers.conflicts:
        told = [f"{lost.key}, {lost.class_name}" for lost, _ in answers.conflicts]
        what = first_few(told, len(told), most=3, join="; ")
        logger.warning("%s: people disagree about %d pairs, the later counts: %s", path, len(told), what)


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
        values = read_json_object(path) or {}
        found = values.get("id")
        if isinstance(found, str) and found and seal_fault(values) is None:
            return found
        logger.warning(
            "%s: damaged, expected the run's id. It is recovered from a checkpoint or the store", path
        )
        return None

    def write_start(self, config: Config, command: list[str], world_size: int) -> None:
        """Write the run's id, settings and environment; warn of settings that have changed."""
        self.path.mkdir(parents=True, exist_ok=True)
        if self.read_id() != self.id:
            write_sealed(self.path / "run.json", {"id": self.id})
        self._warn_of_changes(config)
        write_text(self.path / "config.yaml", with_digest(to_yaml(config)))
        started = json.dumps({**environment(command), "world_size": world_size})
        append_lines(self.path / "environment.jsonl", [started])

    def write_samples(self, run: "Run") -> None:
        """Write which row of the store is which image, unless the file is there; for a store on disk."""
        path = self.path / SAMPLES_FILE
        if run.config.store.kind == "disk" and not is_list_of(run.data.train, path):
            write_sample_list(run.data.train, path)

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
    """Parts of a run that stay the same, on one of its ranks."""

    config: Config
    folder: RunFolder
    data: Data
    ranks: Ranks
    heatmap_size: int
    """W, the side of the heatmaps that the network needs."""


# The store


def read_store(
    config: Config, annotations: Annotations, snapshot: int | None = None, ranks: Ranks | None = None
) -> HeatmapStore:
    """Open the store of a run for reading, at a snapshot or at the newest one.

    If all ranks open it at a snapshot, only rank 0 of `ranks` lists folders.
    """
    return HeatmapStore.open(
        config.store_url,
        annotations=annotations,
        snapshot=snapshot,
        transport=ranks,
        options=config.store.options(),
    )


def check_store(run: Run) -> list[Snapshot]:
    """Return the snapshots of the store on disk, none if there is no store. Refuse a store of other data."""
    try:
        store = read_store(run.config, run.data.annotations)
    except NotAStore:
        return []  # if the run may create one, creating reports what is there instead
    except IndexMismatch as error:
        raise IndexMismatch(f"{error}{_hint_if_empty(run.config)}") from None
    if store.spec.heatmap_size != run.heatmap_size:
        raise StoreError(
            f"{run.config.store_url}: has heatmaps of side {store.spec.heatmap_size}, this network at "
            f"data.size {run.config.data.size} needs {run.heatmap_size}. Use another store.url."
            f"{_hint_if_empty(run.config)}"
        )
    snapshots = store.snapshots()
    _check_answers(run, snapshots)
    return snapshots


def _check_answers(run: Run, snapshots: list[Snapshot]) -> None:
    """Refuse to resume without answers that the store contains."""
    answered = run.data.answered
    for snapshot in snapshots:
        if lost := Answered.at(snapshot).lost(answered):
            row, number = lost[0]
            index, given = run.data.train, run.config.data.answers
            raise UserError(
                f"data.answers: {given or 'no file'}, but the memory of this run has learnt from "
                f"{len(lost)} answers that are not there, first about {index.class_names[number]!r} of "
                f"{index.name(row)}. Give the file of answers that the run was trained with. To take an "
                f"answer back, withdraw it there (`bigscl review ask`, u)."
            )


def _hint_if_empty(config: Config) -> str:
    """Return what to do with a store that a run created and never trained into; nothing for any other."""
    log = SnapshotLog(open_backend(config.store_url, config.store.options()))
    if any(max(log.read(number).slots) >= 0 for number in log.ids()):
        return ""
    return f" Nothing was trained into this one: you can delete {config.store_url} and start again."
