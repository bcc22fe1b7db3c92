"""Saving a run: commits and checkpoints that belong together, and the best weights."""

import logging
import time
from dataclasses import replace

from bigscl.store import on_rank_zero
from bigscl.training.checkpoint import write_files, write_json, write_tensors
from bigscl.training.epoch_progress import EpochProgress
from bigscl.training.memory import Memory
from bigscl.training.model_state import WEIGHTS, ModelState
from bigscl.training.run import Run

logger = logging.getLogger(__name__)


class Saver:
    """Saves a run. All ranks call it together; rank 0 writes, and if that fails all ranks raise."""

    def __init__(self, run: Run, state: ModelState, progress: EpochProgress, memory: Memory) -> None:
        self._run, self._state, self._progress, self._memory = run, state, progress, memory
        self.saved_at = time.monotonic()
        """When the last checkpoint was saved, or the run was started."""

    def save_within(self, epoch: int) -> None:
        """Commit and save a checkpoint in the middle of an epoch."""
        self._memory.flush()
        self._state.share_estimates()
        skipped = self._progress.all_skipped()
        self._memory.commit(epoch, self._progress.step, next_epoch=epoch, skipped=skipped)
        self.save_checkpoint(ends_epoch=False)

    def save_checkpoint(self, *, ends_epoch: bool) -> None:
        """Save a checkpoint of what is committed, then delete older ones and their snapshots."""
        files = self._progress.files()
        progress = replace(
            self._progress.current,
            snapshot=self._memory.snapshot,
            run=self._run.folder.id,
            ends_epoch=ends_epoch,
        )

        def save() -> None:
            checkpoints = self._run.folder.checkpoints
            path = checkpoints.save(progress, {**self._state.files(), **files}, self._memory.check_lease)
            logger.info("saved %s", path)

        on_rank_zero(self._run.ranks, save)
        self.saved_at = time.monotonic()
        self._run.folder.origin.clear()
        # The checkpoint names its snapshot, so older snapshots may be dropped only after it is saved.
        self.drop_snapshots()

    def save_best(self, metrics: dict[str, float]) -> None:
        """Save the weights that were just validated in the folder `best`, with their metrics."""

        def save() -> None:
            files = {
                WEIGHTS: write_tensors(self._state.evaluated.network.state_dict()),
                "metrics.json": write_json(metrics),
            }
            # If another process has taken the store, the folder belongs to that process.
            write_files(self._run.folder.path / "best", files, self._memory.check_lease)

        on_rank_zero(self._run.ranks, save)

    def drop_snapshots(self) -> None:
        """Delete the snapshots that the run cannot resume from."""
        self._memory.drop_snapshots(self._run.folder.needed_snapshots())
