"""The start of a run: choose a checkpoint, read all of it on every rank, and only then change the disk.

A kill at any moment leaves something that the next start understands: folders under a hidden name are put
back or removed, checkpoints whose snapshot is gone are set aside, and snapshots that no checkpoint names are
dropped.
"""

import json
import logging
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bigscl.config import Config
from bigscl.files import explain
from bigscl.folders import repair_folder
from bigscl.method.selection import Selection
from bigscl.processes.ranks import Ranks
from bigscl.store import HeatmapStore, Snapshot, StoreError, on_rank_zero
from bigscl.training.checkpoint import Checkpoint, CheckpointError, Progress
from bigscl.training.log import Journal
from bigscl.training.run import Data, RunFolder, check_store, open_store
from bigscl.training.state import Memory, State

logger = logging.getLogger(__name__)
Choice = str
"""`auto`, `never`, or the path of a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What the run's folder and store hold, as rank 0 sees it."""

    known: str
    """The run's id, empty if no file says it."""
    new: str
    """The id to use if no checkpoint says it either."""
    paths: list[str]
    """Checkpoints to try, the best first."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Saved:
    """A checkpoint that was read and checked, with what its snapshot adds to it."""

    checkpoint: Checkpoint
    memory: Memory | None
    run: str
    """The id of the run that saved it; empty if it does not say."""


class Start:
    """One start of a run, on one of its ranks. All ranks make the same calls together."""

    def __init__(
        self, config: Config, run: RunFolder, data: Data, state: State, ranks: Ranks, heatmap_size: int
    ) -> None:
        self._config, self._run, self._data, self._state = config, run, data, state
        self._ranks, self._heatmap_size = ranks, heatmap_size
        self._unusable: list[Path] = []

    def resume(self, choice: Choice, command: list[str], journal: Journal) -> HeatmapStore | None:
        """Return the run's store, with everything in memory and on disk as its checkpoint says.

        Nothing is created, rolled back or deleted before every rank has read its part without error.
        """
        found = self._look(choice)
        saved = self._choose(found, choice)
        checkpoint = None if saved is None else saved.checkpoint
        self._run.id = (saved.run if saved is not None else "") or found.new
        self._restore(saved)
        self._check_unchanged(found, choice)
        snapshot = None if checkpoint is None else checkpoint.progress.snapshot
        # From here on the lease of the store is ours.
        store = open_store(
            self._config, self._data.annotations, self._heatmap_size, self._run, self._ranks, snapshot
        )
        try:
            self._run.origin = {snapshot or 0}
            self._settle(checkpoint, command, journal)
            if store is not None:
                store.drop_snapshots(keep=self._run.needed_snapshots())
        except BaseException:
            if store is not None:
                store.close()
            raise
        return store

    # Reading

    def _look(self, choice: Choice) -> Found:
        def look() -> bytes:
            known, paths = self._run.read_id() or "", _candidates(self._run, choice)
            if self._config.store.kind == "memory" and paths:
                raise ValueError(
                    f"{self._run.path}: its store was in memory (store.kind: memory) and ended with the "
                    f"process, so it cannot be resumed. Start again in another folder, with "
                    f"store.kind: disk if it should be."
                )
            snapshots: list[Snapshot] = []
            if self._config.store.kind == "disk":
                snapshots = check_store(self._config, self._data.annotations, self._heatmap_size)
            new = known or (not paths and self._recovered_id(snapshots)) or uuid.uuid4().hex
            if not paths:
                _check_ours(self._config.store_url, snapshots, new)
            return json.dumps({"known": known, "new": new, "paths": [str(path) for path in paths]}).encode()

        return Found(**json.loads(on_rank_zero(self._ranks, look)))

    def _recovered_id(self, snapshots: list[Snapshot]) -> str:
        """The id that the store has of a run whose run.json is damaged or was not yet written."""
        ours = (self._run.path / "run.json").exists() or self._config.store.url is None
        return snapshots[-1].run if snapshots and ours else ""

    def _choose(self, found: Found, choice: Choice) -> Saved | None:
        """The first of the checkpoints that every rank can read; None if there are none at all."""
        reasons = []
        for path in map(Path, found.paths):
            saved, reason = self._try(path, found)
            if saved is not None:
                logger.info("going on from %s", path)
                return saved
            if choice != "auto":
                raise CheckpointError(f"--resume: {reason}")
            reasons.append(reason)
            self._unusable.append(path)
            if self._ranks.rank == 0:
                logger.warning("cannot resume from %s", reason)
        if reasons:
            listed = "\n".join(f"  {reason}" for reason in reasons)
            raise CheckpointError(
                f"{self._run.path}: has checkpoints, but none can be resumed from. Restore one of them or "
                f"what it needs from a copy, or start again in another folder:\n{listed}"
            )
        return None

    def _try(self, path: Path, found: Found) -> tuple[Saved | None, str]:
        """A checkpoint that every rank could read; or None, and why not."""
        read: list[Saved] = []
        reason = failure_on_any(self._ranks, lambda: read.append(self._read(path, found)))
        return (None, reason) if reason else (read[0], "")

    def _read(self, path: Path, found: Found) -> Saved:
        """A checkpoint with its snapshot, all of it read and checked."""
        checkpoint = Checkpoint(path)
        progress, memory, names = checkpoint.progress, None, [checkpoint.progress.run]
        store = self._open_snapshot(path, progress)
        if store is not None:
            names.append(store.snapshot.run)
        inside = path.absolute().parent == (self._run.path / "checkpoints").absolute()
        owner = found.known or (inside and next(filter(None, names), "")) or ""
        for name in filter(None, names):
            if name != owner:
                this = f"run {owner}" if owner else "a new run"
                raise CheckpointError(
                    f"{path}: was saved by run {name}, this folder is {this}. Resume it in its own folder."
                )
        if store is not None:
            check_snapshot(path, progress, store.snapshot)
            memory = read_memory(store, progress.epoch, self._data.train.num_classes)
        self._state.check(checkpoint)
        return Saved(checkpoint=checkpoint, memory=memory, run=owner)

    def _open_snapshot(self, path: Path, progress: Progress) -> HeatmapStore | None:
        if self._config.store.kind == "none":
            return None
        if progress.snapshot is None:
            raise CheckpointError(
                f"{path}: names no snapshot, as it was saved with store.kind: none, and store.kind is "
                f"{self._config.store.kind}. Resume with store.kind: none, or start again in another folder."
            )
        try:
            return HeatmapStore.open(
                self._config.store_url,
                annotations=self._data.annotations,
                snapshot=progress.snapshot,
                options=self._config.store.options(),
            )
        except StoreError as error:
            raise CheckpointError(
                f"{path}: needs snapshot {progress.snapshot} of its store: {error}"
            ) from None

    def _restore(self, saved: Saved | None) -> None:
        """Load what was read. No collective call may follow a failure of one rank before the others know."""
        checkpoint = None if saved is None else saved.checkpoint

        def load() -> None:
            if saved is not None:
                self._state.restore(saved.checkpoint, saved.memory)

        def enter_phase() -> None:
            epoch = self._state.progress.epoch
            if epoch < self._config.schedule.epochs:
                self._state.enter_phase(epoch, checkpoint)

        for action in (load, enter_phase):
            if reason := failure_on_any(self._ranks, action):
                raise CheckpointError(reason)

    def _check_unchanged(self, found: Found, choice: Choice) -> None:
        """A job that is about to end may have saved another checkpoint while this one was starting."""

        def check() -> bytes:
            if [str(path) for path in _candidates(self._run, choice)] != found.paths:
                raise CheckpointError(
                    f"{self._run.path}: its checkpoints changed while this run was starting: another "
                    f"process trains it. Wait until that ends, then run the same command again."
                )
            return b""

        on_rank_zero(self._ranks, check)

    # Changing

    def _settle(self, checkpoint: Checkpoint | None, command: list[str], journal: Journal) -> None:
        """Bring the folder to the state of the checkpoint: what came after it will come again."""

        def settle() -> bytes:
            self._run.write_start(self._config, command, self._ranks.world_size)
            checkpoints = self._run.checkpoints
            checkpoints.repair()
            repair_folder(self._run.path / "best")
            checkpoints.set_aside(self._unusable)
            if checkpoint is not None:
                checkpoints.drop_after(checkpoint)
            checkpoints.prune()
            journal.keep_until(self._state.progress.step)
            return b""

        on_rank_zero(self._ranks, settle)


def _candidates(run: RunFolder, choice: Choice) -> list[Path]:
    """The checkpoints to try, the best first."""
    newest_first = run.checkpoints.paths()[::-1]
    if choice == "never" and newest_first:
        raise ValueError(
            f"{run.path}: has checkpoints up to {newest_first[0].name}, and --resume is never. "
            f"Choose another run folder, or leave --resume away to resume."
        )
    return newest_first if choice in ("auto", "never") else [Path(choice)]


def _check_ours(url: str, snapshots: list[Snapshot], run: str) -> None:
    """Refuse a store with rows that another run has written: this one would start it from the beginning."""
    for snapshot in snapshots:
        if max(snapshot.slots) >= 0 and snapshot.run not in ("", run):
            raise StoreError(
                f"{url}: was written by run {snapshot.run}, this is a new one. Use another store.url, "
                f"or resume that run in its own folder."
            )


def check_snapshot(path: Path, progress: Progress, snapshot: Snapshot) -> None:
    """Raise CheckpointError unless the snapshot was committed where the checkpoint stands."""
    epoch = snapshot.attributes.get("next_epoch", progress.epoch)
    if (snapshot.step, epoch) != (progress.step, progress.epoch):
        raise CheckpointError(
            f"{path}: stands at step {progress.step} in epoch {progress.epoch}, but its snapshot "
            f"{snapshot.id} was committed at step {snapshot.step} in epoch {epoch}. Resume "
            f"from another checkpoint with --resume."
        )


def read_memory(store: HeatmapStore, epoch: int, num_classes: int) -> Memory:
    """What a snapshot says of the selection, and of the samples that the epoch at hand has had."""
    visited = store.visited() == epoch
    attributes = store.snapshot.attributes
    try:
        selection = Selection.from_json(attributes["selection"])
        skipped = [int(sample) for sample in attributes["skipped"]]
        visited[skipped] = True
    except (KeyError, TypeError, ValueError, IndexError, RuntimeError) as error:
        raise CheckpointError(
            f"{store.backend.url}: snapshot {store.snapshot.id}: its selection and skipped samples cannot "
            f"be read ({error!r}). Resume from another checkpoint with --resume."
        ) from None
    if len(selection.tau) != num_classes:
        raise CheckpointError(
            f"{store.backend.url}: snapshot {store.snapshot.id}: its selection has {len(selection.tau)} "
            f"classes, expected {num_classes}. Resume from another checkpoint with --resume."
        )
    return Memory(selection=selection, skipped=skipped, visited=np.asarray(visited))


def failure_on_any(ranks: Ranks, action: Callable[[], Any]) -> str:
    """Why the action failed on one of the ranks, on every rank; empty if it did on none."""
    reason = ""
    try:
        action()
    except (StoreError, ValueError) as error:
        reason = str(error)
    except OSError as error:
        reason = explain(error) or f"{type(error).__name__}: {error}"
    reports = ranks.gather(reason.encode())
    answer = None if reports is None else _first_failure([report.decode() for report in reports])
    return ranks.broadcast(answer).decode()


def _first_failure(reasons: list[str]) -> bytes:
    failed = [rank for rank, reason in enumerate(reasons) if reason]
    if not failed:
        return b""
    return (reasons[failed[0]] + (f" (on rank {failed[0]})" if failed[0] else "")).encode()
