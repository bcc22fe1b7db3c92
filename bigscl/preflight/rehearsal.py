"""A short rehearsal of a run: real steps on its own data, in a folder beside the run's that is then removed.

The trainer is the real one. Its plan is cut after a few dozen steps, and each kind of epoch (warm-up or main,
layout of the store) is rehearsed once, with the same samples: so a later kind reads from the storage what an
earlier one wrote.
"""

import logging
import os
import resource
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bigscl.config import Config
from bigscl.config.schedule import EpochPlan
from bigscl.data.loader import Batch
from bigscl.distributed.ranks import Ranks, process_group
from bigscl.memory.epoch_io import to_host
from bigscl.memory.lookup import MemoryBatch, updated_averages
from bigscl.preflight.device_check import Difference, ReferenceCheck, precisions_to_check, worst
from bigscl.preflight.rehearsal_plan import EpochType, ScratchFolders, first_batches, rehearsal_config
from bigscl.train import Stopped, Trainer, Window
from bigscl.training.accelerator import start_accelerator
from bigscl.training.metrics_log import Meter
from bigscl.training.model_state import map_side

logger = logging.getLogger(__name__)

PREPARED_PER_WORKER = 2
"""Batches that a loader worker prepares ahead."""
SETTLING_STEPS = 3
"""Steps until a GPU has chosen its kernels and allocated its memory."""
REPETITIONS = range(2, 9)
REPETITION_SECONDS = 10.0
"""Of a step that is measured alone: at most so many, and so long together if that allows the fewest."""


# What is measured


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochTypeMeasurement:
    """Measurements of one rank for a type of epochs."""

    first_epoch: int
    last_epoch: int
    is_warmup: bool
    layout: str
    """Of the store: scores, dense or topk; none without a store."""
    steps: int
    """Timed steps."""
    images: int
    """Images of all ranks in them."""
    seconds: float
    waits: dict[str, float]
    """Shares of the time that the step waited on this rank, by what for."""
    step_seconds: float
    """A step of one batch alone, with the exchange of gradients."""
    compute_seconds: float
    """The same without the exchange."""
    save_seconds: float
    """Seconds that training waits at a save within an epoch: open shards are written and committed, and the
    checkpoint is copied, or written if that is not done in the background."""
    end_seconds: float
    """The end of an epoch: selection, commit, checkpoint, and compaction where it falls due."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Measurements of one rank."""

    host: str
    device: str
    precision: str
    kinds: list[EpochTypeMeasurement]
    differences: list[Difference]
    """From the reference, by precision and quantity."""
    loader_images_per_second: float
    """Of this rank's loader alone, without a network."""
    skipped: int
    """Images that could not be read."""
    process_bytes: int
    """Peak of this process in RAM."""
    worker_bytes: int
    """Peak of its largest loader worker."""
    gpu_bytes: int | None
    """Peak of allocated memory on the GPU."""
    gpu_total_bytes: int | None
    checkpoint_bytes: int
    seconds: float
    """Of the whole rehearsal."""


class RehearsalTrainer(Trainer):
    """The trainer, whose epochs end after a few dozen steps and are measured."""

    def __init__(self, config: Config, num_steps: int, remove: Callable[[], None]) -> None:
        """`remove` removes all that the rehearsal writes; it is called when the store is closed."""
        self._num_steps = num_steps
        self._remove = remove
        self._clock: _StepClock | None = None
        self._rehearsed: list[tuple[Batch | None, MemoryBatch | None]] = []
        """The last batch of each kind of epochs, with what was remembered of it."""
        self._skipped: set[int] = set()
        super().__init__(config, "never", sys.argv)
        self.heatmap_size = 2 * map_side(self.state.network, config.data.size)

    @property
    def _prepared_batches(self) -> int:
        """Batches that are ready before the first step, which would make the first steps look fast."""
        return PREPARED_PER_WORKER * max(1, self.config.data.workers) + self.config.store.prefetch_batches

    def plan(self, epoch: int) -> EpochPlan:
        """Plan the first steps of the first epoch, whatever the epoch."""
        return self._cut(super().plan(0))

    def _settling_steps(self, accumulate: int) -> int:
        return -(-self._prepared_batches // accumulate) + SETTLING_STEPS

    def _cut(self, plan: EpochPlan) -> EpochPlan:
        count = (self._num_steps + self._settling_steps(plan.accumulate)) * plan.accumulate
        rows = self.data.train.rows_per_shard
        return replace(plan, remaining=first_batches(plan.whole, count, rows))

    def measure(self, kinds: list[EpochType]) -> Measurement:
        """Rehearse each kind of epochs, then the loader alone."""
        started = time.perf_counter()
        measured = []
        for epoch, kind in enumerate(kinds):
            measured.append(self._measure_kind(epoch, kind))
            self._check_stop()
        loader = self._loader_speed()
        self._check_stop()
        usage = self._peak_memory()
        with self.metrics.working("comparing this device with the CPU"):
            differences = self._differences()
        self._check_stop()
        return Measurement(
            host=os.uname().nodename,
            device=self._device_name(),
            precision=self._precision,
            kinds=measured,
            differences=differences,
            loader_images_per_second=loader,
            skipped=len(self._skipped),
            checkpoint_bytes=_checkpoint_bytes(self.folder.path),
            seconds=time.perf_counter() - started,
            **usage,
        )

    @property
    def _precision(self) -> str:
        """The precision of the run: that of its config, or fp32 if this CPU cannot compute in bf16."""
        precision: str = self.accelerator.mixed_precision
        return {"no": "fp32"}.get(precision, precision)

    def _device_name(self) -> str:
        gpu = self.device.type == "cuda"
        return torch.cuda.get_device_name(self.device) if gpu else self.device.type

    def _peak_memory(self) -> dict[str, Any]:
        """Return the peaks so far; the comparison with the CPU, which comes later, needs more."""
        gpu, unit = self.device.type == "cuda", 1 if sys.platform == "darwin" else 1024
        return {
            "process_bytes": unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
            "worker_bytes": unit * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss,
            "gpu_bytes": torch.cuda.max_memory_allocated(self.device) if gpu else None,
            "gpu_total_bytes": torch.cuda.get_device_properties(self.device).total_memory if gpu else None,
        }

    # A kind of epochs

    def _measure_kind(self, epoch: int, kind: EpochType) -> EpochTypeMeasurement:
        plan = self.plan(epoch)
        self.state.enter_phase(epoch)
        self.step.prepare_buckets()
        layout = self.memory.layout
        num_steps = plan.num_steps - plan.first_step
        # A small dataset has fewer steps: half of them are timed.
        timed = max(1, num_steps // 2, num_steps - self._settling_steps(plan.accumulate))
        self._clock = clock = _StepClock(self, num_steps, min(self._num_steps, timed))
        self.train_epoch(epoch, plan)
        with self.metrics.working("measuring a step alone"):
            step = self._step_seconds(clock, exchange=True)
            compute = self._step_seconds(clock, exchange=False)
        self._rehearsed.append((clock.batch, clock.stored))
        self._skipped.update(self.progress.skipped)
        save = _seconds(self.saver.save_within)
        self.saver.finish()
        end = _seconds(lambda: self.finish_epoch(epoch))
        self.saver.finish()
        return EpochTypeMeasurement(
            first_epoch=kind.epochs.start,
            last_epoch=kind.epochs.stop - 1,
            is_warmup=kind.is_warmup,
            layout=layout,
            steps=clock.timed,
            images=clock.images,
            seconds=clock.seconds,
            waits=clock.waits,
            step_seconds=step,
            compute_seconds=compute,
            save_seconds=save,
            end_seconds=end,
        )

    def train_step(
        self, window: Window, num_batches: int, meter: Meter, count: int, rate: float, gamma: float
    ) -> None:
        """Make a step of the run, and note the time."""
        super().train_step(window, num_batches, meter, count, rate, gamma)
        assert self._clock is not None
        self._clock.after_step(window, count)

    def _step_seconds(self, clock: "_StepClock", *, exchange: bool) -> float:
        """Return the seconds of one step with a batch that is there already, and its memory update.

        The learning rate is 0, so the weights stay.
        """
        self._one_step(clock, exchange)
        self.wait_for_device()
        # All ranks must make as many: each hears the same sum.
        (total,) = self.ranks.sum([clock.seconds / clock.timed])
        wanted = int(REPETITION_SECONDS * self.ranks.world_size / total)
        repetitions = min(max(wanted, REPETITIONS[0]), REPETITIONS[-1])
        started = time.perf_counter()
        for _ in range(repetitions):
            self._one_step(clock, exchange)
        self.wait_for_device()
        return (time.perf_counter() - started) / repetitions

    def _one_step(self, clock: "_StepClock", exchange: bool) -> None:
        self.state.begin_step(0.0)
        # The same on all ranks, as what they exchange may depend on it; the rate is 0.
        count = self.config.data.batch_size * self.ranks.world_size
        with self._exchange(exchange):
            if clock.batch is None:
                self.step.idle(count)
            else:
                batch, stored = clock.batch, clock.stored
                gamma = self.config.objective.gamma.peak
                _, predicted = self.step(batch, stored, count=count, gamma=gamma, rate=0.0)
                if stored is not None:
                    logits, maps = predicted.logits, predicted.maps
                    _, ready = to_host(updated_averages(stored, logits, maps, self.config.store))
                    ready()
        self.state.end_step()

    def _differences(self) -> list[Difference]:
        """Compare the last batch of each kind of epochs, so each layout of the store."""
        check = ReferenceCheck(self.config, self.data, self.state)
        precisions = precisions_to_check(self._precision, self.device)
        differences: list[Difference] = []
        for batch, stored in self._rehearsed:
            if batch is not None:
                differences += check.differences(batch, stored, precisions)
        return worst(differences)

    # The loader alone

    def _loader_speed(self) -> float:
        """Return images/s of this rank's loader without a network, on the samples of another epoch.

        Most of these are in other shards, which no cache holds yet.
        """
        plan = self._cut(super().plan(1))
        with self.metrics.working("measuring the loader alone"):
            return _images_per_second(self._loader(plan, 1), self._prepared_batches)

    def wait_for_device(self) -> None:
        """Return when the GPU has done all that it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    # The end

    def _check_stop(self) -> None:
        (wanted,) = self.ranks.sum([self.stopping])
        if wanted:
            raise Stopped

    def close(self) -> None:
        """Close the store, remove all that was written, and leave the group."""
        self.workers.close()
        self.memory.close()
        self.ranks.sum([0])  # until all ranks have closed it
        if self.ranks.rank == 0:
            self._remove()
        self.accelerator.end_training()


class _StepClock:
    """Times the steps of an epoch after the first ones, and keeps the last batch."""

    def __init__(self, trainer: RehearsalTrainer, num_steps: int, timed: int) -> None:
        self._trainer = trainer
        self._settling, self._num_steps = num_steps - timed, num_steps
        self._done = 0
        # Of a single step, from its start; otherwise from the end of the first steps.
        self._started = time.perf_counter()
        self._waits = {"wait_ranks": trainer.ranks.wait_seconds}
        self.images = 0
        self.seconds = 0.0
        self.waits: dict[str, float] = {}
        self.batch: Batch | None = None
        self.stored: MemoryBatch | None = None

    @property
    def timed(self) -> int:
        """Number of timed steps."""
        return self._num_steps - self._settling

    def after_step(self, window: Window, count: int) -> None:
        """Count a step; start or stop the watch where it falls due."""
        self._done += 1
        for batch, stored in window:
            # The largest: the last one of a small dataset may have a single image.
            if len(batch) and (self.batch is None or len(batch) >= len(self.batch)):
                self.batch, self.stored = batch, stored
        if self._done > self._settling:
            self.images += count
        if self._done in (self._settling, self._num_steps):
            self._trainer.wait_for_device()
        if self._done == self._settling:
            self._started, self._waits = time.perf_counter(), self._waits_so_far()
        if self._done == self._num_steps:
            self.seconds = time.perf_counter() - self._started
            waits = self._waits_so_far()
            self.waits = {name: (waits[name] - self._waits.get(name, 0.0)) / self.seconds for name in waits}

    def _waits_so_far(self) -> dict[str, float]:
        ranks = self._trainer.ranks
        more = {"wait_ranks": ranks.wait_seconds} if ranks.world_size > 1 else {}
        return {**self._trainer.memory.waits, **more}


def _seconds(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def _images_per_second(loader: Any, prepared: int) -> float:
    """Return images/s of a loader, after the batches that it has prepared when the first one is taken."""
    settling = min(prepared, len(loader) // 2)
    images, started = 0, time.perf_counter()
    for number, batch in enumerate(loader):
        if number < settling:
            started = time.perf_counter()
        else:
            images += len(batch)
    return images / (time.perf_counter() - started) if images else 0.0


def _checkpoint_bytes(run: Path) -> int:
    """Return the bytes of the largest checkpoint."""
    folders = list((run / "checkpoints").glob("step-*"))
    return max((sum(file.stat().st_size for file in folder.iterdir()) for folder in folders), default=0)


@contextmanager
def rehearsal(
    config: Config, num_steps: int, clean_up_with: Callable[[Callable[[], None]], None]
) -> Iterator[tuple[RehearsalTrainer, ScratchFolders]]:
    """Yield a trainer of short epochs and where it writes; nothing of that is left after the block.

    After an error every rank removes it: others may have written meanwhile. `clean_up_with` gets the removal,
    for an end of the process that leaves no block.
    """
    start_accelerator(replace(config, log=replace(config.log, trackers=())))  # joins the ranks
    ranks = process_group(config.hardware.timeout_minutes)
    folders = ScratchFolders(config, _shared_token(ranks))
    clean_up_with(folders.remove)
    short = rehearsal_config(config, folders.folder, folders.store_place)
    try:
        with RehearsalTrainer(short, num_steps, folders.remove) as trainer:
            yield trainer, folders
    except BaseException:
        folders.remove()
        raise


def _shared_token(ranks: Ranks) -> str:
    return ranks.broadcast(uuid.uuid4().hex[:8].encode() if ranks.rank == 0 else None).decode()
