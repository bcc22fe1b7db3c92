"""K, the expected positives per image: where it comes from, and how many positives a run will expect."""

import logging
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from bigscl.config import Config
from bigscl.data.index import Index
from bigscl.evaluation.metrics import estimate_k
from bigscl.evaluation.predictions import true_labels
from bigscl.method.losses import BASES
from bigscl.method.selection import expected_counts
from bigscl.user_error import UserError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """How many positives a run expects."""

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


def expectation(k: float, counts: NDArray[np.int64], num_samples: int) -> Expectation:
    """Return what K expects of a dataset, from the annotated positives of each class."""
    expected = np.minimum(expected_counts(counts, k), num_samples)
    return Expectation(
        positives_per_image=k,
        annotated=int(counts.sum()),
        total=int(expected.sum()),
        num_samples=num_samples,
    )


def positives_per_image(config: Config, val: Index | None) -> float | None:
    """Return K: that of the config, or the mean over the validation set; None if the objective needs none."""
    if not config.objective.needs.k:
        return None
    if config.selection.K != "auto":
        return float(config.selection.K)
    assert val is not None
    k = estimate_k(torch.from_numpy(true_labels(val, val.ids())[0]))
    logger.info("K = %.3f positives per image, from the %d validation images", k, val.num_samples)
    return k


def check_k(config: Config, val: Index | None) -> None:
    """Refuse `auto` if no validation image names two classes: K would be 1, and nothing would be found."""
    if not config.objective.needs.k or config.selection.K != "auto" or val is None:
        return
    positives = val.observed if val.labels is None else val.labels
    if positives.lengths.max(initial=0) > 1:
        return
    without = ", ".join(name for name, term in BASES.items() if not term.needs.k)
    raise UserError(
        f"selection.K: auto is the mean number of positives of the validation images, but none of the "
        f"{val.num_samples:,} images of data.val names more than one class: K would be 1, and no class that "
        f"a label does not name would be expected. Give K as a number (--selection.K 1.5), or data.val with "
        f"the full labels of each image, or choose an objective.base that needs no K ({without})."
    )
