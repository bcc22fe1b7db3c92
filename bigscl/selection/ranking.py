"""The selection at the end of an epoch: for each class the samples of highest score, exact, in numpy alone.

Each rank passes over its scores once and keeps the keys of samples that may be selected (`cuts` says what a
key is): not more of a class than are expected, and none below a floor that the ranks find first, from their
first chunks. From these keys they find the cut of each class together.
"""

# Shapes: L classes, n rows of a chunk.

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import chain
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from bigscl.selection.class_ratios import annotated_positives, expected_positives
from bigscl.selection.cuts import (
    DIGIT_BITS,
    GATHER_KEYS,
    NOTHING,
    KeyLayout,
    Keys,
    find_cuts,
    joined,
    part_of_cut,
)
from bigscl.selection.thresholds import Thresholds
from bigscl.store import Annotations, KeptScores, Ranked, SingleProcess, Transport, in_order

SAMPLE_SCORES = 2**24
THREADS = 2
"""They find the keys of chunks; whoever passes chunks may read them in threads too."""


Chunk = tuple[NDArray[np.int64], Ranked]
"""Ids [n], and what they are ranked by for each class [n,L], or for the classes that are kept."""


Item = TypeVar("Item")


def counted(chunks: Iterable[Item], show: Callable[[int], None]) -> Iterator[Item]:
    """Yield the chunks; show how many are done when the next one is asked for."""
    for done, chunk in enumerate(chunks):
        show(done)
        yield chunk


def given_first(chunks: Iterable[Chunk], annotations: Annotations) -> Iterator[Chunk]:
    """Yield the chunks with the value 1 for given positives, so that they are always expected."""
    for ids, values in chunks:
        if isinstance(values, KeptScores):
            given = annotations.is_given(np.broadcast_to(ids[:, None], values.classes.shape), values.classes)
            yield ids, replace(values, values=np.where(given, np.float16(1), values.values))
            continue
        values = values.copy()
        values[annotations.given.entries(ids)] = 1
        yield ids, values


def select(
    chunks: Iterable[Chunk],
    num_expected: NDArray[np.int64],
    transport: Transport,
    *,
    num_pseudo_positives: NDArray[np.int64] | None = None,
    annotations: Annotations | None = None,
    sample_scores: int = SAMPLE_SCORES,
    gather_keys: int = GATHER_KEYS,
) -> Thresholds:
    """Select the `num_expected[i]` samples of highest score as expected positives of each class i.

    The result is exact, ties by lowest id; a class that expects more positives than there are samples takes
    all. It is the same on every rank, for any division of the samples. Each rank passes its own (ids [n],
    scores [n,L]), no id twice; they are read once.

    Memory beyond the first chunks, of `sample_scores` scores, is about 60 bytes per expected positive: it
    grows with K times the samples, not with the classes. Ranks exchange tables of 128 counts a class, and
    rank 0 gathers at most `gather_keys` keys of 8 bytes.

    `num_pseudo_positives`, at most `num_expected`, asks for the thresholds of fewer positives of each class
    too. With `annotations`, the positives of the images of each class are counted: see `class_ratios`.
    """
    layout = KeyLayout.of(len(num_expected))
    chunks = iter(chunks)
    first = list(_first(chunks, sample_scores))
    contenders = _Contenders(layout, num_expected, _floor(first, num_expected, layout, transport))
    for keys in in_order(contenders.keys_of, chain(first, chunks), THREADS):
        contenders.add(keys)
    keys = contenders.all_keys()
    cuts = find_cuts(keys, num_expected, layout, transport, gather_keys)
    keys = layout.reaching(cuts, keys)
    fewer = positives = None
    if num_pseudo_positives is not None:
        highest = find_cuts(keys, num_pseudo_positives, layout, transport, gather_keys)
        fewer = layout.thresholds(highest, num_pseudo_positives)
    if annotations is not None:
        expected = expected_positives(annotations, layout.ids_of(keys), layout.classes_of(keys))
        positives = annotated_positives(annotations) + transport.sum_counts(expected)
    return replace(layout.thresholds(cuts, num_expected), pseudo_positives=fewer, positives=positives)


def _first(chunks: Iterator[Chunk], num_scores: int) -> Iterator[Chunk]:
    """Yield the first chunks, up to the one that makes it so many scores."""
    for ids, scores in chunks:
        yield ids, scores
        num_scores -= scores.values.size if isinstance(scores, KeptScores) else scores.size
        if num_scores <= 0:
            return


def _floor(
    chunks: list[Chunk], num_expected: NDArray[np.int64], layout: KeyLayout, transport: Transport
) -> Keys:
    """Return a key for each class that is not above its cut, from some chunks of all ranks.

    It is the start of the part of the scores in which the cut of these chunks is: more samples only raise it.
    """
    counts = np.zeros(layout.num_classes << DIGIT_BITS, np.int64)
    for chunk in chunks:
        counts += layout.count(*chunk)
    part = part_of_cut(transport.sum_counts(counts), num_expected)
    start = part.number.astype(np.uint64) << np.uint64(layout.class_shift - DIGIT_BITS)
    floor = np.where(part.is_reached, layout.first_keys | start, np.uint64(0))
    return np.where(num_expected > 0, floor, NOTHING)


class _Contenders:
    """The keys of a rank that may be selected.

    Invariant: of the samples added so far, the `num_expected[i]` best of class i that reach the first floor
    have their keys here. `floor` rises to the worst of them as soon as others are dropped.
    """

    def __init__(self, layout: KeyLayout, num_expected: NDArray[np.int64], floor: Keys) -> None:
        self._layout, self._num_expected, self._floor = layout, num_expected, floor
        self._parts: list[Keys] = []
        self._num_keys = 0
        # Then half of them or more are dropped: a key is looked at twice in the mean, at most.
        self._most_keys = max(2**18, 2 * int(num_expected.sum()))

    def keys_of(self, chunk: Chunk) -> Keys:
        """Return the keys of a chunk that reach the floor; for threads."""
        return self._layout.keys(*chunk, self._floor)

    def add(self, keys: Keys) -> None:
        """Add keys; if there are too many, drop the lowest of each class."""
        self._parts.append(keys)
        self._num_keys += len(keys)
        if self._num_keys > self._most_keys:
            keys = self.all_keys()
            cuts = find_cuts(keys, self._num_expected, self._layout, SingleProcess())
            # A new array: threads may still use the old one.
            self._floor = np.maximum(self._floor, cuts)
            self._parts = [self._layout.reaching(self._floor, keys)]
            self._num_keys = len(self._parts[0])

    def all_keys(self) -> Keys:
        """Return the keys, in no order."""
        self._parts = [joined(self._parts)]
        return self._parts[0]
