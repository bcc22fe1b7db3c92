"""A short rehearsal of a run: real steps on its own data, in a folder beside the run's that is then removed.

The trainer is the real one. Its plan is cut after a few dozen steps, and each kind of epoch (warm-up or main,
layout of the store) is rehearsed once, with the same samples: so a later kind reads from the storage what an
earlier one wrote.
"""

import logging
import os
import resource
import shutil
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bigscl.config import CheckpointConfig, Config
from bigscl.config.schedule import EpochPlan
from bigscl.data.epoch_plan import Plan, Stream, batch_lengths
from bigscl.data.loader import Batch
from bigscl.distributed.ranks import process_group
from bigscl.memory.epoch_io import to_host
from bigscl.memory.lookup import MemoryBatch, updated_averages
from bigscl.preflight.device_check import Difference, ReferenceCheck, precisions_to_check, worst
from bigscl.store import open_backend
from bigscl.train import Stopped, Trainer, Window
from bigscl.training.accelerator import start_accelerator
from bigscl.training.metrics_log import Meter
from bigscl.training.model_state import map_side

logger = logging.getLogger(__name__)
Facts = dict[str, Any]

PREPARED_PER_WORKER = 2
"""Batches that a loader worker prepares ahead."""
SETTLING_STEPS = 3
"""Steps until a GPU has chosen its kernels and allocated its memory."""
REPETITIONS = range(2, 9)
REPETITION_SECONDS = 10.0
"""Of a step that is measured alone: at most so many, and so long together if that allows the fewest."""


NEVER = 10**9
PATIENCE_SECONDS = 10.0
"""How long the removal of the folder is tried while other threads and ranks may still write into it."""


# The plan: a short epoch of each type that a run has, in folders that are removed in the end


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochType:
    """Epochs of a run that cost the same: the same parameters train, and the store has the same layout."""

    epochs: range
    is_warmup: bool
    is_compacted: bool
    """Whether the heatmaps are those of the top classes only."""


def epoch_types(config: Config) -> list[EpochType]:
    compact_after = config.compact_after or NEVER
    bounds = {0, config.schedule.warmup.epochs, compact_after, config.schedule.epochs}
    edges = sorted(edge for edge in bounds if edge <= config.schedule.epochs)
    return [
        EpochType(
            epochs=range(first, last),
            is_warmup=config.schedule.is_warmup(first),
            is_compacted=first >= compact_after,
        )
        for first, last in pairwise(edges)
    ]


def rehearsal_config(config: Config, folder: Path, place: str | None) -> Config:
    """Return the config of the rehearsal: an epoch of each kind, neither validated nor tracked."""
    kinds = epoch_types(config)
    num_warmup = sum(kind.is_warmup for kind in kinds)
    num_first_layout = sum(not kind.is_compacted for kind in kinds)
    schedule, compacts = config.schedule, config.store.top is not None
    return replace(
        config,
        run=folder,
        schedule=replace(
            schedule,
            warmup=replace(schedule.warmup, epochs=num_warmup),
            main=replace(schedule.main, epochs=len(kinds) - num_warmup),
        ),
        store=replace(
            config.store,
            url=None if place is None else f"{place}/store",
            compact_after=num_first_layout if compacts else None,
        ),
        selection=replace(config.selection, start_epoch=1),
        checkpoint=CheckpointConfig(background=config.checkpoint.background),
        validation=replace(config.validation, every_epochs=NEVER),
        log=replace(config.log, trackers=(), pictures_every=0, ids=False),
    )


def first_batches(plan: Plan, count: int, rows_per_shard: int) -> Plan:
    """Return the plan with at most the first `count` batches of each rank."""

    def cut(stream: Stream, batches: int) -> Stream:
        ids = stream.ids[: sum(batch_lengths(len(stream.ids), plan.batch_size)[: max(0, batches)])]
        return Stream(shards=stream.shards[np.isin(stream.shards, ids // rows_per_shard)], ids=ids)

    def cut_all(streams: tuple[Stream, ...]) -> tuple[Stream, ...]:
        # Streams take turns: the first one may have a batch more than the last.
        return tuple(cut(stream, -(-(count - turn) // len(streams))) for turn, stream in enumerate(streams))

    return replace(plan, streams=tuple(cut_all(streams) for streams in plan.streams))


class ScratchFolders:
    """A folder beside that of the run, on the same storage, and a place beside the run's store."""

    def __init__(self, config: Config, token: str) -> None:
        self._options = config.store.options()
        self.folder = config.run.with_name(f"{config.run.name}.preflight-{token}")
        url = config.store.url if config.store.kind == "disk" else None
        self.store_place = None if url is None else f"{url.rstrip('/')}.preflight-{token}"
        # Folders that must be created for a local path, the innermost first.
        places = [Path(place).absolute() for place in (str(self.folder), url or "") if "://" not in place]
        self._missing = [parent for place in places for parent in place.parents if not parent.exists()]

    @property
    def place(self) -> str:
        return self.store_place or str(self.folder)

    def remove(self) -> None:
        """Remove all of it; repeatedly, if something is still being written."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            shutil.rmtree(self.folder, ignore_errors=True)
            if self.store_place is not None:
                with suppress(Exception):  # an error of the storage was reported by the run itself
                    open_backend(self.store_place, self._options).delete_tree("")
            if not self.folder.exists():
                break
            if time.monotonic() > deadline:
                logger.warning("%s: could not be removed. Delete it by hand.", self.folder)
                return
            time.sleep(0.1)
        for parent in self._missing:
            with suppress(OSError):  # not empty: others use it meanwhile
                parent.rmdir()


# Real steps


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

    def measure(self, kinds: list[EpochType]) -> Facts:
        """Rehearse each kind of epochs, then the loader alone; return the measurements of this rank.

        Speeds of the loader are those without a network; `worker_bytes` is the peak of the largest worker.
        """
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
        gpu = self.device.type == "cuda"
        folders = (self.folder.path / "checkpoints").glob("step-*")
        checkpoints = [sum(file.stat().st_size for file in folder.iterdir()) for folder in folders]
        return {
            "host": os.uname().nodename,
            "device": torch.cuda.get_device_name(self.device) if gpu else self.device.type,
            "precision": self._precision,
            "kinds": measured,
            "differences": [asdict(difference) for difference in differences],
            "loader_images_per_second": loader,
            "skipped": len(self._skipped),
            "checkpoint_bytes": max(checkpoints, default=0),
            "seconds": time.perf_counter() - started,
            **usage,
        }

    @property
    def _precision(self) -> str:
        """The precision of the run: that of its config, or fp32 if this CPU cannot compute in bf16."""
        precision: str = self.accelerator.mixed_precision
        return {"no": "fp32"}.get(precision, precision)

    def _peak_memory(self) -> Facts:
        """Return the peaks so far; the comparison with the CPU, which comes later, needs more."""
        gpu, unit = self.device.type == "cuda", 1 if sys.platform == "darwin" else 1024
        return {
            "process_bytes": unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
            "worker_bytes": unit * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss,
            "gpu_bytes": torch.cuda.max_memory_allocated(self.device) if gpu else None,
            "gpu_total_bytes": torch.cuda.get_device_properties(self.device).total_memory if gpu else None,
        }

    # A kind of epochs

    def _measure_kind(self, epoch: int, kind: EpochType) -> Facts:
        """Rehearse a kind of epochs: `layout` of the store, none without one; `images` of all ranks.

        `waits` are shares of the time that the step waited on this rank, by what for. `step_seconds` is a
        step of one batch alone with the exchange of gradients, `compute_seconds` the same without. Training
        waits for `save_seconds` at a save within an epoch, for `end_seconds` at its end: selection, commit,
        checkpoint, and compaction where it falls due.
        """
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
        return {
            "first_epoch": kind.epochs.start,
            "last_epoch": kind.epochs.stop - 1,
            "is_warmup": kind.is_warmup,
            "layout": layout,
            "steps": clock.timed,
            "images": clock.images,
            "seconds": clock.seconds,
            "waits": clock.waits,
            "step_seconds": step,
            "compute_seconds": compute,
            "save_seconds": save,
            "end_seconds": end,
        }

    def train_step(
        self, window: Window, num_batches: int, meter: Meter, count: int, rate: float, gamma: float
    ) -> None:
        super().train_step(window, num_batches, meter, count, rate, gamma)
        assert self._clock is not None
        self._clock.after_step(window, count)

    def _step_seconds(self, clock: "_StepClock", *, exchange: bool) -> float:
        """Return the seconds of a step with its memory update, at rate 0, on a batch at hand."""
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
        """Return images/s of this rank's loader alone, mostly from shards that no cache holds."""
        plan = self._cut(super().plan(1))
        with self.metrics.working("measuring the loader alone"):
            return _images_per_second(self._loader(plan, 1), self._prepared_batches)

    def wait_for_device(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    # The end

    def _check_stop(self) -> None:
        (wanted,) = self.ranks.sum([self.stopping])
        if wanted:
            raise Stopped

    def close(self) -> None:
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
        return self._num_steps - self._settling

    def after_step(self, window: Window, count: int) -> None:
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
    token = ranks.broadcast(uuid.uuid4().hex[:8].encode() if ranks.rank == 0 else None).decode()
    folders = ScratchFolders(config, token)
    clean_up_with(folders.remove)
    short = rehearsal_config(config, folders.folder, folders.store_place)
    try:
        with RehearsalTrainer(short, num_steps, folders.remove) as trainer:
            yield trainer, folders
    except BaseException:
        folders.remove()
        raise
