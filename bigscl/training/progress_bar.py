"""Progress for people: the steps of an epoch with the time left, and long work between epochs.

A terminal shows a bar; elsewhere lines have the same facts.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

logger = logging.getLogger(__name__)

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
        """Show the current step."""
        self.progress.update(self._task, completed=self._pace.done)

    def show(self, values: Mapping[str, float]) -> None:
        """Show the time left of epoch and run, the loss, the speed and the largest waits."""
        epoch, run = self._pace.seconds_left()
        state = f"left {clock(epoch)}/{clock(run)} loss {values['total']:.4f} "
        state += f"{values['images_per_second']:.0f}/s {largest_waits(values)}"
        self.progress.update(self._task, state=state)


def describe(pace: EpochTimer, values: Mapping[str, float]) -> str:
    """Return a step's line: what the bar shows, and all waits."""
    epoch, run = pace.seconds_left()
    waits = " ".join(f"{name} {share:.0%}" for name, share in waits_in(values).items())
    return (
        f"{pace}: loss {values['total']:.4f}, {values['images_per_second']:.0f} images/s, "
        f"epoch ends in {clock(epoch)}, run in {clock(run)}, waits: {waits}"
    )


def waits_in(values: Mapping[str, float]) -> dict[str, float]:
    """Return the shares of the time that the step waited, by what it waited for."""
    return {name.removeprefix("wait_"): values[name] for name in values if name.startswith("wait_")}


def largest_waits(values: Mapping[str, float]) -> str:
    """Return the two largest waits as text."""
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
