"""Audit labels by how the remembered scores went: named classes that never warmed, others that stayed hot.

A class that an image shows keeps a high score in the memory of that image, epoch after epoch; one that it
does not show only gets what the label itself has taught.
"""

# Shapes: N samples, L classes, k kept classes of an epoch, p pairs of image and class.

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from bigscl.memory.score_history import annotated
from bigscl.store import Annotations

BLOCK = 8192
Pairs = NDArray[np.void]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Warmth:
    """How the scores of some pairs of image and class went over the epochs; arrays [p]."""

    ids: NDArray[np.int64]
    classes: NDArray[np.int64]
    named: NDArray[np.bool_]
    """Whether the class is an annotated positive of the image."""
    mean: NDArray[np.float64]
    """Over the epochs; an epoch whose highest scores the class was not among counts as 0."""
    spread: NDArray[np.float64]
    """Standard deviation over the epochs."""
    last: NDArray[np.float64]

    def take(self, places: NDArray[np.int64] | NDArray[np.bool_]) -> "Warmth":
        """Return some of the pairs."""
        return Warmth(**{each.name: getattr(self, each.name)[places] for each in fields(self)})


def warmth(epochs: Sequence[Pairs], annotations: Annotations, ids: NDArray[np.int64]) -> Warmth:
    """Return all pairs that were kept in any epoch, in the order of ids and classes."""
    parts = list(_blocks(epochs, annotations, ids))
    return Warmth(
        **{each.name: np.concatenate([getattr(part, each.name) for part in parts]) for each in fields(Warmth)}
    )


def _blocks(epochs: Sequence[Pairs], annotations: Annotations, ids: NDArray[np.int64]) -> Iterator[Warmth]:
    for start in range(0, len(ids), BLOCK):
        own = ids[start : start + BLOCK]
        parts = [np.asarray(pairs[start : start + BLOCK]) for pairs in epochs]
        keys = np.concatenate([_keys(part, annotations.num_classes) for part in parts])
        scores = np.concatenate([part["score"].ravel() for part in parts]).astype(np.float64)
        unique, places = np.unique(keys, return_inverse=True)
        rows, classes = np.divmod(unique, annotations.num_classes)
        mean = np.bincount(places, scores, len(unique)) / len(epochs)
        square = np.bincount(places, scores**2, len(unique)) / len(epochs)
        last = np.zeros(len(unique))
        last[places[-parts[-1].size :]] = scores[-parts[-1].size :]
        yield Warmth(
            ids=own[rows],
            classes=classes,
            named=annotated(annotations, own)[rows, classes],
            mean=mean,
            spread=np.sqrt((square - mean**2).clip(0)),
            last=last,
        )


def _keys(pairs: Pairs, num_classes: int) -> NDArray[np.int64]:
    keys: NDArray[np.int64] = np.arange(len(pairs))[:, None] * num_classes + pairs["class"].astype(np.int64)
    return keys.ravel()


def suspicion(found: Warmth) -> NDArray[np.float64]:
    """Return [p]: how likely the label is wrong (of a named class) or missing (of another), to rank by.

    Of a named class, 1 - its mean score; of another, its mean score. The share of the class in the scores of
    its image suspects the labels of images that show several classes (tests.benchmarks.audit has figures).
    """
    return np.where(found.named, 1 - found.mean, found.mean)


def area_under_curve(values: NDArray[np.float64], truth: NDArray[np.bool_]) -> float:
    """Return the chance that a true pair has a larger value than a false one, ties half; NaN without both."""
    num_true, num_false = int(truth.sum()), int((~truth).sum())
    if not num_true or not num_false:
        return float("nan")
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[places]
    return float((ranks[truth].sum() - num_true * (num_true + 1) / 2) / (num_true * num_false))
