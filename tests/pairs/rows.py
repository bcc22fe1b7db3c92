"""Rows of the table that cover every pair of values that can meet."""

from collections.abc import Iterator, Mapping
from functools import cache
from itertools import combinations

from allpairspy import AllPairs

from tests.pairs.table import DIMENSIONS, EXPENSIVE, REFUSALS, Refusal

Row = Mapping[str, str]
"""The name of the value that each dimension has."""
Pair = tuple[str, str, str, str]
"""Two dimensions in the order of the table, each followed by the name of its value."""


def refusal_of(row: Row) -> Refusal | None:
    """Why a row, or a part of one, is refused; None if it can be trained."""
    return next((refusal for refusal in REFUSALS if refusal.forbids(row)), None)


def pairs_of(row: Row) -> Iterator[Pair]:
    for (one, first), (other, second) in combinations(row.items(), 2):
        yield one, first, other, second


@cache
def all_pairs() -> frozenset[Pair]:
    """Every pair of values of two dimensions that is not refused."""
    return frozenset(
        (one, first, other, second)
        for (one, firsts), (other, seconds) in combinations(DIMENSIONS.items(), 2)
        for first in firsts
        for second in seconds
        if refusal_of({one: first, other: second}) is None
    )


@cache
def rows() -> tuple[Row, ...]:
    """Rows that cover all pairs, the same ones at every call."""
    names, values = list(DIMENSIONS), [list(values) for values in DIMENSIONS.values()]

    def is_allowed(started: list[str]) -> bool:
        return refusal_of(dict(zip(names, started, strict=False))) is None

    made = [dict(zip(names, found, strict=True)) for found in AllPairs(values, filter_func=is_allowed)]
    # Where many combinations are refused, AllPairs ends before it has tried every pair.
    missing = set(all_pairs()).difference(*map(pairs_of, made))
    while missing:
        row = _row_with(min(missing), missing)
        made.append(row)
        missing.difference_update(pairs_of(row))
    return tuple(_made_cheap(made))


def _row_with(pair: Pair, missing: set[Pair]) -> Row:
    """A row with this pair, and as many of the other missing ones as can be had one after the other."""
    one, first, other, second = pair
    fixed = {one: first, other: second}

    def fill(names: list[str], row: Row) -> Row | None:
        if not names:
            return {name: row[name] for name in DIMENSIONS}

        def gain(value: str) -> int:
            return sum((pair in missing) for pair in pairs_of(_in_order({**row, names[0]: value})))

        for value in sorted(DIMENSIONS[names[0]], key=gain, reverse=True):
            longer = {**row, names[0]: value}
            if refusal_of(longer) is None and (found := fill(names[1:], longer)) is not None:
                return found
        return None

    found = fill([name for name in DIMENSIONS if name not in fixed], fixed)
    assert found is not None, (
        f"{pair}: no run can have both, so a refusal of the pair is missing in the table"
    )
    return found


def _in_order(row: Row) -> Row:
    return {name: row[name] for name in DIMENSIONS if name in row}


def _made_cheap(made: list[Row]) -> list[Row]:
    """The rows with defaults wherever another row has the pairs, and without rows that add none."""
    counts: dict[Pair, int] = {}
    for row in made:
        for pair in pairs_of(row):
            counts[pair] = counts.get(pair, 0) + 1
    kept = []
    for row in made[::-1]:
        if all(counts[pair] > 1 for pair in pairs_of(row)):
            for pair in pairs_of(row):
                counts[pair] -= 1
            continue
        for name in EXPENSIVE:
            default = next(iter(DIMENSIONS[name]))
            other = {**row, name: default}
            lost, gained = (
                set(pairs_of(row)) - set(pairs_of(other)),
                set(pairs_of(other)) - set(pairs_of(row)),
            )
            if lost and all(counts[pair] > 1 for pair in lost) and refusal_of(other) is None:
                for pair in lost:
                    counts[pair] -= 1
                for pair in gained:
                    counts[pair] = counts.get(pair, 0) + 1
                row = other
        kept.append(row)
    return kept[::-1]
