"""Rank pairs of image and class for a person: questions by stored scores, doubtful labels by their history.

A question is worth what its answer is expected to change in training (`worth`). That follows from the chance
that the answer corrects the labels: that an image shows an unlabelled class, or does not show a labelled one.
`chances` estimates it from the stored scores and heatmaps and from the answers so far, and `next_questions`
spreads the questions over classes and images. All are pure, and fast enough to be repeated after each answer.
`best_without_answers` are the pairs that can come up, of any number of images.

Doubtful labels are found by the scores of past epochs (`score_history`, `suspicion`). A class that an image
shows keeps a high score, epoch after epoch; one that it does not show only gets what the label has taught.
"""

# Shapes: N samples, L classes, k kept classes of an epoch, p pairs of image and class.

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray

from bigscl.store import Annotations

By = Literal["queue", "chance"]
"""An order of questions: by their worth in training, or by the chance that they correct a label."""
Floats = NDArray[np.float32]
TRUST, TRUST_LABELS = 8.0, 2.0
"""Number of answers about a class, and about labels, that weigh as much as the stored score."""
WRONG_LABEL = 0.2
"""Assumed share of wrong labels before anybody was asked about one: a few are tried, answers decide."""
AGAIN = 0.95
"""Value of a further question about the same image, in questions about another."""
SPREAD, ENOUGH = 0.05, 10
"""How much less a further question about the same class is worth, after the first few."""
EDGE = 1e-3


class Columns:
    """Arrays with an entry for each pair; the base of frozen dataclasses."""

    __slots__ = ()

    def take(self, rows: NDArray[np.int64] | NDArray[np.bool_]) -> Self:
        return type(self)(**{field.name: getattr(self, field.name)[rows] for field in fields(self)})  # type: ignore[arg-type]

    @classmethod
    def concatenate(cls, parts: Iterable[Self]) -> Self:
        """Return the pairs of all parts, one after the other."""
        parts = list(parts)
        names = [field.name for field in fields(cls)]  # type: ignore[arg-type]
        return cls(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pairs(Columns):
    """Pairs of image and class that may be asked about; arrays [p]."""

    ids: NDArray[np.int64]
    classes: NDArray[np.int64]
    scores: Floats
    """Stored score of the class, in 0 to 1."""
    confidence: Floats
    """The mean of the score and the hottest cell of the heatmap, without its initial value."""
    labelled: NDArray[np.bool_]
    """Whether the class is a label of the image: then the question is whether that is wrong."""
    expected: NDArray[np.bool_]
    """Whether the image is an expected positive of the class."""

    def __len__(self) -> int:
        return len(self.ids)

    @staticmethod
    def none() -> "Pairs":
        return Pairs(
            ids=np.empty(0, np.int64),
            classes=np.empty(0, np.int64),
            scores=np.empty(0, np.float32),
            confidence=np.empty(0, np.float32),
            labelled=np.empty(0, bool),
            expected=np.empty(0, bool),
        )


def chances(pairs: Pairs, answered: Pairs, yes: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Return [p]: how likely the answer to each pair corrects the labels.

    The log odds are those of the confidence (for labelled classes of 1 - confidence: a label with a low score
    is perhaps wrong) plus a number for each class, and one for all labels. These are 0 for classes and the
    log odds of WRONG_LABEL for labels, until answers move them: they are the most likely values for the
    `answered` pairs, whose answers are `yes`, and a prior that weighs TRUST (TRUST_LABELS) answers.
    """
    odds, told = _log_odds(pairs), _log_odds(answered)
    groups = np.concatenate([np.where(part.labelled, 0, part.classes + 1) for part in (pairs, answered)])
    start = np.zeros(int(groups.max(initial=0)) + 1)
    start[0], trust = np.log(WRONG_LABEL / (1 - WRONG_LABEL)), np.full(len(start), TRUST)
    trust[0] = TRUST_LABELS
    own = groups[len(pairs) :]
    shift = start.copy()
    corrects = yes != answered.labelled
    for _ in range(20):  # Newton's steps; the curve is strictly concave
        likely = _sigmoid(told + shift[own])
        slope = np.bincount(own, corrects - likely, len(shift)) - trust * (shift - start) / 4
        curve = np.bincount(own, likely * (1 - likely), len(shift)) + trust / 4
        shift += np.clip(slope / curve, -1, 1)
    return _sigmoid(odds + shift[groups[: len(pairs)]])


def worth(pairs: Pairs, chance: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return [p]: how much the answer to each pair is expected to change the gradient of its logit.

    Cross-entropy pulls the logit of a positive up by 1 - f and that of a negative down by f, with f the
    score. An unlabelled expected positive is left out of the loss: a yes adds 1 - f, a no adds f, so a sure
    score is worth little. Every other unlabelled class counts as absent, and every labelled class as present:
    an answer that corrects that turns the gradient around, by 1, and any other changes nothing.
    """
    scores = pairs.scores.astype(np.float64)
    left_out = chance * (1 - scores) + (1 - chance) * scores
    return np.where(pairs.expected & ~pairs.labelled, left_out, chance)


def _log_odds(pairs: Pairs) -> NDArray[np.float64]:
    likely = np.where(pairs.labelled, 1 - pairs.confidence, pairs.confidence)
    likely = likely.astype(np.float64).clip(EDGE, 1 - EDGE)
    odds: NDArray[np.float64] = np.log(likely / (1 - likely))
    return odds


def _sigmoid(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return 1 / (1 + np.exp(-values))


def rank(
    values: NDArray[np.float64], pairs: Pairs, asked: Pairs, *, most: int | None = None
) -> NDArray[np.int64]:
    """Return the positions of the pairs, the most valuable first; `most` of them if given.

    A value counts less the more questions come before it: AGAIN for each about the same image, and
    `(ENOUGH + n) ** -SPREAD` for n about the same class, those that were `asked` included. Ties have the
    order of the pairs.
    """
    order = np.argsort(-values, kind="stable")
    images = _turns(pairs.ids[order]) + _occurrences(asked.ids, pairs.ids[order])
    classes = _turns(pairs.classes[order]) + _occurrences(asked.classes, pairs.classes[order])
    discounted = values[order] * AGAIN**images * (ENOUGH + classes) ** -SPREAD
    return order[np.argsort(-discounted, kind="stable")[:most]]


def _turns(groups: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return for each entry how many before it are of the same group."""
    order = np.argsort(groups, kind="stable")
    starts = np.flatnonzero(np.diff(groups[order], prepend=-1))
    turns = np.empty(len(groups), np.int64)
    turns[order] = np.arange(len(groups)) - np.repeat(starts, np.diff(starts, append=len(groups)))
    return turns


def _occurrences(among: NDArray[np.int64], wanted: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return how often each of the wanted numbers occurs among others."""
    numbers, counts = np.unique(np.append(among, -1), return_counts=True)
    at = np.searchsorted(numbers, wanted).clip(max=len(numbers) - 1)
    return np.where(numbers[at] == wanted, counts[at], 0)


def best_of_each_class(pairs: Pairs, values: NDArray[np.float64], most: int) -> NDArray[np.int64]:
    """Return the positions of the `most` pairs of highest value of each class, unlabelled and labelled apart.

    Positions rise; of equal values the first are kept.
    """
    order = np.argsort(-values, kind="stable")
    turns = _turns((2 * pairs.classes + pairs.labelled)[order])
    return np.sort(order[turns < most])


def value_of(pairs: Pairs, by: By, chance: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return [p]: the values that rank pairs, by how likely their answers correct the labels."""
    return worth(pairs, chance) if by == "queue" else chance


def next_questions(
    pairs: Pairs, answered: Pairs, yes: NDArray[np.bool_], *, most: int, by: By = "queue"
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return the positions of the next pairs to ask about, the most valuable first, and all chances [p]."""
    likely = chances(pairs, answered, yes)
    return rank(value_of(pairs, by, likely), pairs, answered, most=most), likely


def best_without_answers(pairs: Pairs, by: By, most: int) -> NDArray[np.int64]:
    """Return the positions of the pairs that can come up before any answer, see `best_of_each_class`."""
    chance = chances(pairs, Pairs.none(), np.empty(0, bool))
    return best_of_each_class(pairs, value_of(pairs, by, chance), most)


# Doubtful labels

BLOCK = 8192
Kept = NDArray[np.void]
"""Classes and scores that an epoch kept of each sample, [N,k]."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScoreHistory(Columns):
    """Scores of pairs of image and class over the epochs; arrays [p]."""

    ids: NDArray[np.int64]
    classes: NDArray[np.int64]
    labelled: NDArray[np.bool_]
    """Whether the class is an annotated positive of the image."""
    mean: NDArray[np.float64]
    """Over the epochs; an epoch that did not keep the class among its highest scores counts as 0."""
    spread: NDArray[np.float64]
    """Standard deviation over the epochs."""
    last: NDArray[np.float64]


def score_history(
    epochs: Sequence[Kept],
    annotations: Annotations,
    ids: NDArray[np.int64],
    initial_shares: Sequence[float] | None = None,
) -> ScoreHistory:
    """Return all pairs that were kept in any epoch, in the order of ids and classes.

    `initial_shares` are the weights that the initial values still have in the scores of each epoch (1 for a
    label, 0 for any other class): they are taken out, so that only predictions count.
    """
    shares = np.zeros(len(epochs)) if initial_shares is None else np.asarray(initial_shares)
    return ScoreHistory.concatenate(_histories(epochs, annotations, ids, shares))


def _histories(
    epochs: Sequence[Kept], annotations: Annotations, ids: NDArray[np.int64], shares: NDArray[np.float64]
) -> Iterator[ScoreHistory]:
    for start in range(0, len(ids), BLOCK):
        own = ids[start : start + BLOCK]
        parts = [np.asarray(kept[start : start + BLOCK]) for kept in epochs]
        keys = np.concatenate([_keys(part, annotations.num_classes) for part in parts])
        scores = np.concatenate([part["score"].ravel() for part in parts]).astype(np.float64)
        unique, pair = np.unique(keys, return_inverse=True)
        rows, classes = np.divmod(unique, annotations.num_classes)
        labelled = annotations.is_given(own[rows], classes)
        left = np.repeat(shares, [part.size for part in parts])
        scores = ((scores - left * labelled[pair]) / np.maximum(1 - left, 1e-6)).clip(0, 1)
        mean = np.bincount(pair, scores, len(unique)) / len(epochs)
        square = np.bincount(pair, scores**2, len(unique)) / len(epochs)
        last = np.zeros(len(unique))
        last[pair[-parts[-1].size :]] = scores[-parts[-1].size :]
        yield ScoreHistory(
            ids=own[rows],
            classes=classes,
            labelled=labelled,
            mean=mean,
            spread=np.sqrt((square - mean**2).clip(0)),
            last=last,
        )


def _keys(kept: Kept, num_classes: int) -> NDArray[np.int64]:
    keys: NDArray[np.int64] = np.arange(len(kept))[:, None] * num_classes + kept["class"].astype(np.int64)
    return keys.ravel()


def suspicion(history: ScoreHistory) -> NDArray[np.float64]:
    """Return [p]: how likely a label is wrong (1 - mean score) or missing (mean score), to rank by.

    The share of the class in the scores of its image would suspect the labels of images that show several
    classes (tests.benchmarks.audit has figures).
    """
    return np.where(history.labelled, 1 - history.mean, history.mean)


def area_under_curve(values: NDArray[np.float64], truth: NDArray[np.bool_]) -> float:
    """Return the chance that a true pair has a larger value than a false one, ties half; NaN without both."""
    num_true, num_false = int(truth.sum()), int((~truth).sum())
    if not num_true or not num_false:
        return float("nan")
    _, value, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[value]
    return float((ranks[truth].sum() - num_true * (num_true + 1) / 2) / (num_true * num_false))
