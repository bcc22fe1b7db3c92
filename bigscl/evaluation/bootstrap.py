"""Bootstrap: exact metrics of many resamples of the images, computed without building the resamples.

A resample of N images with replacement is given by how often each image occurs in it. Average precision
needs, for each positive, the number of images that reach its score: one pass per class for all resamples.
"""

# Shapes: N images, L classes, S resamples, D different scores of a class's positives.

from typing import Any

import numpy as np
from numpy.typing import NDArray

from bigscl.evaluation.metrics import image_average_precision
from bigscl.evaluation.report import Scored

Floats = NDArray[np.float64]


def draw_counts(num_images: int, num_resamples: int, seed: int) -> NDArray[np.uint8]:
    """Return how often each image occurs in each resample, [N,S]."""
    random = np.random.Generator(np.random.Philox(key=np.array([seed, 0], np.uint64)))
    draws = (random.integers(0, num_images, num_images) for _ in range(num_resamples))
    # An image occurs once on average; more than 255 times is practically impossible.
    return np.stack([np.bincount(draw, minlength=num_images).astype(np.uint8) for draw in draws], axis=1)


def resampled_figures(scored: Scored, counts: NDArray[np.uint8]) -> dict[str, Floats]:
    """Return `map`, `image_ap`, `top1` and `f1` (of decisions at 0.5) of every resample, [S] each."""
    ranking, targets = scored.ranking.numpy(), scored.targets.numpy()
    columns = zip(np.ascontiguousarray(ranking.T), np.ascontiguousarray(targets.T), strict=True)
    precisions = np.stack([_average_precisions(*column, counts) for column in columns])
    present = ~np.isnan(precisions)
    return {
        "map": _quotient(np.where(present, precisions, 0).sum(0), present.sum(0)),
        "image_ap": _image_ap(image_average_precision(scored.ranking, scored.targets).numpy(), counts),
        "top1": _top1(scored.ranked.numpy()[:, 0], targets, counts),
        "f1": _f1(ranking >= scored.cut, targets, counts),
    }


def _average_precisions(scores: NDArray[Any], targets: NDArray[np.int8], counts: NDArray[np.uint8]) -> Floats:
    """Return a class's average precision in every resample [S]; NaN if a resample has no positive of it."""
    cuts = np.unique(scores[targets > 0])
    if not len(cuts):
        return np.full(counts.shape[1], np.nan)
    # Images below the lowest positive never count.
    reaching = np.flatnonzero((scores >= cuts[0]) & (targets >= 0))
    bins = np.searchsorted(cuts, scores[reaching], side="right") - 1
    is_positive = targets[reaching] > 0
    images = _from_the_top(_sum_by_bin(counts, reaching, bins))
    positives = _sum_by_bin(counts, reaching[is_positive], bins[is_positive])
    precision = _from_the_top(positives) / np.maximum(images, 1)
    return _quotient((positives * precision).sum(0), positives.sum(0))


def _sum_by_bin(
    counts: NDArray[np.uint8], rows: NDArray[np.int64], bins: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the sums of the counts of the rows in each bin, [D,S]; no bin is empty."""
    order = np.argsort(bins, kind="stable")
    starts = np.flatnonzero(np.diff(bins[order], prepend=-1))
    parts = np.split(counts[rows[order]], starts[1:])
    # 4 ms for 46,837 rows and 200 resamples; np.add.reduceat takes 60.
    return np.stack([part.sum(0, dtype=np.int64) for part in parts])


def _from_the_top(sums: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the sum of each bin and all above it."""
    return np.cumsum(sums[::-1], axis=0)[::-1]


def _image_ap(precisions: Floats, counts: NDArray[np.uint8]) -> Floats:
    evaluated = ~np.isnan(precisions)
    return _quotient(_weighted(np.where(evaluated, precisions, 0), counts), _weighted(evaluated, counts))


def _top1(best: NDArray[np.int64], targets: NDArray[np.int8], counts: NDArray[np.uint8]) -> Floats:
    hits = targets[np.arange(len(best)), best] > 0
    evaluated: NDArray[np.bool_] = np.any(targets > 0, axis=1)
    return _quotient(_weighted(hits, counts), _weighted(evaluated, counts))


def _f1(predicted: NDArray[np.bool_], targets: NDArray[np.int8], counts: NDArray[np.uint8]) -> Floats:
    """Return the harmonic mean of precision and recall: 2 * correct / (predictions + positives)."""
    right = _weighted((predicted & (targets > 0)).sum(1), counts)
    made = _weighted((predicted & (targets >= 0)).sum(1), counts)
    return _quotient(2 * right, made + _weighted((targets > 0).sum(1), counts))


def _weighted(values: NDArray[Any], counts: NDArray[np.uint8]) -> Floats:
    """Return the sum of one value per image in every resample."""
    chosen = np.flatnonzero(values)
    sums: Floats = values[chosen].astype(np.float64) @ counts[chosen]
    return sums


def _quotient(part: NDArray[Any], whole: NDArray[Any]) -> Floats:
    """Return the quotient, NaN if `whole` is 0."""
    quotients: Floats = np.divide(part, whole, out=np.full(len(part), np.nan), where=whole > 0)
    return quotients
