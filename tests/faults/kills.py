"""Which operations a life has, and what came of the kills: for tests to iterate over, and for the report."""

import os
import re
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.faults.injector import How, Operation

AT_A_TIME = min(4, os.cpu_count() or 1)
hits: Counter[tuple[str, str]] = Counter()
"""Kills of this test session by (scene, kind of operation)."""
_lock = threading.Lock()


def points(operations: Sequence[Operation]) -> Iterator[tuple[int, How]]:
    """Each operation once, and each write also half-way through."""
    for operation in operations:
        yield operation.number, "before"
        if operation.is_write:
            yield operation.number, "torn"


def one_of_each_kind(operations: Sequence[Operation], *, by_name: bool = True) -> list[Operation]:
    """One operation of each kind (and name), in the order of their first ones.

    It is the middle one of its kind: by then the store is full, and there is something to lose.
    """
    found: dict[tuple[str, str], list[Operation]] = {}
    for operation in operations:
        found.setdefault((operation.kind, operation.name if by_name else ""), []).append(operation)
    return [same[len(same) // 2] for same in found.values()]


def distinct(operations: Sequence[Operation]) -> list[Operation]:
    """Leave out syncs and creations: a stop before them leaves the files as one after the operation before.

    The slow tests have them all.
    """
    return [each for each in operations if each.name not in ("create", "fsync")]


def try_all(points: Sequence[tuple[Any, ...]], attempt: Callable[..., None]) -> None:
    """Try every point, some at a time, before saying which ones failed."""

    def failure_of(point: tuple[Any, ...]) -> str:
        try:
            attempt(*point)
        except Exception as error:
            return f"{point}: {type(error).__name__}: {said(error)[:900]}"
        return ""

    with ThreadPoolExecutor(AT_A_TIME) as pool:
        failures = list(filter(None, pool.map(failure_of, points)))
    if failures:
        causes = Counter(_cause(failure) for failure in failures).most_common()
        lines = [f"{len(failures)} of {len(points)} failed:", *(f"{n} x {cause}" for cause, n in causes)]
        pytest.fail("\n".join([*lines, "", *failures]), pytrace=False)


def said(error: Exception) -> str:
    """The message; for an assertion without one, what it asserts."""
    return str(error).strip() or str(traceback.extract_tb(error.__traceback__)[-1].line)


def _cause(failure: str) -> str:
    """The first line, without what differs from one point to the next."""
    first = failure.partition(": ")[2].strip().partition("\n")[0]
    return re.sub(r"[0-9a-f]{32}|\d+", "#", re.sub(r"(/[\w.+-]+)*/(store|run-\d+)\b", "STORE", first))[:160]


def count(scene: str, hit: Sequence[Operation]) -> None:
    """Remember a kill for the report; a life that ended before its kill has none."""
    with _lock:
        hits.update((scene, operation.kind) for operation in hit)


def report() -> list[str]:
    """A line per scene, with the kinds of operations its kills fell on."""
    lines = []
    for scene in dict.fromkeys(scene for scene, _ in hits):
        kinds = {kind: number for (where, kind), number in hits.items() if where == scene}
        parts = ", ".join(f"{kind} {number}" for kind, number in sorted(kinds.items()))
        lines.append(f"{scene}: {sum(kinds.values())} kills ({parts})")
    return [*lines, f"all: {sum(hits.values())} kills"] if lines else []
