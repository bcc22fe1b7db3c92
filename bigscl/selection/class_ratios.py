"""K of each class: how many positives an image has, given the class that its label names.

If a label is drawn uniformly from the positives of an image, an image with m positives names each of them
with probability 1/m. So for each label of class c there are in the mean K_c = E[m | the label is c] images
that show c: classes that appear in company (table, chair) are named less often than those that appear alone
(bird). Labels that are drawn by size or salience break this: K_c is then too small for what they overlook. On
VOC's labels drawn by size its error is 15.5% instead of 8.7% (one K for all: 23.3%; docs/results.md).
`labelled_ratios` makes no such assumption, but needs about a thousand images with full labels.
"""

# Shapes: L classes, n expected positives.

import numpy as np
from numpy.typing import NDArray

from bigscl.store import Annotations


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
    ratios: NDArray[np.float64] = 1 + level * extra / np.maximum(counts, 1)
    return ratios


def labelled_ratios(
    shares: NDArray[np.float64], counts: NDArray[np.int64], num_samples: int
) -> NDArray[np.float64]:
    """Return K_c of each class from the share of fully labelled images that show it, at least 1.

    `counts` are the annotated positives of each class in the `num_samples` training images, which show as
    many classes as the labelled ones. A class without annotated positives has 1: nothing can be found of it.
    """
    ratios: NDArray[np.float64] = np.maximum(shares * num_samples / np.maximum(counts, 1), 1)
    return np.where(counts > 0, ratios, 1.0)


def at_level(
    ratios: NDArray[np.float64], counts: NDArray[np.int64], positives_per_image: float
) -> NDArray[np.float64]:
    """Return K_c of each class, in the same proportions as `ratios` but with the mean K over all labels."""
    extra = (ratios - 1) @ counts
    if extra <= 0:
        return np.full(len(counts), float(positives_per_image))
    level = (positives_per_image - 1) * counts.sum() / extra
    scaled: NDArray[np.float64] = 1 + level * (ratios - 1)
    return scaled


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
