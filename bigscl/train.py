"""The trainer: `accelerate launch -m bigscl.train CONFIG [--section.key value ...]`.

For each image the run remembers class scores and heatmaps over the epochs, and asks the network to agree with
them where no label says what is there. `Trainer.train_epoch` is the loop, `bigscl.training.step` a step, and
`Trainer.finish_epoch` the end of an epoch.
"""

import logging
import math
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from types import TracebackType
from typing import Any, Self

from bigscl.common.command_line import (
    first_on_this_machine,
    make_command,
    rank_of_this_process,
    run,
    start_is_over,
)
from bigscl.common.failures import STOPPED
from bigscl.common.files import append_lines
from bigscl.common.user_error import UserError
from bigscl.config import Config, doubtful_settings
from bigscl.config.print_config import commented_yaml
from bigscl.config.schedule import EpochPlan, plan_epoch
from bigscl.data.loader import BadSamples, Batch, Loader, LoaderWorkers
from bigscl.data.workers import WAITS
from bigscl.distributed.ranks import PendingSum, process_group
from bigscl.distributed.signals import Interrupts
from bigscl.evaluation.run_plots import draw_epoch
from bigscl.evaluation.validation import Validation, best_metric
from bigscl.memory.lookup import MemoryBatch
from bigscl.preflight.forecast import doubtful_validation, summary
from bigscl.training.accelerator import start_accelerator
from bigscl.training.metrics_log import Meter, MetricsLog, start_logging, start_trackers
from bigscl.training.model_state import ModelState, map_side
from bigscl.training.options import StopFile, TrainingOptions
from bigscl.training.resume import resume
from bigscl.training.run_folder import Run, RunFolder, open_data
from bigscl.training.run_memory import RunMemory, make_score_log
from bigscl.training.run_progress import EpochProgress
from bigscl.training.saver import Saver
from bigscl.training.step import Step, mix_batches

logger = logging.getLogger(__name__)

SECONDS_TO_FINISH_SAVING = 20.0
"""How long a failed run waits for a checkpoint that is being written: launchers wait for 30 s."""
Window = list[tuple[Batch, MemoryBatch | None]]
"""The batches of one optimizer step, each with its stored values."""


class Stopped(Exception):
    """The run was asked to stop, and is saved."""

    def __init__(self, code: int = STOPPED) -> None:
        """Take the exit code: 0 if `bigscl stop` asked, so that no scheduler starts the run again."""
        super().__init__()
        self.code = code


class Trainer:
    """One run, on one of its ranks."""

    def __init__(self, config: Config, choice: str, command: list[str]) -> None:
        """Set the run up, and resume it from the checkpoint that `choice` says (auto, never or a path)."""
        self.config = config
        self.accelerator = start_accelerator(config)
        self.device = self.accelerator.device
        self.ranks = process_group(config.hardware.timeout_minutes)
        start_logging(self.ranks.rank)
        self.folder = RunFolder(config)
        self.data = open_data(config, self.ranks)
        self.schedule = config.schedule
        self.state = ModelState(config, self.data, self.accelerator, self.ranks)
        self.progress = EpochProgress(len(self.data.train.keys), self.ranks)
        self.metrics = MetricsLog(self.folder.path, self.accelerator)
        self.map_side = map_side(self.state.network, config.data.size)
        side = 2 * self.map_side
        run = Run(config=config, folder=self.folder, data=self.data, ranks=self.ranks, heatmap_size=side)
        self.memory = resume(run, self.state, self.progress, self.metrics, choice=choice, command=command)
        self.score_log = make_score_log(run)
        self.saver = Saver(run, self.state, self.progress, self.memory)
        self.step = Step(config, self.data, self.state, self.memory, self.ranks)
        self.workers = self._loader_workers()
        self.validation = (
            None if self.data.val is None else Validation(self.data.val, config, self.device, self.ranks)
        )
        self.stopping = False
        self.stop_file = StopFile(self.folder.path)
        self._clear_stop_file()
        start_trackers(self.accelerator, config, self.folder.id, self.progress.step)
        for line in summary(config, self.data, self.ranks.world_size, side, self.device):
            logger.info(line)
        for doubt in (*doubtful_settings(config), *doubtful_validation(config, self.data.val)):
            logger.warning(doubt)

    @property
    def is_finished(self) -> bool:
        """Whether no epoch is left to train."""
        return self.progress.epoch >= self.schedule.epochs

    def train(self) -> None:
        for epoch in range(self.progress.epoch, self.schedule.epochs):
            plan = self.plan(epoch)
            self.state.enter_phase(epoch)
            self.step.prepare_buckets()
            self.train_epoch(epoch, plan)
            self.finish_epoch(epoch)
        self.saver.finish()
        self._clear_stop_file()

    # A step

    def train_epoch(self, epoch: int, plan: EpochPlan) -> None:
        """Train on each sample that the epoch has not had yet, exactly once."""
        meter = Meter(self.ranks)
        self.state.model.train()
        self.step.epoch = epoch
        self.memory.follow(plan.whole)
        stored: Iterator[tuple[Batch, MemoryBatch | None]] = self.memory.prefetch(self._batches(plan, epoch))
        windows = batched(stored, plan.accumulate)
        with self.metrics.progress(epoch, self.schedule.epochs, plan.num_steps, plan.first_step):
            following, counted = self._next_window(windows)
            for number in range(plan.first_step, plan.num_steps):
                window, (count, signals, asked, save, failed) = following, counted()
                stop = signals or asked
                if failed:
                    self.saver.finish()
                if number + 1 < plan.num_steps:
                    # Summed over the ranks while this step computes: a stop takes effect one step later.
                    following, counted = self._next_window(windows)
                rate = self.schedule.learning_rate(epoch * plan.num_steps + number, plan.num_steps)
                gamma = self.config.objective.gamma.at(epoch + number / plan.num_steps)
                self.train_step(window, plan.num_batches(number), meter, int(count), rate, gamma)
                self._log(epoch, meter, {"learning_rate": rate, "gamma": gamma})
                if stop or ((save or self._save_is_due()) and number + 1 < plan.num_steps):
                    self.saver.save_within()
                if stop:
                    self.saver.finish()
                    self._clear_stop_file()
                    raise Stopped(0 if asked else STOPPED)

    def _next_window(self, windows: Iterator[Window]) -> tuple[Window, PendingSum]:
        """Take the next window; start to sum over the ranks its samples, and who wants to stop or to save."""
        window = next(windows, [])
        is_first = self.ranks.rank == 0
        asked = is_first and self.stop_file.is_requested()
        # By the clock of one rank: others may see the minutes pass at another step.
        save = is_first and self._minutes_have_passed()
        count = sum(len(batch) for batch, _ in window)
        return window, self.ranks.start_sum([count, self.stopping, asked, save, self.saver.has_failed])

    def train_step(
        self, window: Window, num_batches: int, meter: Meter, count: int, rate: float, gamma: float
    ) -> None:
        """Make one optimizer step, with the gradient of the mean loss over the windows of all ranks.

        `num_batches` is the length of the longest of these windows.
        """
        self.state.begin_step(rate)
        # SyncBatchNorm communicates in every forward: then all ranks make as many, in the same order.
        synced = self.config.hardware.sync_batchnorm
        filled = [number for number, (batch, _) in enumerate(window) if len(batch)]
        last = num_batches - 1 if synced else max(filled, default=0)
        for number in range(max(len(window), last + 1)):
            batch, stored = window[number] if number < len(window) else (None, None)
            predicted = None
            with self._exchange(number == last):
                if batch is not None and len(batch):
                    loss, predicted = self.step(batch, stored, count=count, gamma=gamma, rate=rate)
                    meter.add(loss)
                elif synced or number == last:
                    self.step.idle(count)
            if batch is not None:
                if stored is not None and predicted is not None:
                    self.memory.update(stored, logits=predicted.logits, maps=predicted.maps)
                self.memory.skip(batch.skipped)
                self._note(batch)
        self.state.end_step()
        self.progress.advance(step=self.progress.step + 1)

    def _exchange(self, last: bool) -> AbstractContextManager[Any]:
        """Let the ranks exchange gradients at the last batch of a step only."""
        return nullcontext() if last else self.accelerator.no_sync(self.state.model)

    def _note(self, batch: Batch) -> None:
        self.progress.add(batch)
        if self.config.log.ids:
            lines = [f"{self.progress.epoch} {n}" for n in batch.ids.tolist()]
            append_lines(self.folder.path / f"ids-{self.ranks.rank}.txt", lines)

    def _log(self, epoch: int, meter: Meter, values: dict[str, float]) -> None:
        self.metrics.advance()
        step = self.progress.step
        if step % self.config.log.every_steps == 0:
            means = meter.read(self.memory.waits)
            self.metrics.step(epoch, step, means | values)
            if not math.isfinite(means["loss"]):
                raise UserError(
                    f"the loss is {means['loss']} at step {step}. Resume from an earlier checkpoint with a "
                    f"lower learning rate, or clip the gradient (optimizer.clip)."
                )

    # The end of an epoch

    def finish_epoch(self, epoch: int) -> None:
        """Commit the memory, validate, save a checkpoint, and draw stored heatmaps of some images."""
        self.saver.finish()
        self.state.share_loss_state(ends_epoch=True)
        self.memory.end_epoch(step=self.progress.step, score_log=self.score_log)
        skipped = len(self.progress.all_skipped())
        trust = self.memory.trust
        facts = {"epoch": epoch + 1, "skipped": skipped} | ({} if trust is None else trust.metrics())
        self.metrics.write("epoch", self.progress.step, facts)
        if trust is not None:
            logger.info("epoch %d/%d: %s", epoch + 1, self.schedule.epochs, trust)
        self.progress.begin_epoch(epoch + 1)
        if self.validation is not None and (epoch + 1) % self.config.validation.every_epochs == 0:
            self._validate(epoch, self.validation)
        if epoch + 1 == self.schedule.epochs and self.progress.current.best is None:
            self._keep_last(epoch)
        if (epoch + 1) % self.config.checkpoint.every_epochs == 0 or epoch + 1 == self.schedule.epochs:
            self.saver.save_checkpoint(ends_epoch=True)
        else:
            self.saver.drop_snapshots()
        if epoch + 1 == self.config.compact_after:
            # The arrays of the first layout go before more of the next one is written: disks are planned so.
            self.saver.finish()
        if self.ranks.rank == 0:
            self._draw(epoch)

    def _validate(self, epoch: int, validation: Validation) -> None:
        """Log the metrics on the validation set, and keep the weights if they are the best so far."""
        self.state.share_buffers()
        found = validation.run(self.state.evaluated, self.metrics.working)
        metrics = {"epoch": epoch + 1, **found}
        self.metrics.write("val", self.progress.step, metrics)
        values = ", ".join(f"{name} {x:.4f}" for name, x in found.items())
        logger.info("epoch %d/%d: %s", epoch + 1, self.schedule.epochs, values)
        value, best = best_metric(found, self.config.validation), self.progress.current.best
        if best is None or value > best:
            self.progress.advance(best=value, best_epoch=epoch)
            self.saver.save_best(metrics)

    def _keep_last(self, epoch: int) -> None:
        """Keep the weights of the last epoch as the best: nothing was validated."""
        self.saver.save_best({"epoch": epoch + 1})
        logger.info(
            "%s: the weights of the last epoch, %d: without validation nothing says which is the best",
            *(self.folder.path / "best", epoch + 1),
        )

    def _draw(self, epoch: int) -> None:
        memory, log = self.memory, self.config.log
        if not isinstance(memory, RunMemory) or not memory.store.spec.history_samples:
            return
        if log.pictures_every and (epoch + 1) % log.pictures_every == 0:
            path = self.folder.path / "pictures" / f"epoch-{epoch + 1:03d}.png"
            draw_epoch(memory.store, self.data.train, memory.selection, path, log.pictures)
            self.metrics.log_image("heatmaps", path, self.progress.step)

    # Data

    def plan(self, epoch: int) -> EpochPlan:
        """Plan an epoch, without the samples that it has had before the run was resumed."""
        index = self.data.train
        return plan_epoch(
            self.config,
            index.shard_sizes,
            index.rows_per_shard,
            epoch=epoch,
            world_size=self.ranks.world_size,
            visited=self.progress.visited,
        )

    def _batches(self, plan: EpochPlan, epoch: int) -> Iterable[Batch]:
        """Return the batches of what is left of an epoch, mixed if the config says so."""
        loader, data = self._loader(plan, epoch), self.config.data
        if data.mix is None:
            return loader
        return mix_batches(
            loader,
            data.mix,
            size=data.size,
            map_side=self.map_side,
            seed=self.config.seed,
            epoch=epoch,
            pin_memory=self.device.type == "cuda",
        )

    def _loader(self, plan: EpochPlan, epoch: int) -> Loader:
        data, rank = self.config.data, self.ranks.rank
        # Of the few samples left of a resumed epoch, a single bad image may be a large share.
        planned = plan.whole.num_samples(rank)
        return Loader(
            self.data.train,
            plan.remaining,
            rank,
            data.training_transform(self.config.seed, epoch),
            bad=BadSamples(self.data.train, planned, max_share=data.max_bad_share),
            workers=self.workers,
        )

    def _loader_workers(self) -> LoaderWorkers:
        """Return the processes that load images for all epochs; a worker without a batch is not needed."""
        data, index = self.config.data, self.data.train
        return LoaderWorkers(
            index,
            min(data.workers, -(-index.num_samples // data.batch_size)),
            labels=data.labels,
            # Read ahead for their rows, and two windows; one on its way to each, and one not yet given back.
            held_batches=self.config.store.prefetch_batches + 2 * self.config.optimizer.accumulate + 3,
            pin_memory=self.device.type == "cuda",
            decoder=data.decoder,
        )

    # Saving and stopping

    def _save_is_due(self) -> bool:
        every = self.config.checkpoint.every_steps
        return every is not None and self.progress.step % every == 0

    def _minutes_have_passed(self) -> bool:
        every = self.config.checkpoint.every_minutes
        return every is not None and time.monotonic() - self.saver.saved_at >= 60 * every

    def _clear_stop_file(self) -> None:
        """Remove a request to stop that is met, or older than this start."""
        if self.ranks.rank == 0:
            self.stop_file.clear()

    def stop_soon(self) -> None:
        """Save the run after the current step, then stop; called at the first signal."""
        self.stopping = True

    def close(self) -> None:
        self.workers.close()
        if self.validation is not None:
            self.validation.close()
        self.memory.close()
        self.accelerator.end_training()

    def abandon(self) -> None:
        """Give the lease of the store back after an error; the group is left to the end of the process."""
        # Its epoch may have taken hours, and the error may be of the next one's first step.
        self.saver.wait(SECONDS_TO_FINISH_SAVING)
        try:
            self.memory.close()
        except Exception as error:
            logger.warning("the store could not be closed: %s", error)
        for tracker in self.accelerator.trackers:
            tracker.finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, Stopped):
            self.close()
        else:
            self.abandon()


def batched(pairs: Iterator[tuple[Batch, MemoryBatch | None]], size: int) -> Iterator[Window]:
    """Yield the pairs in lists of `size`, the last one shorter."""
    while window := list(islice(pairs, size)):
        yield window


def train(options: TrainingOptions) -> int:
    """Train to the end, or until a signal or `bigscl stop`: then the run is saved. Return the exit code."""
    config = options.load()
    if options.print_config:
        print(commented_yaml(config) if rank_of_this_process() == 0 else "", end="")
        return 0
    with Interrupts(prints=first_on_this_machine()) as interrupts:
        try:
            with Trainer(config, options.resume, sys.argv) as trainer:
                start_is_over()
                interrupts.stop_with(trainer.stop_soon, WAITS.longest)
                if trainer.is_finished:
                    logger.info(
                        "%s: already finished, all %d epochs are trained. To train longer, raise "
                        "schedule.main.epochs; to train again, choose another --run.",
                        *(config.run, config.schedule.epochs),
                    )
                trainer.train()
        except Stopped as stopped:
            if rank_of_this_process() == 0:
                print(f"stopped as asked; {config.run} is saved. Resume with the same command.", flush=True)
            return stopped.code
    return 0


def main(arguments: list[str]) -> int:
    """Return the exit code: 0 when done, 75 when stopped by a signal, 2 after the user's mistake."""
    return run(make_command(train, "train"), arguments, "bigscl.train")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
