"""Saving a run: commits and checkpoints that belong together, and the best weights."""

import logging
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import replace

from bigscl.common.digests import METRICS
from bigscl.common.failures import exit_now, explain, report_to_launcher
from bigscl.store import on_rank_zero
from bigscl.training.checkpoint_folder import Progress, Writer, write_files, write_tensors
from bigscl.training.model_state import WEIGHTS, ModelState
from bigscl.training.run_folder import Run
from bigscl.training.run_memory import AnyMemory
from bigscl.training.run_progress import EpochProgress

logger = logging.getLogger(__name__)


class Saver:
    """Saves a run. All ranks call it together; rank 0 writes, and if that fails all ranks raise.

    With `checkpoint.background`, a thread of rank 0 writes a checkpoint from a copy in host memory, and then
    drops the snapshots that no checkpoint needs any more, while training goes on. Whatever comes next that
    commits, saves or drops waits for it first.
    """

    def __init__(self, run: Run, state: ModelState, progress: EpochProgress, memory: AnyMemory) -> None:
        self._run, self._state, self._progress, self._memory = run, state, progress, memory
        self._is_writing = False
        """Whether a checkpoint was begun and not yet waited for; the same on every rank."""
        self._thread: WritingThread | None = None
        """On rank 0, what writes it."""
        self.saved_at = time.monotonic()
        """When the last checkpoint was begun, or the run was started."""

    def save_within(self) -> None:
        """Commit and save a checkpoint in the middle of an epoch."""
        self.finish()
        self._state.share_loss_state(ends_epoch=False)
        self._memory.commit(step=self._progress.step)
        self.save_checkpoint(ends_epoch=False)

    def save_checkpoint(self, *, ends_epoch: bool) -> None:
        """Save a checkpoint of what is committed, then delete older ones and their snapshots."""
        self.finish()
        progress = replace(
            self._progress.current,
            snapshot=self._memory.snapshot,
            run=self._run.folder.id,
            ends_epoch=ends_epoch,
        )
        files = self._progress.files()

        def begin() -> None:
            # The copy is made here: what follows may change the tensors.
            everything = {**self._state.files(), **files}
            self._thread = WritingThread(lambda: self._write(progress, everything))

        self._announce_drop(progress)
        on_rank_zero(self._run.ranks, begin)
        self._is_writing = True
        self.saved_at = time.monotonic()
        if not self._run.config.checkpoint.background:
            self.finish()

    def _announce_drop(self, progress: Progress) -> None:
        """Agree on the snapshots that nobody needs once this checkpoint is written."""
        is_first = self._run.ranks.rank == 0
        needed = self._run.folder.checkpoints.snapshots_after(progress) if is_first else set()
        self._memory.announce_drop(needed)

    def _write(self, progress: Progress, files: dict[str, Writer]) -> None:
        path = self._run.folder.checkpoints.save(progress, files, self._memory.check_lease)
        logger.info("saved %s", path)
        self._run.folder.origin.clear()
        # The checkpoint names its snapshot, so older snapshots may be dropped only after it is saved.
        self._memory.drop_announced()

    @property
    def has_failed(self) -> bool:
        """Whether this rank could not write a checkpoint: then all ranks call `finish`, which raises."""
        return self._thread is not None and self._thread.error is not None

    def finish(self) -> None:
        """Return when the last checkpoint is written; raise on every rank what went wrong."""
        if not self._is_writing:
            return

        def wait() -> None:
            assert self._thread is not None
            self._thread.result()

        on_rank_zero(self._run.ranks, wait)
        self._is_writing, self._thread = False, None
        self._memory.note_drop()

    def wait(self, seconds: float) -> None:
        """Give a checkpoint that is being written some time, after an error elsewhere."""
        if self._thread is not None:
            self._thread.join(seconds)

    def save_best(self, metrics: dict[str, float]) -> None:
        """Save the weights that were just trained in the folder `best`, with their metrics."""

        def save() -> None:
            files = {WEIGHTS: write_tensors(self._state.evaluated.network.state_dict())}
            # If another process has taken the store, the folder belongs to that process.
            write_files(self._run.folder.path / "best", files, METRICS, metrics, self._memory.check_lease)

        on_rank_zero(self._run.ranks, save)

    def drop_snapshots(self) -> None:
        """Delete the snapshots that the run cannot resume from, by what rank 0 finds in the folder."""
        self.finish()
        needed = self._run.folder.needed_snapshots() if self._run.ranks.rank == 0 else set()
        self._memory.drop_snapshots(needed)


class WritingThread:
    """Runs one action in a thread and keeps its error for whoever asks for the result.

    If nobody does in time, the process ends with the error: the main thread may wait for another rank, which
    waits for a slot of the store that only this action would have freed.
    """

    PATIENCE_SECONDS = 30.0

    def __init__(self, action: Callable[[], None]) -> None:
        self.error: Exception | None = None
        self._asked = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(action,), name="checkpoint", daemon=True)
        self._thread.start()

    def _run(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            self.error = error
            if not self._asked.wait(self.PATIENCE_SECONDS):
                reason = explain(error) or "".join(traceback.format_exception(error))
                logger.error("a checkpoint could not be written: %s", reason)
                report_to_launcher(reason)
                exit_now(2)

    def result(self) -> None:
        """Return when the action is done; raise what it raised."""
        self._asked.set()
        self._thread.join()
        if self.error is not None:
            raise self.error

    def join(self, seconds: float) -> None:
        """Return when the action is done, or after some time."""
        self._asked.set()
        self._thread.join(seconds)
