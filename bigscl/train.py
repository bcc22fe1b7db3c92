"""The trainer: `accelerate launch -m bigscl.train CONFIG [--section.key value ...]`.

For each image the run remembers class scores and heatmaps over the epochs, and asks the network to agree with
them where no label says what is there. `Trainer.train_epoch` is the loop, `bigscl.training.step` a step, and
`Trainer.finish_epoch` the end of an epoch.
"""

import logging
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import islice
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np
from torch import Tensor

from bigscl.command_line import (
    first_on_this_machine,
    make_command,
    rank_of_this_process,
    run,
    start_is_over,
)
from bigscl.config import Config, to_yaml
from bigscl.data.batch import Batch
from bigscl.data.loader import BadSamples, Loader
from bigscl.data.plan import Plan, training_plan
from bigscl.evaluation.validation import validate
from bigscl.files import append_lines
from bigscl.method.selection import Selection, expected_counts, select
from bigscl.plots.epochs import picture_of_epoch
from bigscl.processes.accelerator import start_accelerator
from bigscl.processes.ranks import Ranks, transport
from bigscl.processes.signals import Interrupts
from bigscl.store import Rows, on_rank_zero
from bigscl.training.checkpoint import write_files, write_json, write_tensors
from bigscl.training.log import Journal, Meter, start_logging
from bigscl.training.memory import EpochMemory
from bigscl.training.options import TrainingOptions
from bigscl.training.resume import Start
from bigscl.training.run import RunFolder, open_data, summary
from bigscl.training.state import State, map_side
from bigscl.training.step import Step

logger = logging.getLogger(__name__)

Chunk = TypeVar("Chunk")
Window = list[tuple[Batch, Rows | None]]
"""The batches of one optimizer step, each with what is remembered of it."""


class Stopped(Exception):
    """A signal asked the run to stop, and it is saved."""


class Trainer:
    """One run, on one of its ranks."""

    def __init__(self, config: Config, resume: str, command: list[str]) -> None:
        self.config = config
        self.accelerator = start_accelerator(config)
        self.device = self.accelerator.device
        self.ranks: Ranks = transport()
        start_logging(self.ranks.rank)
        self.run = RunFolder(config)
        self.data = open_data(config)
        self.schedule = config.schedule
        self.state = State(config, self.data, self.accelerator, self.ranks)
        side = 2 * map_side(self.state.network, config.data.size)
        self.journal = Journal(self.run.path, self.accelerator)
        self.stopping = False
        start = Start(config, self.run, self.data, self.state, self.ranks, side)
        self.store = start.resume(resume, command, self.journal)
        self.step = Step(config, self.data, self.state, self.store, self.accelerator, self.ranks)
        self.accelerator.init_trackers("tracked", {"config": to_yaml(config)})
        for line in summary(config, self.data, self.plan(0, whole=True), side, self.device):
            logger.info(line)

    def train(self) -> None:
        """Every epoch that is left."""
        for epoch in range(self.state.progress.epoch, self.schedule.epochs):
            self.state.enter_phase(epoch)
            self.step.settle()
            self.train_epoch(epoch)
            self.finish_epoch(epoch)

    # A step

    def train_epoch(self, epoch: int) -> None:
        """Each sample that the epoch has not had yet, exactly once."""
        plan, accumulate = self.plan(epoch), self.config.optimizer.accumulate
        total = -(-self.plan(epoch, whole=True).num_steps // accumulate)
        first = total - -(-plan.num_steps // accumulate)
        meter = Meter(self.ranks)
        self.state.model.train()
        with (
            EpochMemory(self.store, epoch, self.config.store, self.device) as memory,
            self.journal.progress(epoch, self.schedule.epochs, total, first),
        ):
            windows = batched(memory.pair(self._loader(plan, epoch)), accumulate)
            for place in range(first, total):
                window = next(windows, [])
                count, stop = self.ranks.sum([sum(len(batch) for batch, _ in window), self.stopping])
                rate = self.schedule.learning_rate(epoch * total + place, total)
                gamma = self.config.objective.gamma.at(epoch + place / total)
                self.optimize(window, memory, meter, int(count), rate, gamma)
                self.state.advance(step=self.state.progress.step + 1)
                self._log(epoch, meter, memory, {"learning_rate": rate, "gamma": gamma})
                if stop or (self._save_is_due() and place + 1 < total):
                    memory.drain()
                    self.save_within(epoch)
                if stop:
                    raise Stopped
            memory.drain()

    def optimize(
        self, window: Window, memory: EpochMemory, meter: Meter, count: int, rate: float, gamma: float
    ) -> None:
        """One optimizer step: the gradient of the mean loss over all samples of all ranks' windows."""
        for group in self.state.optimizer.param_groups:
            group["lr"] = rate
        self.state.optimizer.zero_grad()
        last = max((place for place, (batch, _) in enumerate(window) if len(batch)), default=None)
        if last is None:
            self.step.idle()
        for place, (batch, rows) in enumerate(window):
            updates: dict[str, Tensor] = {}
            if len(batch):
                with self._exchanged(place == last):
                    loss, updates = self.step(batch, rows, count=count, gamma=gamma, rate=rate)
                meter.add(loss)
            memory.put(batch, updates)
            self._note(batch)
        if self.config.optimizer.clip is not None:
            self.accelerator.clip_grad_norm_(self.state.model.parameters(), self.config.optimizer.clip)
        self.state.optimizer.step()
        if self.state.average is not None:
            self.state.average.update_parameters(self.state.network)

    def _exchanged(self, last: bool) -> AbstractContextManager[Any]:
        """Ranks exchange gradients at the last batch of a step only."""
        return nullcontext() if last else self.accelerator.no_sync(self.state.model)

    def _note(self, batch: Batch) -> None:
        self.state.note(batch)
        if self.config.log.ids:
            lines = [f"{self.state.progress.epoch} {n}" for n in batch.ids.tolist()]
            append_lines(self.run.path / f"ids-{self.ranks.rank}.txt", lines)

    def _log(self, epoch: int, meter: Meter, memory: EpochMemory, values: dict[str, float]) -> None:
        self.journal.advance()
        step = self.state.progress.step
        if step % self.config.log.every_steps == 0:
            seen = meter.read(memory.waits)
            self.journal.step(epoch, step, seen | values)
            if not math.isfinite(seen["total"]):
                raise ValueError(
                    f"the loss is {seen['total']} at step {step}. Resume from an earlier checkpoint with a "
                    f"lower learning rate, or clip the gradient (optimizer.clip)."
                )

    # The end of an epoch

    def finish_epoch(self, epoch: int) -> None:
        """Selection, commit, checkpoint, and what people look at."""
        if self.state.estimator is not None:
            self.state.estimator.share(self.ranks)
        if self.store is not None:
            self.state.selection = self._select(epoch)
            self._commit(epoch, next_epoch=epoch + 1)
            if epoch + 1 == self.config.compact_after and self.store.group.layout != "topk":
                self._compact()
        skipped = len(self._all_skipped())
        self.journal.write("epoch", self.state.progress.step, {"epoch": epoch, "skipped": skipped})
        self.state.forget_epoch()
        self.state.advance(epoch=epoch + 1)
        if self.data.val is not None and (epoch + 1) % self.config.validation.every_epochs == 0:
            self._validate(epoch)
        if (epoch + 1) % self.config.checkpoint.every_epochs == 0 or epoch + 1 == self.schedule.epochs:
            self._save_checkpoint(ends_epoch=True)
        else:
            self._drop_snapshots()
        if self.store is not None and self.ranks.rank == 0:
            self._look(epoch)

    def _select(self, epoch: int) -> Selection:
        """The expected positives of the next epoch, by the scores of this one."""
        if not self.config.objective.needs.expected or epoch + 1 < self.config.selection.start_epoch:
            return self.state.selection
        assert self.store is not None
        assert self.data.positives_per_image is not None
        # Before they are committed, a rank sees the scores of its own shards, and only of those.
        streams = self.plan(epoch, whole=True).streams[self.ranks.rank]
        shards = [int(shard) for stream in streams for shard in stream.shards]
        counts = expected_counts(self.data.annotations.counts(), self.data.positives_per_image)
        with self.journal.working("selecting the expected positives", len(shards)) as show:
            chunks = counted(self.store.scores_by_shard(shards), show)
            return select(chunks, counts, self.ranks).to(self.device)

    def _commit(self, epoch: int, next_epoch: int) -> None:
        """Make the epoch's rows last, with what a run needs to go on from them."""
        assert self.store is not None
        skipped = self._all_skipped()
        snapshot = self.store.commit(
            epoch=epoch,
            step=self.state.progress.step,
            attributes={
                "selection": self.state.selection.to_json(),
                "next_epoch": next_epoch,
                "skipped": skipped if next_epoch == epoch else [],
            },
        )
        self.state.advance(snapshot=snapshot.id)

    def _all_skipped(self) -> list[int]:
        """What no rank could read in this epoch; known to rank 0, which commits and logs."""
        parts = self.ranks.gather(np.array(self.state.skipped, np.int64).tobytes()) or []
        return sorted({int(n) for part in parts for n in np.frombuffer(part, np.int64)})

    def _compact(self) -> None:
        """Keep the heatmaps of each image's top classes only, from now on."""
        assert self.store is not None
        top = min(self.config.store.top or 0, self.data.train.num_classes)
        num_shards = sum(slot >= 0 for slot in self.store.snapshot.slots)
        share = len(range(self.ranks.rank, num_shards, self.ranks.world_size))
        with self.journal.working(f"keeping heatmaps of {top} classes per image", share) as show:
            self.state.advance(snapshot=self.store.compact(top, progress=show).id)

    def _validate(self, epoch: int) -> None:
        """Metrics on the validation set; the weights are kept if they are the best so far."""
        assert self.data.val is not None
        self.state.share_buffers()
        metrics = validate(self.state.evaluated, self.data.val, self.config, self.device, self.ranks)
        value, best = metrics[self.config.validation.metric], self.state.progress.best
        self.journal.write("val", self.state.progress.step, {"epoch": epoch, **metrics})
        values = ", ".join(f"{name} {x:.4f}" for name, x in metrics.items())
        logger.info("epoch %d/%d: %s", epoch + 1, self.schedule.epochs, values)
        if best is None or value > best:
            self.state.advance(best=value, best_epoch=epoch)
            self._write_on_rank_zero(lambda: self._write_best({"epoch": epoch, **metrics}))

    def _write_best(self, metrics: dict[str, float]) -> None:
        files = {
            "model.safetensors": write_tensors(self.state.evaluated.network.state_dict()),
            "metrics.json": write_json(metrics),
        }
        write_files(self.run.path / "best", files, self._check_lease)

    def _look(self, epoch: int) -> None:
        """Keep the rows of the tracked samples, and draw some of them."""
        assert self.store is not None
        self.store.record_history(epoch)
        every = self.config.log.pictures_every
        if every and (epoch + 1) % every == 0 and self.store.spec.tracked:
            path = self.run.path / "pictures" / f"epoch-{epoch:03d}.png"
            picture_of_epoch(
                self.store, self.data.train, self.state.selection, path, self.config.log.pictures
            )
            self.journal.show_picture("heatmaps", path, self.state.progress.step)

    # Saving

    def _save_is_due(self) -> bool:
        every = self.config.checkpoint.every_steps
        return every is not None and self.state.progress.step % every == 0

    def save_within(self, epoch: int) -> None:
        """Commit and checkpoint in mid-epoch; the memory is drained."""
        if self.state.estimator is not None:
            self.state.estimator.share(self.ranks)
        if self.store is not None:
            self._commit(epoch, next_epoch=epoch)
        self._save_checkpoint(ends_epoch=False)

    def _save_checkpoint(self, *, ends_epoch: bool) -> None:
        files = self.state.files()
        progress = replace(self.state.progress, run=self.run.id, ends_epoch=ends_epoch)

        def save() -> None:
            assert files is not None
            logger.info("saved %s", self.run.checkpoints.save(progress, files, self._check_lease))

        self._write_on_rank_zero(save)
        self.run.origin.clear()
        # The checkpoint names its snapshot, so older ones may go only now that it is saved.
        self._drop_snapshots()

    def _write_on_rank_zero(self, write: Callable[[], None]) -> None:
        """Rank 0 writes, and all ranks hear of it if it fails."""

        def action() -> bytes:
            write()
            return b""

        on_rank_zero(self.ranks, action)

    def _check_lease(self) -> None:
        """Raise if another process took the store meanwhile: the folder is its own then."""
        if self.store is not None:
            self.store.check_lease()

    def _drop_snapshots(self) -> None:
        """Keep the snapshots that the run may resume from, and the current one."""
        if self.store is not None:
            with self.journal.working("deleting what no checkpoint needs"):
                self.store.drop_snapshots(keep=self.run.needed_snapshots())

    # What it trains on

    def plan(self, epoch: int, *, whole: bool = False) -> Plan:
        """The plan of a whole epoch, or of what it has not had yet."""
        index, data, visited = self.data.train, self.config.data, self.state.visited
        return training_plan(
            index.shard_sizes,
            index.rows_per_shard,
            seed=self.config.seed,
            epoch=epoch,
            batch_size=data.batch_size,
            world_size=self.ranks.world_size,
            workers=data.workers,
            shuffle_buffer=data.shuffle_buffer,
            visited=None if whole or not visited.any() else visited,
        )

    def _loader(self, plan: Plan, epoch: int) -> Loader:
        data, rank = self.config.data, self.ranks.rank
        # Of the little that is left of a resumed epoch, a single bad image may be a large share.
        whole = self.plan(epoch, whole=True)
        return Loader(
            self.data.train,
            plan,
            rank,
            data.training_transform(self.config.seed, epoch),
            labels=data.labels,
            bad=BadSamples(self.data.train, whole.num_samples(rank), max_share=data.max_bad_share),
            pin_memory=self.device.type == "cuda",
            allow_pipe=data.allow_pipe,
        )

    # The end

    def stop_soon(self) -> None:
        """What the first signal does: the run is saved after the step at hand."""
        self.stopping = True

    def close(self) -> None:
        """Let the store and the trackers go."""
        if self.store is not None:
            self.store.close()
            if self.config.store.kind == "memory" and self.ranks.rank == 0:
                self.store.backend.delete_tree("")
        self.accelerator.end_training()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def batched(pairs: Iterator[tuple[Batch, Rows | None]], size: int) -> Iterator[Window]:
    """The pairs in lists of `size`, the last one shorter."""
    while window := list(islice(pairs, size)):
        yield window


def counted(chunks: Iterable[Chunk], show: Callable[[int], None]) -> Iterator[Chunk]:
    """The chunks, each counted when the next is asked for."""
    for done, chunk in enumerate(chunks):
        show(done)
        yield chunk


def train(options: TrainingOptions) -> None:
    """Train to the end, or until a signal: then the run is saved."""
    config = options.load()
    if options.print_config:
        print(to_yaml(config) if rank_of_this_process() == 0 else "", end="")
        return
    listening = Interrupts(speaks=first_on_this_machine())
    try:
        with listening as interrupts, Trainer(config, options.resume, sys.argv) as trainer:
            start_is_over()
            interrupts.save_first(trainer.stop_soon)
            trainer.train()
    except Stopped:
        if rank_of_this_process() == 0:
            print(f"stopped by a signal; {config.run} is saved. Resume with the same command.")


def main(arguments: list[str]) -> int:
    """Return the exit code of a run: 0 when done, or saved after a signal; 2 after the user's mistake."""
    return run(make_command(train, "train"), arguments, "bigscl.train")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
