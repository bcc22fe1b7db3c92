"""The selection at the end of an epoch: for each class the samples of highest score, exact, in numpy alone.

Each rank passes over its scores once and keeps the keys of samples that may be selected (`cuts` says what a
key is): not more of a class than are expected, and none below a floor that the ranks find first, from their
first chunks. From these keys they find the cut of each class together.

K of each class: if a label is drawn uniformly from the positives of an image, an image with m positives
names each of them with probability 1/m. So for each label of class c there are in the mean
K_c = E[m | the label is c] images that show c: classes that appear in company (table, chair) are named less
often than those that appear alone (bird). Labels that are drawn by size or salience break this: K_c is then
too small for what they overlook. On VOC's labels drawn by size its error is 15.5% instead of 8.7% (one K for
all: 23.3%; docs/results.md). `labelled_ratios` in `k` makes no such assumption, but needs about a thousand
images with full labels.
"""

# Shapes: L classes, n rows of a chunk.

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

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
from bigscl.selection.thresholds import Thresholds, expected_counts, pseudo_positive_counts
from bigscl.store import Annotations, KeptScores, Ranked, SingleProcess, Transport, in_order

if TYPE_CHECKING:
    from bigscl.config import RankBy

SAMPLE_SCORES = 2**24
THREADS = 2
"""They find the keys of chunks; whoever passes chunks may read them in threads too."""


Chunk = tuple[NDArray[np.int64], Ranked]
"""Ids [n], and what they are ranked by for each class [n,L], or for the classes that are kept."""


Item = TypeVar("Item")


def counted(items: Iterable[Item], show: Callable[[int], None]) -> Iterator[Item]:
    """Yield the items; show how many are done when the next one is asked for."""
    for done, item in enumerate(items):
        show(done)
        yield item


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
    too. With `annotations`, the positives of the images of each class are counted.
    """
    layout = KeyLayout(len(num_expected))
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
        self._parts = [joined(self._parts)]
        return self._parts[0]


def annotated_positives(annotations: Annotations) -> NDArray[np.int64]:
    """Return for each class the annotated positives of all images that are annotated with it, int64 [L]."""
    lengths = annotations.given.lengths
    # Each image's own annotated positives count for each of its annotated classes.
    owners = np.repeat(lengths, lengths)
    sums = np.bincount(annotations.given.values, weights=owners, minlength=annotations.num_classes)
    return sums.astype(np.int64)


def expected_positives(
    annotations: Annotations, ids: NDArray[np.int64], classes: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return for each class the further positives of all images that are annotated with it, int64 [L].

    `ids` [n] and `classes` [n] are expected positives, no pair twice; annotated ones among them are not
    counted again. The sum over parts of the pairs is that of all pairs.
    """
    # One entry for each pair of an expected positive and an annotated class of its image.
    expected, named = annotations.given.entries(ids)
    is_annotated = np.zeros(len(ids), bool)
    is_annotated[expected[named == classes[expected]]] = True
    return np.bincount(named[~is_annotated[expected]], minlength=annotations.num_classes)


# How many positives each class expects


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionRule:
    positives_per_image: float
    """K, the expected positives for each label."""
    start_epoch: int = 1
    """First epoch that has expected positives."""
    rank_by: "RankBy" = "score"
    per_class: bool = False
    """Whether each class has a K of its own, estimated from the memory; K is then their mean."""
    given_ratios: NDArray[np.float64] | None = None
    """K of each class if it is known, up to the level: their mean becomes K."""

    pseudo_positive_share: float | None = None
    """Share of the expected positives that are not given, the highest scores, which get thresholds too."""

    @property
    def given_first(self) -> bool:
        """Whether given positives are always expected: the paper ranks by the score alone."""
        return self.per_class or self.given_ratios is not None or self.rank_by == "spatial"

    def completed(self, thresholds: Thresholds) -> Thresholds:
        """Return committed thresholds; before the first ones there are no pseudo-positives."""
        if self.pseudo_positive_share is None or thresholds.pseudo_positives is not None:
            return thresholds
        return replace(thresholds, pseudo_positives=Thresholds.none(len(thresholds.score)))

    def select(
        self,
        chunks: Iterable[Chunk],
        annotations: Annotations,
        labels: NDArray[np.int64],
        ratios: NDArray[np.float64] | None,
        ranks: Transport,
    ) -> tuple[Thresholds, NDArray[np.float64] | None]:
        """Return the selection over the chunks of all ranks, and K of each class for the next one.

        `chunks` are what samples are ranked by: each rank gives those of its own shards. `labels` are those
        of each class, without what only answers named. `ratios` are K of each class by the selection before;
        without them every class has K.
        """
        # A run that was resumed without `per_class` has ratios from before.
        ratios = ratios if self.per_class else None
        counts, k = annotations.counts(), self.positives_per_image
        has_answers = bool((labels != counts).any())
        used = np.full(len(counts), k) if ratios is None else ratios
        if self.given_ratios is not None:
            used = at_level(self.given_ratios, labels, k)
        elif has_answers:
            used = at_level(used, labels, k)
        num_expected = expected_counts(labels, used)
        if has_answers:
            num_expected = np.maximum(num_expected, counts)
        share = self.pseudo_positive_share
        fewer = None if share is None else pseudo_positive_counts(counts, num_expected, share)
        if self.given_first:
            chunks = given_first(chunks, annotations)
        named = annotations if self.per_class else None
        thresholds = select(chunks, num_expected, ranks, num_pseudo_positives=fewer, annotations=named)
        if thresholds.positives is not None:
            ratios = class_ratios(k, counts, thresholds.positives)
        return replace(thresholds, given_first=self.given_first), ratios


def selection_rule(
    positives_per_image: float | None,
    *,
    start_epoch: int,
    rank_by: "RankBy",
    k_per_class: bool | NDArray[np.float64],
    pseudo_positive_share: float | None,
) -> SelectionRule | None:
    """Return the rule for K; None without K, when nothing is selected."""
    if positives_per_image is None:
        return None
    return SelectionRule(
        positives_per_image=positives_per_image,
        start_epoch=start_epoch,
        rank_by=rank_by,
        per_class=k_per_class is True,
        given_ratios=None if isinstance(k_per_class, bool) else k_per_class,
        pseudo_positive_share=pseudo_positive_share,
    )


# K of each class


def class_ratios(
    positives_per_image: float, counts: NDArray[np.int64], positives: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return K_c of each class, whose mean over all labels is K.

    `counts` are the annotated positives of each class. `positives` are the positives, annotated or expected,
    of all images that are annotated with the class, so `positives / counts` is the mean m_c. Then
    `K_c = 1 + (m_c - 1) (K - 1) sum(counts) / sum((m_c - 1) counts)`. Without any expected positive
    every class has K.
    """
    extra = np.maximum(positives - counts, 0).astype(np.float64)
    if positives_per_image <= 1 or not extra.sum():
        return np.full(len(counts), float(positives_per_image))
    level = (positives_per_image - 1) * counts.sum() / extra.sum()
    return np.asarray(1 + level * extra / np.maximum(counts, 1))


def at_level(
    ratios: NDArray[np.float64], counts: NDArray[np.int64], positives_per_image: float
) -> NDArray[np.float64]:
    """Return K_c of each class, in the same proportions as `ratios` but with the mean K over all labels."""
    extra = (ratios - 1) @ counts
    if extra <= 0:
        return np.full(len(counts), float(positives_per_image))
    level = (positives_per_image - 1) * counts.sum() / extra
    return np.asarray(1 + level * (ratios - 1))
