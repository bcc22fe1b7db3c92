"""The labels that training sees: the single-positive protocol of Cole et al. (CVPR 2021), bit for bit."""

import numpy as np
from numpy.typing import NDArray

from bigscl.common.user_error import UserError

SEED = 1200
VALIDATION_SHARE = 0.2


def observe(
    labels: NDArray[np.bool_], *, seed: int = SEED, num_positives: int = 1, num_negatives: int = 0
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Return (observed positives, observed negatives) of each row of a `[N, L]` label matrix.

    A row with fewer labels gives all of them. The positives do not depend on `num_negatives`.
    """
    if num_positives < 1 or num_negatives < 0:
        raise UserError(
            f"observed labels: {num_positives} positives and {num_negatives} negatives, "
            f"expected at least 1 and 0"
        )
    random = np.random.RandomState(seed)
    positives, negatives = [], []
    for row in labels.astype(bool):
        present, absent = np.flatnonzero(row), np.flatnonzero(~row)
        random.shuffle(present)
        # Also if no negative is kept: the published label files were drawn from this stream.
        random.shuffle(absent)
        positives.append(tuple(sorted(present[:num_positives].tolist())))
        negatives.append(tuple(sorted(absent[:num_negatives].tolist())))
    return positives, negatives


def split(num_samples: int, *, seed: int = SEED) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return (training rows, validation rows) of the official training set, each ascending."""
    order = np.random.RandomState(seed).permutation(num_samples)
    # np.round is half to even, as in the published splits.
    num_training = num_samples - int(np.round(VALIDATION_SHARE * num_samples))
    return np.sort(order[:num_training]), np.sort(order[num_training:])
