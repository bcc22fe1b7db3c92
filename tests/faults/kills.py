"""Which operations a life has, and what came of the kills: for tests to iterate over, and for the report."""

from collections import Counter
from collections.abc import Iterator, Sequence

from tests.faults.injector import How, Operation

hits: Counter[tuple[str, str]] = Counter()
"""Kills of this test session by (scene, kind of operation)."""


def points(operations: Sequence[Operation]) -> Iterator[tuple[int, How]]:
    """Each operation once, and each write also half-way through."""
    for operation in operations:
        yield operation.number, "before"
        if operation.is_write:
            yield operation.number, "torn"


def one_of_each_kind(operations: Sequence[Operation]) -> list[Operation]:
    """The first operation of each kind and name."""
    found: dict[tuple[str, str], Operation] = {}
    for operation in operations:
        found.setdefault((operation.kind, operation.name), operation)
    return list(found.values())


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
