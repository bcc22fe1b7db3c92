"""The memory of a run, with a store or without one; its scores are kept at the end of each epoch."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from bigscl.data.labels.training_labels import hidden_counts
from bigscl.memory.memory import Memory, MemoryStart, ShowWork
from bigscl.memory.open_memory import checked_settings
from bigscl.memory.score_history import ScoreLog
from bigscl.selection.ranking import selection_rule
from bigscl.selection.trust import Canaries
from bigscl.training.run_folder import Run

Batch = TypeVar("Batch")


class RunMemory(Memory):
    """The memory of a run. Its checkpoints, not the commits, say which snapshots are needed."""

    def __init__(
        self, run: Run, snapshot: int | None, epoch: int, device: torch.device, show_work: ShowWork
    ) -> None:
        """Open the run's store at a checkpoint's snapshot and epoch; without one, empty."""
        config = run.config
        url = config.store_url if config.store.kind == "disk" else None
        settings = replace(config.store, url=url, compact_after=config.compact_after)
        share = config.selection.pseudo_positive_share
        rule = selection_rule(
            run.data.positives_per_image if "expected" in config.objective.needs else None,
            start_epoch=config.selection.start_epoch,
            rank_by=config.selection.by,
            k_per_class=run.data.k_per_class,
            pseudo_positive_share=share if "pseudo_positives" in config.objective.needs else None,
        )
        self._shown_by, self._hidden_labels = show_work, hidden_counts(run.data.train)
        self._canaries = _canaries(run)
        self._class_names = run.data.train.class_names
        start = MemoryStart(
            run=run.folder.id, snapshot=snapshot or 0, epoch=epoch, answered=run.data.answered
        )
        self._open(
            run.data.annotations,
            checked_settings(settings, drops_snapshots=False),
            rule,
            run.heatmap_size,
            config.selection.by,
            torch.device(device),
            run.ranks,
            start,
        )

    @property
    def _labels(self) -> NDArray[np.int64]:
        """The labels of each class, hidden ones among them: K counts these."""
        return super()._labels + self._hidden_labels

    @property
    def layout(self) -> str:
        return self.store.group.layout

    def _show_work(self, title: str, total: int | None) -> AbstractContextManager[Callable[[int], None]]:
        return self._shown_by(title, total)

    def _class_name(self, number: int) -> str:
        return self._class_names[number]

    def _drop_unneeded(self) -> None:
        """Drop nothing: the Saver drops snapshots after it has saved a checkpoint."""

    def announce_drop(self, keep: set[int]) -> None:
        """Agree over the ranks on the snapshots that can go: all but these of rank 0 and the current one."""
        self.store.announce_drop(keep)

    def drop_announced(self) -> None:
        """Delete them, on rank 0."""
        self.store.drop_announced()

    def note_drop(self) -> None:
        """Use their slots again, on every rank."""
        self.store.note_drop()


def _canaries(run: Run) -> Canaries | None:
    """Return the labels that are hidden from training; None if there are none."""
    train, store = run.data.train, run.config.store
    if train.hidden is None:
        return None
    return Canaries(
        train.hidden,
        train.negatives,
        run.data.annotations,
        momentum=store.momentum if store.ema == "plain" else None,
    )


class NoMemory:
    """The memory of a run whose objective needs none: it stores nothing, and takes no time."""

    snapshot = None
    trust = None
    layout = "none"
    keeps_heatmaps = False

    def __init__(self) -> None:
        self._data_seconds = 0.0

    def prefetch(self, batches: Iterable[Batch]) -> Iterator[tuple[Batch, None]]:
        """Yield each batch; nothing is stored of it."""
        self._data_seconds, asked = 0.0, time.perf_counter()
        for batch in batches:
            self._data_seconds += time.perf_counter() - asked
            yield batch, None
            asked = time.perf_counter()

    @property
    def waits(self) -> dict[str, float]:
        """Seconds that the step waited in this epoch, by what it waited for."""
        return {"wait_data": self._data_seconds}

    def _nothing(self, *_: object, **__: object) -> None:
        """Do nothing: there is no store."""

    follow = update = skip = flush = end_epoch = commit = close = check_lease = _nothing
    drop_snapshots = announce_drop = drop_announced = note_drop = _nothing


AnyMemory = RunMemory | NoMemory
"""The memory of a run; its objective may need none."""


def open_memory(
    run: Run, snapshot: int | None, epoch: int, device: torch.device, show_work: ShowWork
) -> AnyMemory:
    """Open the run's memory at a checkpoint's snapshot and epoch; without one, empty."""
    if run.config.store.kind == "none":
        return NoMemory()
    return RunMemory(run, snapshot, epoch, device, show_work)


def make_score_log(run: Run) -> ScoreLog | None:
    """Return what keeps the scores of every epoch, for a store on disk; None if the config says so."""
    kept = run.config.log.score_classes
    if run.config.store.kind != "disk" or not kept:
        return None
    in_store = run.config.store.kept_scores(run.data.annotations.num_classes)
    return ScoreLog(run.folder.path, run.data.annotations, run.ranks, min(kept, in_store or kept))
