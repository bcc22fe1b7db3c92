"""Histograms of the values that an epoch has given each class, and what EM+APL and CRISP make of them.

Counts are whole numbers, so their sum over ranks is the same for any division of the samples. A bin holds 32
neighbouring float16 values: above 0.0001 its width is 1/64 to 1/32 of the value.
"""

# Shapes: B batch, L classes, K kinds of labels (unknown, negative, positive).

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bigscl.distributed.ranks import Ranks

SHIFT = 5
ONE = int(np.float16(1).view(np.uint16))
NUM_BINS = (ONE >> SHIFT) + 1
EDGES: NDArray[np.float16] = (np.arange(NUM_BINS, dtype=np.uint16) << SHIFT).view(np.float16)
"""The lowest value of each bin."""
UNKNOWN, NEGATIVE, POSITIVE = range(3)
Counts = NDArray[np.int64]


class ClassHistograms:
    """The histogram of this epoch so far, on the device, and that of the epoch before, on the host."""

    # Invariant: the sum of `current` over the ranks is the histogram of all samples of the epoch so far.

    def __init__(self, num_classes: int, device: torch.device) -> None:
        self._shape = (3, num_classes, NUM_BINS)
        self.current = torch.zeros(self._shape, dtype=torch.int64, device=device)
        """int64 [K,L,bins]"""
        self.complete: Counts = np.zeros(self._shape, np.int64)
        """[K,L,bins] of all ranks; 0 before the first epoch has ended."""

    @torch.no_grad()
    def add(self, values: Tensor, labels: Tensor) -> None:
        """Count values [B,L] in 0 to 1 of labels int8 [B,L]."""
        bins = values.detach().half().view(torch.int16).long() >> SHIFT
        classes = torch.arange(values.shape[1], device=values.device)
        places = ((labels.long() + 1) * self._shape[1] + classes) * NUM_BINS + bins
        # In one dimension, where scatter_add_ is deterministic also on GPUs.
        self.current.view(-1).scatter_add_(0, places.flatten(), torch.ones_like(places).flatten())

    def share(self, ranks: Ranks, *, ends_epoch: bool) -> None:
        """Give rank 0 the counts of all ranks; at the end of an epoch they are complete, on every rank."""
        parts = ranks.gather(self.current.cpu().numpy().tobytes())
        total = None if parts is None else sum(np.frombuffer(part, np.int64) for part in parts)
        self.current.zero_()
        if ends_epoch:
            payload = ranks.broadcast(None if total is None else np.asarray(total).tobytes())
            self.complete = np.frombuffer(payload, np.int64).reshape(self._shape).copy()
        elif total is not None:
            self.current.copy_(torch.from_numpy(np.asarray(total)).view(self._shape))

    def state(self) -> dict[str, Tensor]:
        """Return everything that a checkpoint must keep, on rank 0 after `share`."""
        return {"current": self.current.cpu(), "complete": torch.from_numpy(self.complete)}

    def load(self, state: dict[str, Tensor], *, is_first: bool) -> None:
        """Load what `state` returned; the counts of the epoch so far belong to the first rank."""
        self.complete = state["complete"].numpy().copy()
        self.current.zero_()
        if is_first:
            self.current.copy_(state["current"])


def lowest_cuts(counts: Counts, share: float) -> NDArray[np.float16]:
    """Return a cut for each class, below which at most this share of its values lies.

    From histograms [L,bins]. The cut is an edge between two bins, so a bin is taken whole or not at all. A
    class without values gets 0, below which nothing lies.
    """
    total = counts.sum(1, keepdims=True)
    below = np.cumsum(counts, 1) - counts
    last = np.where(below <= share * total, np.arange(NUM_BINS), 0).max(1)
    return np.where(total[:, 0] > 0, EDGES[last], np.float16(0))


def class_priors(counts: Counts, delta: float, tau: float) -> NDArray[np.float64]:
    """Estimate the share of images that have each class, from histograms of predictions [K,L,bins]."""
    return best_bin_priors(counts.sum(0), counts[POSITIVE], delta, tau)


def best_bin_priors(images: Counts, observed: Counts, delta: float, tau: float) -> NDArray[np.float64]:
    """Estimate the share of images that have each class, from histograms [L,bins] of all and of named images.

    CRISP's estimator (Liu et al. 2023, theorem 4.1): of thresholds z, let q(z) be the share of all images at
    or above z and p(z) that of the observed positives. The prior is q(z) / p(z) at the z that minimises an
    upper confidence bound of it: at a good z, positives are separated best. The thresholds are the edges of
    the bins, where the paper tries every prediction. The prior is at least the observed share and at most 1;
    it is 0 for a class that was never observed.
    """
    images, observed = _from_top(images), _from_top(observed)
    num_images, num_observed = images[:, :1], observed[:, :1]
    slack = np.sqrt(np.log(4 / delta) / (2 * np.maximum(num_images, 1)))
    slack = slack + np.sqrt(np.log(4 / delta) / (2 * np.maximum(num_observed, 1)))
    q, p = images / np.maximum(num_images, 1), observed / np.maximum(num_observed, 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        bound = np.where(p > 0, (q + (1 + tau) * slack) / p, np.inf)
        best = bound.argmin(1)[:, None]
        prior = np.take_along_axis(q, best, 1) / np.take_along_axis(p, best, 1)
    lowest = num_observed / np.maximum(num_images, 1)
    found: NDArray[np.float64] = np.where(num_observed > 0, np.clip(prior, lowest, 1.0), 0.0)[:, 0]
    return found


def observed_share(counts: Counts) -> NDArray[np.float64]:
    """Return the share of images with each class as an observed positive, from histograms [K,L,bins]."""
    found: NDArray[np.float64] = counts[POSITIVE].sum(1) / np.maximum(counts.sum((0, 2)), 1)
    return found


def _from_top(counts: Counts) -> Counts:
    """Return how many values lie at or above each edge."""
    return np.cumsum(counts[:, ::-1], 1)[:, ::-1]
