"""Log lines, progress bar, metrics.jsonl and trackers of a run. Only rank 0 writes them."""

import json
import logging
import math
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from accelerate import Accelerator
from PIL import Image
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor

from bigscl.common.files import append_lines, read_json_lines, write_text
from bigscl.config import Config, to_yaml
from bigscl.config.load import flat_settings
from bigscl.distributed.ranks import Ranks
from bigscl.losses.objective import Loss

logger = logging.getLogger(__name__)
NAMES = tuple("loss" if name == "total" else name for name in Loss._fields)
"""Names of the loss and its parts in metrics."""
PACKAGES = ("bigscl", "torch", "torchvision", "accelerate", "zarr", "numpy", "webdataset")


def start_logging(rank: int) -> None:
    """Log everything with its time on rank 0, and only warnings and errors on other ranks."""
    logging.basicConfig(
        level=logging.INFO if rank == 0 else logging.WARNING,
        format="%(asctime)s %(levelname).1s %(message)s" if rank == 0 else f"rank {rank}: %(message)s",
        datefmt="%H:%M:%S",
        force=True,
    )
    # These libraries report every retry and request at INFO.
    for name in ("httpx", "urllib3", "matplotlib", "PIL", "h5py", "absl"):
        logging.getLogger(name).setLevel(logging.WARNING)


def environment(command: list[str]) -> dict[str, Any]:
    """Return command, versions of packages and revision of the sources, to be kept with the run."""
    return {
        "command": command,
        "python": sys.version.split()[0],
        "versions": {name: version(name) for name in PACKAGES},
        "revision": _revision(),
        "time": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
    }


def _revision() -> str | None:
    """Return the revision of the sources; None without a repository or without git, as in a container."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() or None


class MetricsLog:
    """Metrics of a run: one JSON object per line in metrics.jsonl, and the same values to the trackers."""

    def __init__(self, folder: Path, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._path = folder / "metrics.jsonl"
        self._writes = accelerator.is_main_process
        self._console = Console(stderr=True) if self._writes and sys.stderr.isatty() else None
        self._pace: EpochTimer | None = None
        self._bar: EpochBar | None = None
        self._ended_at: float | None = None
        """When the last step of the epoch before was done."""

    def drop_after(self, step: int) -> None:
        """Remove what was logged after this step: the run resumes there and will log it again."""
        if self._writes and self._path.exists():
            kept = (line for line in read_json_lines(self._path) if _step_of(line) <= step)
            write_text(self._path, "".join(json.dumps(line) + "\n" for line in kept))

    def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        if not self._writes:
            return
        append_lines(self._path, [json.dumps({"kind": kind, "step": step, **values})])
        numbers = {
            f"{kind}/{name}": value for name, value in values.items() if isinstance(value, int | float)
        }
        self._accelerator.log(numbers, step=step)

    def log_image(self, name: str, path: Path, step: int) -> None:
        """Send a picture to the trackers that take images."""
        if not self._writes:
            return
        with Image.open(path) as picture:
            pixels = np.asarray(picture.convert("RGB"))
        for tracker in self._accelerator.trackers:
            if hasattr(tracker, "log_images"):
                layout = {"dataformats": "NHWC"} if tracker.name == "tensorboard" else {}
                tracker.log_images({name: pixels[None]}, step=step, **layout)

    def progress(self, epoch: int, epochs: int, total: int, done: int) -> AbstractContextManager[Any]:
        """Return a progress bar over an epoch's steps on a terminal; elsewhere it shows nothing."""
        between = 0.0 if self._ended_at is None else time.perf_counter() - self._ended_at
        self._pace = EpochTimer(epoch, epochs, total, done, between)
        if self._console is None:
            return nullcontext()
        self._bar = EpochBar(self._pace, epoch, epochs, self._console)
        return self._bar.progress

    def advance(self) -> None:
        assert self._pace is not None
        self._pace.done += 1
        if self._pace.done == self._pace.total:
            self._ended_at = time.perf_counter()
        if self._bar is not None:
            self._bar.advance()

    def step(self, epoch: int, step: int, values: Mapping[str, float]) -> None:
        """Write a step's values to the metrics, and show them in the bar or as a log line."""
        assert self._pace is not None
        self.write("train", step, {"epoch": epoch + 1, **values})
        if self._bar is not None:
            self._bar.show(values)
        elif self._writes:
            logger.info("%s", describe(self._pace, values))

    def working(self, title: str, total: int | None = None) -> AbstractContextManager[Callable[[int], None]]:
        """Show the title and progress of long work; call what the block gets with the units done."""
        if not self._writes:
            return nullcontext(lambda done: None)
        return working(title, total, self._console)


def _step_of(line: Mapping[str, Any]) -> float:
    """Return the step that a line of metrics belongs to; infinity if the line has none."""
    step = line.get("step")
    return step if isinstance(step, int) else math.inf


class Meter:
    """Mean losses and speed over all ranks since the last reading, and the longest waits of any rank."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._waits = self._with_ranks({})
        self._reset(time.perf_counter())

    def _reset(self, now: float) -> None:
        self._sums: dict[str, Tensor] = {}
        self._count = 0
        self._since = now

    def add(self, loss: Loss) -> None:
        """Add the losses of a batch, without waiting for the device."""
        for name, values in loss._asdict().items():
            total = values.detach().sum()
            self._sums[name] = self._sums[name] + total if name in self._sums else total
        self._count += len(loss.total)

    def read(self, waits: Mapping[str, float]) -> dict[str, float]:
        """Return the means since the last reading, images/s, and the shares of time spent waiting.

        `waits` are this rank's, in seconds of the epoch so far. Each share is the largest of all ranks: a
        step is as slow as its slowest rank.
        """
        now = time.perf_counter()
        seconds = now - self._since
        sums = [float(self._sums.get(name, 0.0)) for name in Loss._fields]
        waits = self._with_ranks(waits)
        shares = [(value - self._waits.get(name, 0.0)) / seconds for name, value in waits.items()]
        # Each rank has a place of its own for its shares, so that the sum also gathers them.
        places = [0.0] * len(shares) * self._ranks.world_size
        places[self._ranks.rank * len(shares) : (self._ranks.rank + 1) * len(shares)] = shares
        *totals, count = (gathered := self._ranks.sum([*sums, self._count, *places]))[: len(sums) + 1]
        of_ranks = gathered[len(sums) + 1 :]
        means = {name: total / max(1, count) for name, total in zip(NAMES, totals, strict=True)}
        largest = {name: max(of_ranks[place :: len(shares)]) for place, name in enumerate(waits)}
        self._waits = waits
        self._reset(now)  # the sum above, and the wait in it, belong to the next reading
        return {**means, "images_per_second": count / seconds, **largest}

    def _with_ranks(self, waits: Mapping[str, float]) -> dict[str, float]:
        """Add the seconds that this rank waited for other ranks, if there are any."""
        return {**waits, "wait_ranks": self._ranks.wait_seconds} if self._ranks.world_size > 1 else {**waits}


# Trackers

FLAT = ("tensorboard", "mlflow")
"""Trackers whose settings are single values; others show nested ones."""


def start_trackers(accelerator: Accelerator, config: Config, run_id: str, step: int) -> None:
    """Start the trackers of a run that is new, or resumed at a step: then those that can continue theirs."""
    chosen, started = list(accelerator.log_with), []
    values = yaml.safe_load(to_yaml(config))
    # Lists and None as texts.
    flat = {
        name: value if isinstance(value, bool | int | float | str) else str(value)
        for name, value in flat_settings(values)
    }
    for tracker in chosen:
        name = str(getattr(tracker, "value", tracker))
        # TensorBoard takes the project as a folder of the run, and shows settings as a run of their own.
        project = "tensorboard" if name == "tensorboard" else config.log.project
        settings = flat if name in FLAT else values
        accelerator.log_with, accelerator.trackers = [tracker], []
        accelerator.init_trackers(
            project,
            config=None if name == "tensorboard" and step else settings,
            init_kwargs={name: tracker_options(name, config, run_id, step)},
        )
        started += accelerator.trackers
    accelerator.log_with, accelerator.trackers = chosen, started


def tracker_options(tracker: str, config: Config, run_id: str, step: int) -> dict[str, Any]:
    """Return the options with which a tracker names the run, and continues it after a resume at `step`."""
    name = config.log.name or config.run.absolute().name
    match tracker:
        case "tensorboard":
            # Of the events that an earlier start has written, those after the step are dropped.
            return {"purge_step": step + 1} if step else {}
        case "wandb":
            return {"name": name, "id": run_id, "resume": "allow", "dir": str(config.run)}
        case "trackio":
            return {"name": name, "resume": "allow"}
        case "mlflow":
            return {"run_name": name}
        case "clearml":
            return {"task_name": name, "continue_last_task": bool(step)}
        case "swanlab":
            return {"experiment_name": name}
        case _:
            return {}


# Progress for people: a bar on a terminal, elsewhere lines with the same facts

SECONDS_BETWEEN_LINES = 10.0


class EpochTimer:
    """The steps done of an epoch, and the time left of the epoch and the run at the speed so far.

    `between_seconds` is what the end of the last epoch took: selection, commit, validation and checkpoint.
    """

    def __init__(self, epoch: int, epochs: int, total: int, done: int, between_seconds: float = 0.0) -> None:
        self._epoch, self._epochs = epoch, epochs
        self._between_seconds = between_seconds
        self.total = total
        self.done = self._first = done
        self._started = time.perf_counter()

    def seconds_left(self) -> tuple[float, float]:
        """Return the seconds left of the epoch and of the run, with the work at the ends of epochs."""
        trained = max(1, self.done - self._first)
        per_step = (time.perf_counter() - self._started) / trained
        epoch = (self.total - self.done) * per_step
        epochs = self._epochs - self._epoch
        return epoch, epoch + (epochs - 1) * self.total * per_step + epochs * self._between_seconds

    def __str__(self) -> str:
        return f"epoch {self._epoch + 1}/{self._epochs} step {self.done}/{self.total}"


class EpochBar:
    """The bar of an epoch's steps, for a terminal of at least 100 columns."""

    def __init__(self, pace: EpochTimer, epoch: int, epochs: int, console: Console) -> None:
        self.progress = Progress(
            TextColumn("epoch {task.description}"),
            BarColumn(bar_width=4),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}"),
            console=console,
            transient=True,
        )
        self._pace = pace
        self._task = self.progress.add_task(f"{epoch + 1}/{epochs}", total=pace.total, state="")
        self.advance()

    def advance(self) -> None:
        self.progress.update(self._task, completed=self._pace.done)

    def show(self, values: Mapping[str, float]) -> None:
        """Show the time left of epoch and run, the loss, the speed and the largest waits."""
        epoch, run = self._pace.seconds_left()
        state = f"left {clock(epoch)}/{clock(run)} loss {values['loss']:.4f} "
        state += f"{values['images_per_second']:.0f}/s {largest_waits(values)}"
        self.progress.update(self._task, state=state)


def describe(pace: EpochTimer, values: Mapping[str, float]) -> str:
    """Return a step's line: what the bar shows, and all waits."""
    epoch, run = pace.seconds_left()
    waits = " ".join(f"{name} {share:.0%}" for name, share in waits_in(values).items())
    return (
        f"{pace}: loss {values['loss']:.4f}, {values['images_per_second']:.0f} images/s, "
        f"epoch ends in {clock(epoch)}, run in {clock(run)}, waits: {waits}"
    )


def waits_in(values: Mapping[str, float]) -> dict[str, float]:
    """Return the shares of the time that the step waited, by what it waited for."""
    return {name.removeprefix("wait_"): values[name] for name in values if name.startswith("wait_")}


def largest_waits(values: Mapping[str, float]) -> str:
    waits = sorted(waits_in(values).items(), key=lambda wait: -wait[1])
    return " ".join(f"{name} {share:.0%}" for name, share in waits[:2])


def clock(seconds: float) -> str:
    """Return a duration as `m:ss`, `h:mm:ss`, or days and hours."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24}d{hours % 24:02}h"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


@contextmanager
def working(title: str, total: int | None, console: Console | None) -> Iterator[Callable[[int], None]]:
    """Show the title of long work and its progress; call what the block gets with the units done.

    The console shows a bar; without one, a line is logged every ten seconds.
    """
    logger.info("%s", title)
    shown = _in_a_bar(title, total, console) if console is not None else _in_lines(title, total)
    started = time.perf_counter()
    with shown as show:
        yield show
    seconds = time.perf_counter() - started
    if seconds >= SECONDS_BETWEEN_LINES:
        logger.info("%s: done in %s", title, clock(seconds))


@contextmanager
def _in_a_bar(title: str, total: int | None, console: Console) -> Iterator[Callable[[int], None]]:
    counts = [] if total is None else [MofNCompleteColumn()]
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=20), *counts, TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda done: bar.update(task, completed=done)


@contextmanager
def _in_lines(title: str, total: int | None) -> Iterator[Callable[[int], None]]:
    done, ended, started = 0, threading.Event(), time.perf_counter()

    def show(count: int) -> None:
        nonlocal done
        done = count

    def tell() -> None:
        while not ended.wait(SECONDS_BETWEEN_LINES):
            counted = "" if total is None else f"{done} of {total}, "
            logger.info("%s: %s%s so far", title, counted, clock(time.perf_counter() - started))

    teller = threading.Thread(target=tell, name="progress", daemon=True)
    teller.start()
    try:
        yield show
    finally:
        ended.set()
        teller.join()
