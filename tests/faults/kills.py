"""Which operations a life has, and what came of the kills: for tests to iterate over, and for the report."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from tests.faults.injector import How, Operation

hits: Counter[tuple[str, str]] = Counter()
"""Kills of this test session by (scene, kind of operation)."""


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


def try_all(points: Sequence[tuple[Any, ...]], attempt: Callable[..., None]) -> None:
    """Try every point before saying which ones failed."""
    failures = []
    for point in points:
        try:
            attempt(*point)
        except Exception as error:
            failures.append(f"{point}: {type(error).__name__}: {str(error)[:600]}")
    if failures:
        pytest.fail(f"{len(failures)} of {len(points)} failed:\n" + "\n".join(failures), pytrace=False)


def count(scene: str, hit: Sequence[Operation]) -> None:
    """Remember a kill for the report; a life that ended before its kill has none."""
    for operation in hit:
        hits[scene, operation.kind] += 1


def report() -> list[str]:
    """A line per scene, with the kinds of operations its kills fell on."""
    lines = []
    for scene in dict.fromkeys(scene for scene, _ in hits):
        kinds = {kind: number for (where, kind), number in hits.items() if where == scene}
        parts = ", ".join(f"{kind} {number}" for kind, number in sorted(kinds.items()))
        lines.append(f"{scene}: {sum(kinds.values())} kills ({parts})")
    return [*lines, f"all: {sum(hits.values())} kills"] if lines else []
