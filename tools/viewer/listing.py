"""Pages of samples: which pairs of an index are shown, and in which order."""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from bigscl.common.user_error import UserError
from bigscl.data.index import Index
from bigscl.store import Array
from bigscl.tools.shared.shard_passes import to_float32
from bigscl.tools.viewer.score_index import (
    ABSENT,
    ANNOTATED,
    EXPECTED,
    PRESENT,
    ScoreIndex,
    find_rows,
    value_of,
)

BLOCK = 2**22
Order = Literal["surprise", "change", "heat", "against", "score", "row"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """A request of the grid. It shows one pair for each sample: of the class, or of the order's own class."""

    order: Order = "surprise"
    number: int | None = None
    """A class."""
    annotated: bool | None = None
    expected: bool | None = None
    present: bool | None = None
    low: float = 0.0
    high: float = 1.0
    """Bounds of the score."""
    key: str = ""
    """A part of the key."""
    reverse: bool = False


def listed(index: ScoreIndex, query: Query, samples: Index, against: "Against | None" = None) -> Array:
    """Return all pairs that a query asks for, in its order. Ties are by row."""
    if query.order == "against" and against is None:
        raise UserError("sort: there is no second run to compare with")
    pairs = (
        _of_class(index, query, against) if query.number is not None else _of_samples(index, query, against)
    )
    if (wanted := _wanted(pairs, query, samples)) is not None:
        pairs = pairs[wanted]
    return pairs[::-1] if query.reverse else pairs


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Against:
    """Another run of the same samples."""

    index: ScoreIndex
    pairs: NDArray[Any]
    """Those on which the runs differ most, one for each sample: see `disagreement`."""


def _of_samples(index: ScoreIndex, query: Query, against: Against | None) -> Array:
    """Return one pair for each sample."""
    if query.order == "against":
        assert against is not None
        return against.pairs
    # The highest score of any class would be that of the annotated one: the surprise is the highest other.
    found: Array = index.orders["surprise" if query.order == "score" else query.order]
    return found


def _of_class(index: ScoreIndex, query: Query, against: Against | None) -> Array:
    """Return the pairs of one class."""
    assert query.number is not None
    pairs = index.of_class(query.number)
    if query.order == "surprise":
        return np.asarray(pairs[pairs["flags"] & (ANNOTATED | ABSENT) == 0])
    if query.order == "score":
        return pairs
    if query.order == "row":
        return pairs[np.argsort(pairs["row"])]
    if query.order == "against":
        assert against is not None
        pairs = _differing(pairs, against.index.of_class(query.number))
    value = value_of(pairs, "change" if query.order == "against" else query.order)
    return pairs[np.lexsort((pairs["row"], -value))]


def _differing(pairs: Array, other: Array) -> Array:
    """Return the pairs with the difference of two runs as their change; what the other lacks counts as 0."""
    its = np.zeros(len(pairs), np.float32)
    if len(other):
        places, found = find_rows(other, pairs["row"])
        its[found] = to_float32(other["score"][places])
    pairs = pairs.copy()
    pairs["change"] = np.abs(to_float32(pairs["score"]) - its).astype(np.float16).view(np.uint16)
    return pairs


def _wanted(pairs: Array, query: Query, samples: Index) -> NDArray[np.bool_] | None:
    """Return which pairs match; None if all do, so that they need not be copied."""
    if query == Query(order=query.order, number=query.number, reverse=query.reverse):
        return None
    wanted: NDArray[np.bool_] = np.ones(len(pairs), bool)
    for flag, asked in ((ANNOTATED, query.annotated), (EXPECTED, query.expected), (PRESENT, query.present)):
        if asked is not None:
            wanted &= (pairs["flags"] & flag != 0) == asked
    if query.low > 0 or query.high < 1:
        scores = to_float32(pairs["score"])
        wanted &= (scores >= query.low) & (scores <= query.high)
    if query.key:
        matching = np.zeros(len(samples.keys), bool)
        matching[rows_with(query.key, samples)] = True
        wanted &= matching[pairs["row"]]
    return wanted


def rows_with(part: str, samples: Index) -> NDArray[np.int64]:
    """Return the rows whose keys contain this text."""
    wanted = np.frombuffer(part.encode(errors="surrogateescape"), np.uint8)
    content, offsets, found = samples.keys.values, samples.keys.offsets, [np.empty(0, np.int64)]
    # A part of the bytes at a time: a common letter is at millions of places.
    for first in range(0, len(content), BLOCK):
        block = content[first : first + BLOCK + len(wanted) - 1]
        places = np.flatnonzero(block[: len(block) - len(wanted) + 1] == wanted[0])
        for place, letter in enumerate(wanted[1:], 1):
            places = places[block[places + place] == letter]
        rows = np.searchsorted(offsets, places + first, side="right") - 1
        found.append(np.unique(rows[places + first + len(wanted) <= offsets[rows + 1]]))
    return np.unique(np.concatenate(found))
