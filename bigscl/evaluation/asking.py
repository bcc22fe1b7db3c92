"""Which pairs of image and class a person should be asked about: the queue.

A question is worth what its answer is expected to change in training (`worth`). That follows from the chance
that the answer corrects the labels: that an image shows a class which no label names, or that a label names a
class which its image does not show. `chances` estimates it from the memory and from the answers so far, and
`rank` spreads the questions over classes and images. All are pure, and fast enough to be repeated after each
answer, so that the queue follows what it hears. A `Shortlist` collects the pairs that can come up, from any
number of images in one pass.
"""

# Shapes: n images of a shard, L classes, p pairs.

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Literal

import numpy as np
from numpy.typing import NDArray

By = Literal["queue", "chance", "score", "uncertainty", "random"]
"""An order of questions: by their worth in training, by the chance that they correct a label, or what these
are compared with."""
FOLLOWING = ("queue", "chance")
"""Orders that follow the answers."""
Floats = NDArray[np.float32]
TRUST, TRUST_LABELS = 8.0, 2.0
"""How many answers about a class, and about labels, weigh as much as the memory's own word."""
WRONG_LABEL = 0.2
"""What cold labels are taken for before anybody was asked about one: a few are tried, answers decide."""
AGAIN = 0.95
"""What a further question about the same image is worth, in questions about another."""
SPREAD, ENOUGH = 0.05, 10
"""How much less a further question about the same class is worth, after the first few."""
EDGE = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pairs:
    """Pairs of image and class, one entry each."""

    ids: NDArray[np.int64]
    classes: NDArray[np.int64]
    scores: Floats
    """What the memory holds of the class, in 0 to 1."""
    warmth: Floats
    """The mean of the score and the hottest cell of the heatmap, without its initial value."""
    named: NDArray[np.bool_]
    """Whether a label names the class: then the question is whether it is wrong."""
    expected: NDArray[np.bool_]
    """Whether the image is an expected positive of the class."""

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, places: NDArray[np.int64] | NDArray[np.bool_]) -> "Pairs":
        """Return some of the pairs."""
        return Pairs(**{field.name: getattr(self, field.name)[places] for field in fields(self)})

    @staticmethod
    def concatenate(parts: Iterable["Pairs"]) -> "Pairs":
        """Return the pairs of all parts, one after the other."""
        parts = [Pairs.none(), *parts]
        names = [field.name for field in fields(Pairs)]
        return Pairs(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})

    @staticmethod
    def none() -> "Pairs":
        """Return no pairs."""
        return Pairs(
            ids=np.empty(0, np.int64),
            classes=np.empty(0, np.int64),
            scores=np.empty(0, np.float32),
            warmth=np.empty(0, np.float32),
            named=np.empty(0, bool),
            expected=np.empty(0, bool),
        )


def pairs_of(
    ids: NDArray[np.int64],
    scores: NDArray[np.floating],
    peaks: Floats | None,
    known: NDArray[np.int8],
    expected: NDArray[np.bool_],
) -> Pairs:
    """Return every pair of some images, in their order; those known to be absent are left out.

    `scores` and `peaks`, the hottest cells of the heatmaps, are [n,L], and so is `expected`; `known` [n,L] is
    1 where a label names the class, 0 where it is known to be absent, and -1 elsewhere. Without heatmaps the
    scores must do.
    """
    rows, classes = np.nonzero(known)
    found = scores[rows, classes].astype(np.float32)
    warmth = found if peaks is None else ((found + peaks[rows, classes]) / 2).astype(np.float32)
    return Pairs(
        ids=ids[rows],
        classes=classes,
        scores=found,
        warmth=warmth,
        named=known[rows, classes] == 1,
        expected=expected[rows, classes],
    )


def chances(pairs: Pairs, answered: Pairs, yes: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Return [p]: how likely the answer to each pair corrects the labels.

    The log odds are those of the warmth (of its absence, for a class that a label names: a label whose class
    never warms is perhaps wrong) plus a number for each class, and one for all labels. These are 0 for
    classes and the log odds of WRONG_LABEL for labels, until answers move them: they are the most likely
    values for the `answered` pairs, whose answers are `yes`, and a prior that weighs TRUST (TRUST_LABELS)
    answers.
    """
    odds, told = _log_odds(pairs), _log_odds(answered)
    groups = np.concatenate([np.where(one.named, 0, one.classes + 1) for one in (pairs, answered)])
    start = np.zeros(int(groups.max(initial=0)) + 1)
    start[0], trust = np.log(WRONG_LABEL / (1 - WRONG_LABEL)), np.full(len(start), TRUST)
    trust[0] = TRUST_LABELS
    own = groups[len(pairs) :]
    shift = start.copy()
    corrects = yes != answered.named
    for _ in range(20):  # Newton's steps; the curve is strictly concave
        likely = _sigmoid(told + shift[own])
        slope = np.bincount(own, corrects - likely, len(shift)) - trust * (shift - start) / 4
        curve = np.bincount(own, likely * (1 - likely), len(shift)) + trust / 4
        shift += np.clip(slope / curve, -1, 1)
    return _sigmoid(odds + shift[groups[: len(pairs)]])


def worth(pairs: Pairs, chance: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return [p]: how much the answer to each pair is expected to change the gradient of its logit.

    Cross-entropy pulls the logit of a positive up by 1 - f and that of a negative down by f, with f the
    score. An expected positive that no label names is left out of the loss: a yes adds 1 - f, a no adds f, so
    what the memory is sure of is worth little. Every other unnamed class counts as absent, and every named
    one as present: an answer that corrects that turns the gradient around, by 1, and any other changes
    nothing.
    """
    scores = pairs.scores.astype(np.float64)
    left_out = chance * (1 - scores) + (1 - chance) * scores
    return np.where(pairs.expected & ~pairs.named, left_out, chance)


def _log_odds(pairs: Pairs) -> NDArray[np.float64]:
    likely = np.where(pairs.named, 1 - pairs.warmth, pairs.warmth).astype(np.float64).clip(EDGE, 1 - EDGE)
    odds: NDArray[np.float64] = np.log(likely / (1 - likely))
    return odds


def _sigmoid(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return 1 / (1 + np.exp(-values))


def rank(
    values: NDArray[np.float64], pairs: Pairs, asked: Pairs, *, most: int | None = None
) -> NDArray[np.int64]:
    """Return the places of the pairs, the most valuable first; `most` of them if given.

    A value counts less the more questions come before it: AGAIN for each about the same image, and
    `(ENOUGH + n) ** -SPREAD` for n about the same class, those that were `asked` included. Ties have the
    order of the pairs.
    """
    places = np.argsort(-values, kind="stable")
    images = _turns(pairs.ids[places]) + _counted(asked.ids, pairs.ids[places])
    classes = _turns(pairs.classes[places]) + _counted(asked.classes, pairs.classes[places])
    counted = values[places] * AGAIN**images * (ENOUGH + classes) ** -SPREAD
    return places[np.argsort(-counted, kind="stable")[:most]]


def _turns(groups: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return for each entry how many before it are of the same group."""
    order = np.argsort(groups, kind="stable")
    starts = np.flatnonzero(np.diff(groups[order], prepend=-1))
    turns = np.empty(len(groups), np.int64)
    turns[order] = np.arange(len(groups)) - np.repeat(starts, np.diff(starts, append=len(groups)))
    return turns


def _counted(among: NDArray[np.int64], wanted: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return how often each of the wanted numbers occurs among others."""
    numbers, counts = np.unique(np.append(among, -1), return_counts=True)
    places = np.searchsorted(numbers, wanted).clip(max=len(numbers) - 1)
    return np.where(numbers[places] == wanted, counts[places], 0)


class Shortlist:
    """The pairs of highest value of each class, unnamed and named apart, from any number of images."""

    def __init__(self, per_class: int) -> None:
        self._per_class = per_class
        self.pairs, self.values = Pairs.none(), np.empty(0)

    def add(self, pairs: Pairs, values: NDArray[np.float64]) -> None:
        """Consider more pairs; ties are kept in the order in which they come."""
        merged = Pairs.concatenate([self.pairs, pairs])
        values = np.concatenate([self.values, values])
        order = np.argsort(-values, kind="stable")
        turns = _turns((2 * merged.classes + merged.named)[order])
        kept = np.sort(order[turns < self._per_class])
        self.pairs, self.values = merged.take(kept), values[kept]


def following_values(pairs: Pairs, by: By, chance: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return [p]: what pairs are ranked by in an order that follows the answers, from their chances."""
    return worth(pairs, chance) if by == "queue" else chance


def first_values(pairs: Pairs, by: By, seed: int = 0) -> NDArray[np.float64]:
    """Return [p]: what pairs are ranked by before any answer, in one of the orders.

    Pairs that a label names come last in all orders but those that follow the answers: they are about missing
    labels.
    """
    if by in FOLLOWING:
        return following_values(pairs, by, chances(pairs, Pairs.none(), np.empty(0, bool)))
    values = pairs.scores.astype(np.float64)
    if by == "uncertainty":
        values = 1 - abs(values - 0.5)
    elif by == "random":
        key = np.array([seed, int(pairs.ids[0]) if len(pairs) else 0], np.uint64)
        values = np.random.Generator(np.random.Philox(key=key)).random(len(pairs))
    return np.where(pairs.named, values - 2, values)
