"""The level K, estimated from the remembered scores of images that have no full labels.

Best bin estimation (Garg et al. 2021; CRISP's estimator, Liu et al. 2023): above a threshold at which a class
is hardly ever absent, a share p of the images that are named with it and a share q of all images remain, so
that q / p of all images show it. It assumes that named images of a class score like the others that show it.
They do not quite: labels name what is large and alone more often, and training raises what it names, which
makes the estimate too small; absent classes that score high, as early in training, make it too large.
Measured errors are in configs/RESULTS.md; `tests.benchmarks.level` compares estimators.
"""

# Shapes: n rows of a chunk, L classes.

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from bigscl.method.class_histograms import NUM_BINS, SHIFT, best_bin_priors
from bigscl.store import Annotations, Transport

Chunk = tuple[NDArray[np.int64], NDArray[np.float16], NDArray[np.float32]]
"""Ids [n], scores [n,L], and the weight that initial scores still have in them [n]; 1: never visited."""

DELTA, TAU = 0.1, 0.01
"""Of the confidence bound that chooses the threshold."""
LOWEST = np.float32(2**-9)
"""Scores below are counted together: far below what named images have, and 99% of all with many classes."""
LARGEST = 5.0
"""An untrained network separates nothing, and then everything would be expected."""


def estimate_level(chunks: Iterable[Chunk], annotations: Annotations, transport: Transport) -> float:
    """Return the estimated positives for each annotated one, from the chunks of all ranks, on every rank.

    At least 1; at most `LARGEST` and half of the classes. Whole numbers are summed, so it is the same for any
    division of the samples. It takes up to 12 CPU ms for 1,000 images and 1,000 classes, all ranks together.
    """
    counts = np.zeros((2, annotations.num_classes, NUM_BINS), np.uint32)
    for ids, scores, remaining in chunks:
        seen = np.flatnonzero(remaining < 1)
        _count(counts, annotations, ids[seen], scores[seen], remaining[seen])
    parts = transport.gather(counts.tobytes())
    level = None
    if parts is not None:
        total = sum(np.frombuffer(part, np.uint32).astype(np.int64) for part in parts)
        level = np.float64(level_of(np.asarray(total).reshape(counts.shape))).tobytes()
    return float(np.frombuffer(transport.broadcast(level), np.float64)[0])


def level_of(counts: NDArray[np.int64]) -> float:
    """Return K from histograms [2,L,bins] of the scores of unnamed and of named classes."""
    named = counts[1]
    num_images, num_named = counts[:, :1].sum(), named.sum()
    if not num_named:
        return 1.0
    priors = best_bin_priors(counts.sum(0), named, DELTA, TAU)
    largest = min(LARGEST, (len(named) + 1) / 2)
    return float(np.clip(priors.sum() * num_images / num_named, 1.0, largest))


def _count(
    counts: NDArray[np.uint32],
    annotations: Annotations,
    ids: NDArray[np.int64],
    scores: NDArray[np.float16],
    remaining: NDArray[np.float32],
) -> None:
    """Add what was seen of some samples since their start to the histograms [2,L,bins]."""
    places, named = annotations.of_rows(ids)
    weight = 1 - remaining
    start = scores[places, named].astype(np.float32) - remaining[places]
    others = scores.copy()
    others[places, named] = 0
    # Bits of non-negative halves order like their values, and compare much faster.
    floors = (LOWEST * weight).astype(np.float16).view(np.uint16)
    rows, classes = np.divmod(np.flatnonzero(others.view(np.uint16) >= floors[:, None]), others.shape[1])
    _add(counts[1], named, start / weight[places])
    _add(counts[0], classes, others[rows, classes].astype(np.float32) / weight[rows])
    # What is not counted yet lies below the lowest score.
    counts[0, :, 0] += (len(ids) - np.bincount(named, minlength=len(counts[0]))).astype(np.uint32)
    counts[0, :, 0] -= np.bincount(classes, minlength=len(counts[0])).astype(np.uint32)


def _add(counts: NDArray[np.uint32], classes: NDArray[np.int64], values: NDArray[np.float32]) -> None:
    # fmax makes 0 of a NaN, which the ranking will refuse.
    bins = np.fmin(np.fmax(values, 0), 1).astype(np.float16).view(np.uint16) >> SHIFT
    found = np.bincount(classes * NUM_BINS + bins, minlength=counts.size)
    counts += found.reshape(counts.shape).astype(np.uint32)
