"""Class-prior induced single-positive learning (Liu et al. 2023). No torch import."""

# Shapes: B batch, L classes, T types of labels (unknown, negative, positive); f is sigmoid(logits).

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from bigscl.common.bounds import Count, Share
from bigscl.losses.cross_entropy import negatives, probabilities
from bigscl.losses.inputs import LossInputs
from bigscl.losses.registry import GlobalBatch, base_loss, section
from bigscl.losses.single_positive import an
from bigscl.losses.state import POSITIVE, ClassHistograms, Counts, RunFacts, TrainedBatch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Crisp:
    """Class-prior induced single-positive learning (Liu et al. 2023)."""

    start_epoch: Count = 1
    """First epoch, from 0, with class priors; before it the loss is `an`."""
    delta: Annotated[float, Field(gt=0, lt=1)] = 0.01
    """Risk with which the estimate of a class prior may miss its bound."""
    tau: Share = 0.01
    """How much wider than necessary that bound is."""


def crisp(
    logits: Tensor,
    labels: Tensor,
    priors: Tensor,
    given_share: Tensor,
    epoch: int,
    class_means: Tensor | None = None,
    settings: Crisp = Crisp(),
) -> Tensor:
    """Class-prior induced risk (eq. 7 of the paper): 2 pi_j (1 - f) of positives, |mean of f_j - pi_j|.

    `priors` [L] are the class priors pi, `given_share` [L] the share of images with class j as a given
    positive. The first term is a mean over these images, so each has the weight 2 pi_j / given_share_j.
    The second takes the mean over the batch: `class_means` [L] are those of the *global* batch, which the
    caller reduces over ranks; without them these samples are the whole batch. Both are divided by L, as every
    loss here. Value and gradient are exact however ranks share the batch, as in `epr`.

    The weights of eq. 8, by logits, are left out: the paper gives no value for its factor. Known negatives:
    cross-entropy. Before `start_epoch` it is `an`.
    """
    if epoch < settings.start_epoch:
        return an(logits, labels)
    f = probabilities(logits)
    weight = 2 * priors / given_share.where(given_share > 0, 1.0)
    fitted = ((labels == 1) * weight * probabilities(-logits)).mean(1)
    error = (f.mean(0) if class_means is None else class_means).detach() - priors
    # Of the absolute value of a mean each sample has the whole value, and the gradient of sign * f.
    aligned = error.abs() + error.sign() * (f - f.detach())
    return fitted + aligned.mean(1) + negatives(logits, labels == 0)


def _class_means(inputs: LossInputs | None, batch: GlobalBatch, _: Crisp) -> dict[str, Any]:
    """Return the mean prediction of each class over the global batch [L]."""
    import torch

    if inputs is None:
        sums = torch.zeros(batch.num_classes, device=batch.device)
    else:
        sums = probabilities(inputs.logits.detach()).sum(0)
    return {"class_means": batch.sum(sums) / max(batch.num_samples, 1)}


class ClassPriors(ClassHistograms):
    """The class priors, by a histogram of the predictions of the epoch before."""

    def __init__(self, run: RunFacts) -> None:
        super().__init__(run.annotations.num_classes, run.device, is_first=run.is_first)
        self._settings: Crisp = run.settings

    def epoch_inputs(self, epoch: int) -> dict[str, NDArray[Any]]:
        """Return the class priors and the shares of given positives."""
        priors = class_priors(self.complete, self._settings.delta, self._settings.tau)
        share = given_share(self.complete)
        return {"priors": priors.astype(np.float32), "given_share": share.astype(np.float32)}

    def update(self, trained: TrainedBatch) -> None:
        """Count the predictions."""
        self.add(probabilities(trained.inputs.logits), trained.inputs.labels)


def class_priors(counts: Counts, delta: float, tau: float) -> NDArray[np.float64]:
    """Estimate the share of images that have each class, from histograms of predictions [T,L,bins].

    CRISP's estimator (theorem 4.1 of the paper): of thresholds z, let q(z) be the share of all images at or
    above z and p(z) that of the given positives. The prior is q(z) / p(z) at the z that minimises an upper
    confidence bound of it: at a good z, positives are separated best. The thresholds are the edges of the
    bins, where the paper tries every prediction. The prior is at least the given share and at most 1; it is 0
    for a class that was never given.
    """
    images, given = _from_top(counts.sum(0)), _from_top(counts[POSITIVE])
    num_images, num_given = images[:, :1], given[:, :1]
    slack = np.sqrt(np.log(4 / delta) / (2 * np.maximum(num_images, 1)))
    slack = slack + np.sqrt(np.log(4 / delta) / (2 * np.maximum(num_given, 1)))
    q, p = images / np.maximum(num_images, 1), given / np.maximum(num_given, 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        bound = np.where(p > 0, (q + (1 + tau) * slack) / p, np.inf)
        best = bound.argmin(1)[:, None]
        prior = np.take_along_axis(q, best, 1) / np.take_along_axis(p, best, 1)
    lowest = num_given / np.maximum(num_images, 1)
    priors: NDArray[np.float64] = np.where(num_given > 0, np.clip(prior, lowest, 1.0), 0.0)[:, 0]
    return priors


def given_share(counts: Counts) -> NDArray[np.float64]:
    """Return the share of images with each class as a given positive, from histograms [T,L,bins]."""
    share: NDArray[np.float64] = counts[POSITIVE].sum(1) / np.maximum(counts.sum((0, 2)), 1)
    return share


def _from_top(counts: Counts) -> Counts:
    """Return how many values lie at or above each edge."""
    return np.cumsum(counts[:, ::-1], 1)[:, ::-1]


base_loss("crisp", crisp, setting=section("crisp", Crisp), statistics=_class_means, state=ClassPriors)
