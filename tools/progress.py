"""Progress of long work: a bar on a terminal, otherwise a line every ten seconds."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from bigscl.common.text import printable

SECONDS_BETWEEN_LINES = 10.0


@contextmanager
def progress(title: str, total: int, unit: str) -> Iterator[Callable[[int, str], None]]:
    """Yield `advance(count, what)`, to call when `count` more units are done, the last of them `what`."""
    if sys.stderr.isatty():
        with _bar(title, total, unit) as advance:
            yield advance
    else:
        yield _lines(title, total, unit)


@contextmanager
def _bar(title: str, total: int, unit: str) -> Iterator[Callable[[int, str], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(f"{unit}, {{task.fields[what]}}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=total, what="")
        yield lambda count, what: bar.update(task, advance=count, what=printable(what))


def _lines(title: str, total: int, unit: str) -> Callable[[int, str], None]:
    """Print the first step, the last, and at most one every few seconds in between."""
    done, printed = 0, float("-inf")

    def advance(count: int, what: str) -> None:
        nonlocal done, printed
        done += count
        if done >= total or time.monotonic() - printed >= SECONDS_BETWEEN_LINES:
            printed = time.monotonic()
            print(printable(f"{title}: {done} of {total} {unit}, {what}"), file=sys.stderr, flush=True)

    return advance
