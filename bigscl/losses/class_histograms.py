"""Losses that estimate something of each class from a histogram of the epoch before. No torch import.

EM+APL (Zhou et al. 2022): negative pseudo-labels. CRISP (Liu et al. 2023): class priors.
"""

# Shapes: B batch, L classes, T types of labels (unknown, negative, positive); f is sigmoid(logits).

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from bigscl.common.bounds import Count, NonNegative, Share
from bigscl.losses.cross_entropy import an, negatives, probabilities, weighted
from bigscl.losses.registry import GlobalBatch, LossInputs, base_loss, section
from bigscl.losses.state import RunFacts, TrainedBatch

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from bigscl.distributed.ranks import Ranks
else:
    from bigscl.common import torch_later as torch

SHIFT = 5
ONE = int(np.float16(1).view(np.uint16))
NUM_BINS = (ONE >> SHIFT) + 1
EDGES: NDArray[np.float16] = (np.arange(NUM_BINS, dtype=np.uint16) << SHIFT).view(np.float16)
"""The lowest value of each bin."""
UNKNOWN, NEGATIVE, POSITIVE = range(3)
Counts = NDArray[np.int64]


class ClassHistograms:
    """Histograms of the values that an epoch gives each class: of this epoch so far, and of the one before.

    Counts are whole numbers, so their sum over ranks is the same for any division of the samples. A bin holds
    32 neighbouring float16 values: above 0.0001 its width is 1/64 to 1/32 of the value.
    """

    # Invariant: the sum of `current` over the ranks is the histogram of all samples of the epoch so far.

    file = "histograms.pt"

    def __init__(self, num_classes: int, device: torch.device, *, is_first: bool = True) -> None:
        self._shape = (3, num_classes, NUM_BINS)
        self._is_first = is_first
        self._epoch: int | None = None
        self._inputs: dict[str, Tensor] = {}
        self.current = torch.zeros(self._shape, dtype=torch.int64, device=device)
        """int64 [T,L,bins], on the device."""
        self.complete: Counts = np.zeros(self._shape, np.int64)
        """[T,L,bins] of all ranks, of the epoch before, on the host; 0 before the first epoch has ended."""

    def inputs(self, ids: Tensor, epoch: int, device: torch.device) -> dict[str, Tensor]:
        """Return what the loss takes from the histograms, which is the same in the whole epoch."""
        if epoch != self._epoch:
            arrays = self.epoch_inputs(epoch)
            self._inputs = {name: torch.as_tensor(array).to(device) for name, array in arrays.items()}
            self._epoch = epoch
        return self._inputs

    def epoch_inputs(self, epoch: int) -> dict[str, NDArray[Any]]:
        """Return fields of `LossInputs`, from the complete histograms; each loss has its own."""
        raise NotImplementedError

    def add(self, values: Tensor, labels: Tensor) -> None:
        """Count values [B,L] in 0 to 1 of labels int8 [B,L]."""
        with torch.no_grad():
            bins = values.detach().half().view(torch.int16).long() >> SHIFT
            classes = torch.arange(values.shape[1], device=values.device)
            cells = ((labels.long() + 1) * self._shape[1] + classes) * NUM_BINS + bins
            # In one dimension, where scatter_add_ is deterministic also on GPUs.
            self.current.view(-1).scatter_add_(0, cells.flatten(), torch.ones_like(cells).flatten())

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
        """Return the counts, on rank 0 after `share`."""
        return {"current": self.current.cpu(), "complete": torch.from_numpy(self.complete)}

    def load(self, state: dict[str, Tensor]) -> None:
        self._epoch = None
        self.complete = state["complete"].numpy().copy()
        self.current.zero_()
        if self._is_first:
            self.current.copy_(state["current"])


# Negative pseudo-labels


@dataclass(frozen=True, slots=True, kw_only=True)
class EmApl:
    """Entropy maximisation with asymmetric pseudo-labels (Zhou et al. 2022), as published for Pascal VOC."""

    alpha: NonNegative = 0.2
    """Weight of the entropy of unknown labels."""
    beta: NonNegative = 0.02
    """Weight of the cross-entropy of negative pseudo-labels."""
    share: Share = 0.9
    """Share of each class's unknown labels that are pseudo-labels at the end; 0 is plain EM."""
    start_epoch: Count = 5
    """First epoch, from 0, with pseudo-labels; their share grows by equal steps from then on."""


def em_apl(logits: Tensor, labels: Tensor, scores: Tensor, cuts: Tensor, settings: EmApl = EmApl()) -> Tensor:
    """-log f of positives, -alpha H(f) of unknown labels, H the entropy, and a loss of pseudo-labels.

    That is beta times the cross-entropy with the remembered score s of unknown labels that have s < cut, the
    class's cut [L]: they are most likely negative.

    In the paper an extra pass after each epoch gives the lowest predictions a pseudo-label for good. Here the
    memory has them: the same share of each class is taken anew for each epoch, by the scores [B,L] in it.
    """
    f = probabilities(logits)
    is_pseudo = (labels == -1) & (scores < cuts)
    is_open = (labels == -1) & ~is_pseudo
    taught = scores.detach().to(f.dtype)
    # -log f and -log(1 - f) with the weights -f and -(1 - f) are the negative entropy.
    entropy, pseudo = -settings.alpha * is_open.to(f.dtype), settings.beta * is_pseudo.to(f.dtype)
    positive = (labels == 1) + entropy * f + pseudo * taught
    negative = (labels == 0) + entropy * probabilities(-logits) + pseudo * (1 - taught)
    return weighted(logits, positive, negative)


class PseudoLabelCuts(ClassHistograms):
    """The cut of each class, by a histogram of the scores that the memory had after the epoch before."""

    def __init__(self, run: RunFacts) -> None:
        super().__init__(run.annotations.num_classes, run.device, is_first=run.is_first)
        self._settings: EmApl = run.settings
        self._num_epochs = run.num_epochs

    def epoch_inputs(self, epoch: int) -> dict[str, NDArray[Any]]:
        """Return cuts below which a share of each class's unknown labels lies, which grows by equal steps."""
        start, share = self._settings.start_epoch, self._settings.share
        rounds = max(epoch - start + 1, 0)
        share = min(share * rounds / max(self._num_epochs - start, 1), 1.0)
        return {"cuts": lowest_cuts(self.complete[UNKNOWN], share)}

    def update(self, trained: TrainedBatch) -> None:
        self.add(trained.updated_scores(), trained.inputs.labels)


def lowest_cuts(counts: Counts, share: float) -> NDArray[np.float16]:
    """Return a cut for each class, below which at most this share of its values lies.

    From histograms [L,bins]. The cut is an edge between two bins, so a bin is taken whole or not at all. A
    class without values gets 0, below which nothing lies.
    """
    total = counts.sum(1, keepdims=True)
    below = np.cumsum(counts, 1) - counts
    last = np.where(below <= share * total, np.arange(NUM_BINS), 0).max(1)
    return np.where(total[:, 0] > 0, EDGES[last], np.float16(0))


base_loss("em_apl", em_apl, setting=section("em_apl", EmApl), state=PseudoLabelCuts)


# Class priors


@dataclass(frozen=True, slots=True, kw_only=True)
class Crisp:
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
        priors = class_priors(self.complete, self._settings.delta, self._settings.tau)
        share = given_share(self.complete)
        return {"priors": priors.astype(np.float32), "given_share": share.astype(np.float32)}

    def update(self, trained: TrainedBatch) -> None:
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
    return np.asarray(np.where(num_given > 0, np.clip(prior, lowest, 1.0), 0.0)[:, 0])


def given_share(counts: Counts) -> NDArray[np.float64]:
    """Return the share of images with each class as a given positive, from histograms [T,L,bins]."""
    return np.asarray(counts[POSITIVE].sum(1) / np.maximum(counts.sum((0, 2)), 1))


def _from_top(counts: Counts) -> Counts:
    """Return how many values lie at or above each edge."""
    return np.cumsum(counts[:, ::-1], 1)[:, ::-1]


base_loss("crisp", crisp, setting=section("crisp", Crisp), statistics=_class_means, state=ClassPriors)
