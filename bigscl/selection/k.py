"""K, the expected positives per image: where it comes from, and how many positives a run will expect."""

import logging
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from bigscl.common.user_error import UserError
from bigscl.config import Config
from bigscl.data.index import Index, true_labels
from bigscl.losses.objective import BASES
from bigscl.selection.thresholds import expected_counts

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    positives_per_image: float
    """K."""
    annotated: int
    """Positives that training sees."""
    total: int
    """Expected positives, the annotated ones among them."""
    num_samples: int

    def __str__(self) -> str:
        return (
            f"K = {self.positives_per_image:g}: {self.total:,} positives expected, "
            f"{self.total / self.num_samples:.2f} per image; {self.annotated:,} of them are annotated, "
            f"{max(0, self.total - self.annotated):,} are to be found"
        )


def expectation(
    k: float, labels: NDArray[np.int64], num_samples: int, annotated: NDArray[np.int64] | None = None
) -> Expectation:
    """Return what K expects of a dataset, from the labels of each class.

    `annotated` are its annotated positives if answers are among them, which are no further labels.
    """
    annotated = labels if annotated is None else annotated
    expected = np.minimum(expected_counts(labels, k), num_samples)
    if (annotated != labels).any():
        expected = np.maximum(expected, annotated)
    return Expectation(
        positives_per_image=k,
        annotated=int(annotated.sum()),
        total=int(expected.sum()),
        num_samples=num_samples,
    )


def positives_per_image(config: Config, val: Index | None) -> float | None:
    """Return K: that of the config, or the mean over the validation set; None if the objective needs none.

    Where no validation image has two labels, K would be 1 and nothing be found: then it must be given.
    """
    if not config.objective.needs_k:
        return None
    if config.selection.K != "auto":
        return float(config.selection.K)
    if val is None or not has_full_labels(val):
        problem = "there is no data.val" if val is None else f"none of the {val.num_samples:,} has two labels"
        without = ", ".join(name for name, term in BASES.items() if not term.needs_k)
        raise UserError(
            f"selection.K: auto is the mean number of labels of the validation images, but {problem}. "
            "Count the classes in 50 images and give their mean (--selection.K 1.5), or give data.val with "
            f"all labels, or choose an objective.base without K ({without})."
        )
    k = estimate_k(torch.from_numpy(true_labels(val, val.ids())[0]))
    logger.info("K = %.3f positives per image, from the %d validation images", k, val.num_samples)
    return k


def k_per_class(
    config: Config, counts: NDArray[np.int64], num_samples: int, val: Index | None
) -> bool | NDArray[np.float64]:
    """Return K of each class by the full labels of data.val, or whether the memory estimates it."""
    wanted = config.selection.per_class
    if wanted != "labelled":
        return wanted
    if val is None or not has_full_labels(val):
        raise UserError(
            "selection.per_class: labelled takes K of each class from the full labels of data.val, but no "
            "image of it names more than one class. Give data.val with full labels, or choose true or false."
        )
    shares = (true_labels(val, val.ids())[0] == 1).mean(0)
    return labelled_ratios(shares, counts, num_samples)


def labelled_ratios(
    shares: NDArray[np.float64], counts: NDArray[np.int64], num_samples: int
) -> NDArray[np.float64]:
    """Return K_c of each class from the share of fully labelled images that show it, at least 1.

    `counts` are the annotated positives of each class in the `num_samples` training images, which show as
    many classes as the labelled ones. A class without annotated positives has 1: nothing can be found of it.
    """
    ratios: NDArray[np.float64] = np.maximum(shares * num_samples / np.maximum(counts, 1), 1)
    return np.where(counts > 0, ratios, 1.0)


def has_full_labels(val: Index) -> bool:
    """Return whether an image names two classes: where none does, K would be 1, and nothing be found."""
    positives = val.given if val.full is None else val.full
    return bool(positives.lengths.max(initial=0) > 1)


def estimate_k(labels: torch.Tensor) -> float:
    """Return the mean number of positives of fully labelled images: the K of the expected positives."""
    full = labels[(labels >= 0).all(1)]
    if not len(full):
        raise UserError(
            f"K: none of {len(labels)} images is fully labelled. Give K in the config, or a validation set "
            f"whose labels have no unknowns."
        )
    return float((full > 0).sum(1).double().mean())
