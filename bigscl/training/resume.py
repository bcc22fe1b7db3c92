"""The start of a run: choose a checkpoint, read all of it on every rank, and only then change the disk.

A kill at any moment leaves something that the next start understands: folders under a hidden name are put
back or removed, checkpoints whose snapshot is gone are set aside, and snapshots that no checkpoint names are
dropped.
"""

import json
import logging
import uuid
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bigscl.common.files import repair_folder
from bigscl.common.user_error import UserError
from bigscl.distributed.ranks import failure_on_any
from bigscl.memory.open_memory import free_shared_memory
from bigscl.memory.snapshot_state import SnapshotState, is_empty
from bigscl.store import HeatmapStore, Snapshot, StoreError, on_rank_zero
from bigscl.training.checkpoint_folder import Checkpoint, CheckpointError, Progress
from bigscl.training.metrics_log import MetricsLog
from bigscl.training.model_state import ModelState
from bigscl.training.run_folder import Run, RunFolder, check_store, read_store
from bigscl.training.run_memory import AnyMemory, open_memory
from bigscl.training.run_progress import EpochProgress

logger = logging.getLogger(__name__)

Choice = str
"""`auto`, `never`, or the path of a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """Ids and checkpoints in the run's folder and store, as rank 0 sees them before any is read."""

    run_id: str
    """The run's id, empty if no file has it."""
    new_id: str
    """The id to use if no checkpoint has it either."""
    paths: list[str]
    """Checkpoints to try, the best first."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EpochSamples:
    """Samples that the epoch of a checkpoint has had, by the snapshot of its store."""

    skipped: list[int]
    """Samples of the current epoch that could not be read."""
    visited: NDArray[np.bool_]
    """Rows that the current epoch has had."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Saved:
    """A checkpoint that was read and checked, with its snapshot if the run has a store."""

    checkpoint: Checkpoint
    samples: EpochSamples | None
    run_id: str
    """The id of the run that saved it; empty if it does not say."""


def resume(
    run: Run,
    state: ModelState,
    progress: EpochProgress,
    metrics: MetricsLog,
    *,
    choice: Choice,
    command: list[str],
) -> AnyMemory:
    """Bring the model, the progress, the folder and the store to the state of a checkpoint, or of a new run.

    All ranks call it together. Nothing is created, rolled back or deleted before every rank has read its part
    without error. Returns the run's memory.
    """
    search = CheckpointSearch(run, state, progress, choice)
    candidates = search.find_candidates()
    saved = search.read_best(candidates)
    run.folder.id = (saved.run_id if saved is not None else "") or candidates.new_id
    restore(run, state, progress, saved)
    name_decoder(run, progress, saved)
    check_unchanged(run, candidates, choice)
    checkpoint = None if saved is None else saved.checkpoint
    # Opening takes the store's lease: from here on this run may change the disk.
    snapshot = None if checkpoint is None else checkpoint.progress.snapshot
    memory = open_memory(run, snapshot, progress.epoch, state.accelerator.device, metrics.working)
    try:
        change_disk(run, memory, checkpoint, search.unusable, metrics, command)
    except BaseException:
        memory.close()
        raise
    return memory


def restore(run: Run, state: ModelState, progress: EpochProgress, saved: Saved | None) -> None:
    """Load what was read. If a rank fails, all ranks raise before the next collective call."""
    checkpoint = None if saved is None else saved.checkpoint

    def load() -> None:
        if saved is None:
            return
        state.restore(saved.checkpoint)
        progress.restore(saved.checkpoint)
        if saved.samples is not None:
            progress.restore_samples(saved.samples.visited, saved.samples.skipped)

    def enter_phase() -> None:
        if progress.epoch < run.config.schedule.epochs:
            state.enter_phase(progress.epoch, checkpoint)

    for action in (load, enter_phase):
        if reason := failure_on_any(run.ranks, action):
            raise CheckpointError(reason)


def name_decoder(run: Run, progress: EpochProgress, saved: Saved | None) -> None:
    """Let checkpoints name the run's decoder; warn if the one that was read names another."""
    before, now = progress.current.decoder, run.config.data.decoder
    if saved is not None and before != now and run.ranks.rank == 0:
        logger.warning(
            "data.decoder: %s, but %s was trained with %s. Pixels may differ in their last bits from here "
            "on, and so will the run. Set data.decoder: %s to resume it exactly",
            now,
            saved.checkpoint.path,
            before,
            before,
        )
    progress.advance(decoder=now)


def check_unchanged(run: Run, candidates: Candidates, choice: Choice) -> None:
    """Refuse to resume if another process, such as a job that ends, has saved a checkpoint meanwhile."""

    def check() -> None:
        if [str(path) for path in list_candidates(run.folder, choice)] != candidates.paths:
            raise CheckpointError(
                f"{run.folder.path}: its checkpoints changed while this run was starting: another "
                f"process trains it. Wait until that ends, then run the same command again."
            )

    on_rank_zero(run.ranks, check)


def change_disk(
    run: Run,
    memory: AnyMemory,
    checkpoint: Checkpoint | None,
    unusable: list[Path],
    metrics: MetricsLog,
    command: list[str],
) -> None:
    """Bring the folder and the store to the state of the checkpoint: later steps will be trained again."""
    snapshot = None if checkpoint is None else checkpoint.progress.snapshot
    run.folder.origin = {snapshot or 0}

    def change_folder() -> None:
        run.folder.write_start(run.config, command, run.ranks.world_size)
        run.folder.write_samples(run)
        checkpoints = run.folder.checkpoints
        checkpoints.repair()
        repair_folder(run.folder.path / "best")
        checkpoints.set_aside(unusable)
        if checkpoint is not None:
            checkpoints.drop_after(checkpoint)
        checkpoints.prune()
        metrics.drop_after(0 if checkpoint is None else checkpoint.progress.step)

    on_rank_zero(run.ranks, change_folder)
    # Rank 0 decides: another node may see an old listing of the folder.
    memory.drop_snapshots(run.folder.needed_snapshots() if run.ranks.rank == 0 else set())


# Finding the checkpoint


class CheckpointSearch:
    """Reads checkpoints until one is usable. All ranks make the same calls together; nothing is changed."""

    def __init__(self, run: Run, state: ModelState, progress: EpochProgress, choice: Choice) -> None:
        self._run, self._state, self._progress = run, state, progress
        self._choice = choice
        self.unusable: list[Path] = []
        """Checkpoints that could not be read, newer than the one that was found."""

    def find_candidates(self) -> Candidates:
        """Return the checkpoints to try and the ids that the files give; refuse a store of another run."""
        return Candidates(**json.loads(on_rank_zero(self._run.ranks, self._find_candidates)))

    def _find_candidates(self) -> bytes:
        folder, store = self._run.folder, self._run.config.store
        known, paths = folder.read_id() or "", list_candidates(folder, self._choice)
        if store.kind == "ram" and paths:
            free_shared_memory(known)
            raise UserError(
                f"{folder.path}: its store was in memory (store.kind: ram) and ended with the "
                f"process, so it cannot be resumed. Start again in another folder, with "
                f"store.kind: disk if it should be."
            )
        snapshots = check_store(self._run) if store.kind == "disk" else []
        new = known or (not paths and self._recovered_id(snapshots)) or uuid.uuid4().hex
        if not paths:
            _check_ours(self._run.config.store_url, snapshots, new)
        return json.dumps({"run_id": known, "new_id": new, "paths": [str(path) for path in paths]}).encode()

    def _recovered_id(self, snapshots: list[Snapshot]) -> str:
        """Return the run's id from its store, if its run.json is damaged or was not yet written."""
        trained = not all(is_empty(snapshot) for snapshot in snapshots)
        # A run writes its run.json before it trains. A store with trained rows may be of somebody's own loop.
        ours = (self._run.folder.path / "run.json").exists() or (
            self._run.config.store.url is None and not trained
        )
        return snapshots[-1].run if snapshots and ours else ""

    def read_best(self, candidates: Candidates) -> Saved | None:
        """Return the first of the checkpoints that every rank can read; None if there are none at all."""
        reasons: list[str] = []
        for path in map(Path, candidates.paths):
            saved, reason = self._try(path, candidates)
            if saved is not None:
                if self._run.ranks.rank == 0:
                    for unusable in reasons:
                        logger.warning("cannot resume from %s", unusable)
                logger.info("resuming from %s", path)
                return saved
            if self._choice != "auto":
                raise CheckpointError(f"--resume: {reason}")
            reasons.append(reason)
            self.unusable.append(path)
        if reasons:
            raise CheckpointError(_none_usable(self._run.folder.path, self.unusable, reasons))
        return None

    def _try(self, path: Path, candidates: Candidates) -> tuple[Saved | None, str]:
        """Return a checkpoint that every rank could read; or None, and the reason."""
        read: list[Saved] = []
        reason = failure_on_any(self._run.ranks, lambda: read.append(self._read(path, candidates)))
        return (None, reason) if reason else (self._with_visited(read[0]), "")

    def _with_visited(self, saved: Saved) -> Saved:
        """Send every rank the rows that rank 0 found visited: the stamps are a file for each shard."""
        if saved.samples is None:
            return saved
        ours = np.packbits(saved.samples.visited).tobytes() if self._run.ranks.rank == 0 else None
        packed = np.frombuffer(self._run.ranks.broadcast(ours), np.uint8)
        visited = np.unpackbits(packed, count=len(saved.samples.visited)).astype(bool)
        return replace(saved, samples=replace(saved.samples, visited=visited))

    def _read(self, path: Path, candidates: Candidates) -> Saved:
        checkpoint = Checkpoint(path)
        progress, samples, names = checkpoint.progress, None, [checkpoint.progress.run]
        store = self._open_snapshot(path, progress)
        if store is not None:
            names.append(store.snapshot.run)
        owner = self._check_owner(path, candidates, [name for name in names if name])
        if store is not None:
            stamps = store.last_epochs() if self._run.ranks.rank == 0 else np.full(store.spec.num_rows, -1)
            samples = read_samples(path, progress, store, stamps == progress.epoch)
        self._state.check(checkpoint)
        self._progress.check(checkpoint)
        return Saved(checkpoint=checkpoint, samples=samples, run_id=owner)

    def _check_owner(self, path: Path, candidates: Candidates, names: list[str]) -> str:
        """Return the run that saved a checkpoint, by the names in its files; refuse one of another run."""
        inside = path.absolute().parent == (self._run.folder.path / "checkpoints").absolute()
        owner = candidates.run_id or (names[0] if inside and names else "")
        for name in names:
            if name != owner:
                this = f"run {owner}" if owner else "a new run"
                raise CheckpointError(
                    f"{path}: was saved by run {name}, this folder is {this}. Resume it in its own folder."
                )
        return owner

    def _open_snapshot(self, path: Path, progress: Progress) -> HeatmapStore | None:
        kind = self._run.config.store.kind
        if kind == "none":
            return None
        if progress.snapshot is None:
            raise CheckpointError(
                f"{path}: names no snapshot, as it was saved with store.kind: none, and store.kind is "
                f"{kind}. Resume with store.kind: none, or start again in another folder."
            )
        try:
            run = self._run
            return read_store(run.config, run.data.annotations, progress.snapshot, run.ranks)
        except StoreError as error:
            raise CheckpointError(
                f"{path}: needs snapshot {progress.snapshot} of its store: {error}"
            ) from None


def _none_usable(folder: Path, paths: list[Path], reasons: list[str]) -> str:
    """Return the message that no checkpoint can be resumed from; a cause that all share is named once."""
    causes = {reason.replace(str(path), "") for path, reason in zip(paths, reasons, strict=True)}
    if len(causes) == 1:
        names = ", ".join(sorted(path.name for path in paths))
        return f"{folder}: none can be resumed from of its checkpoints {names}, for one reason: {reasons[0]}"
    listed = "\n".join(f"  {reason}" for reason in reasons)
    return (
        f"{folder}: has checkpoints, but none can be resumed from. Restore one of them or what it needs from "
        f"a copy, or start again in another folder:\n{listed}"
    )


def list_candidates(folder: RunFolder, choice: Choice) -> list[Path]:
    """Return the checkpoints to try, the best first."""
    newest_first = folder.checkpoints.paths()[::-1]
    if choice == "never" and newest_first:
        raise UserError(
            f"{folder.path}: has checkpoints up to {newest_first[0].name}, and --resume is never. "
            f"Choose another run folder, or omit --resume to resume."
        )
    return newest_first if choice in ("auto", "never") else [Path(choice)]


def _check_ours(url: str, snapshots: list[Snapshot], run_id: str) -> None:
    """Refuse a store with rows that another run has written: this run would start it from the beginning."""
    for snapshot in snapshots:
        if not is_empty(snapshot) and snapshot.run not in ("", run_id):
            raise StoreError(
                f"{url}: was written by run {snapshot.run}, this is a new one. Use another store.url, "
                f"or resume that run in its own folder."
            )


def read_samples(
    path: Path, progress: Progress, store: HeatmapStore, visited: NDArray[np.bool_]
) -> EpochSamples:
    """Return the samples that the epoch of a checkpoint has had: visited, or skipped.

    Raise CheckpointError unless the snapshot was committed at the checkpoint's step and epoch.
    """
    snapshot = store.snapshot
    try:
        state = SnapshotState.of(snapshot, store.spec.num_classes)
        visited[state.skipped] = True
    except (StoreError, IndexError) as error:
        raise CheckpointError(
            f"{store.backend.url}: {error}. Resume from another checkpoint with --resume."
        ) from None
    if (snapshot.step, state.next_epoch) != (progress.step, progress.epoch):
        raise CheckpointError(
            f"{path}: stands at step {progress.step} in epoch {progress.epoch}, but its snapshot "
            f"{snapshot.id} was committed at step {snapshot.step} in epoch {state.next_epoch}. Resume "
            f"from another checkpoint with --resume."
        )
    return EpochSamples(skipped=state.skipped, visited=visited)
