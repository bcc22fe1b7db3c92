"""Numbers and tables for people."""

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from bigscl.common.text import printable
from bigscl.common.text import size as size


def print_result(facts: Any, text: str, as_json: bool) -> None:
    """Print the facts as JSON, or the text with control characters escaped."""
    print(json.dumps(facts) if as_json else printable(text, keep="\n\t"))


def plural(number: int, what: str) -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def ranges(numbers: Sequence[int], most: int = 5) -> str:
    """Return rising numbers as `3, 16-31, 40`; after `most` spans, how many more there are."""
    parts: list[tuple[int, int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1] = (parts[-1][0], number)
        else:
            parts.append((number, number))
    told = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in parts[:most])
    left = sum(last - first + 1 for first, last in parts[most:])
    return f"{told} and {left:,} more" if left else told


def utc_time(seconds: float) -> str:
    """Return a time in UTC; the number of seconds itself if a damaged file has an impossible one."""
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, ValueError, OSError):
        return f"{seconds:g} s"


def table(heads: Sequence[str], rows: Sequence[Sequence[object]], indent: str = "  ") -> str:
    """Return columns under their headings; numbers are aligned right, all else left."""
    cells = [[printable(str(cell)) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(heads, *cells, strict=True)]
    right = [all(isinstance(row[column], int | float) for row in rows) for column in range(len(heads))]
    lines = []
    for line in [list(heads), *cells]:
        padded = [
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(line, widths, right, strict=True)
        ]
        lines.append((indent + "  ".join(padded)).rstrip())
    return "\n".join(lines)


def histogram_text(labels: Sequence[str], counts: Sequence[int], width: int = 40, indent: str = "  ") -> str:
    most, room = max([*counts, 1]), max(map(len, labels), default=0)
    return "\n".join(
        f"{indent}{label.rjust(room)}  {'#' * -(-count * width // most)} {count:,}"
        for label, count in zip(labels, counts, strict=True)
    )


FEW_VISITS_SHARE = 0.1
"""Weight of the initial value in a score from which on commands warn: 10 visits with momentum 0.8."""


def few_visits_note(share: float) -> list[str]:
    """Return a line that warns of scores of few visits, if their initial value still weighs much."""
    if share < FEW_VISITS_SHARE:
        return []
    return [
        f"  few visits: {share:.0%} of a stored score is still its initial value. It is taken out here, but "
        f"the rest is the mean of few predictions: train for more epochs before you trust it."
    ]


# Progress

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
