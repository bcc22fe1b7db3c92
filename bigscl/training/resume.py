"""The start of a run: choose a checkpoint, read all of it on every rank, and only then change the disk.

A kill at any moment leaves something that the next start understands: folders under a hidden name are put
back or removed, checkpoints whose snapshot is gone are set aside, and snapshots that no checkpoint names are
dropped.
"""

import logging
from pathlib import Path

from bigscl.common.files import repair_folder
from bigscl.distributed.ranks import failure_on_any
from bigscl.store import on_rank_zero
from bigscl.training.checkpoint import Checkpoint, CheckpointError
from bigscl.training.checkpoint_search import Candidates, CheckpointSearch, Choice, Saved, list_candidates
from bigscl.training.epoch_progress import EpochProgress
from bigscl.training.log import MetricsLog
from bigscl.training.model_state import ModelState
from bigscl.training.run import AnyMemory, Run, open_memory

logger = logging.getLogger(__name__)


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
    """Load what was read. If a rank fails, all ranks hear of it before the next collective call."""
    checkpoint = None if saved is None else saved.checkpoint

    def load() -> None:
        if saved is None:
            return
        state.restore(saved.checkpoint)
        progress.restore(saved.checkpoint)
        if saved.snapshot is not None:
            progress.restore_samples(saved.snapshot.visited, saved.snapshot.skipped)

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
