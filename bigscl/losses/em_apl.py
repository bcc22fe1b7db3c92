"""Entropy maximisation with asymmetric pseudo-labels (Zhou et al. 2022). No torch import."""

# Shapes: B batch, L classes; f is sigmoid(logits).

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from bigscl.common.bounds import Count, NonNegative, Share
from bigscl.losses.cross_entropy import probabilities, weighted
from bigscl.losses.registry import base_loss, section
from bigscl.losses.state import EDGES, NUM_BINS, UNKNOWN, ClassHistograms, Counts, RunFacts, TrainedBatch

if TYPE_CHECKING:
    from torch import Tensor


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


def em_apl(
    logits: Tensor,
    labels: Tensor,
    scores: Tensor,
    cuts: Tensor,
    settings: EmApl = EmApl(),
) -> Tensor:
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
        """Count the scores that the memory will have."""
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
