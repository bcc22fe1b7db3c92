"""The values that a loss is computed from. No torch import."""

# Shapes: B batch, L classes, G side of the score map, k classes with a heatmap.

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossInputs:
    """Values of a batch of B samples. A loss names those that it needs; the others may be missing."""

    logits: Tensor
    """[B,L], of the pooled prediction."""
    labels: Tensor
    """int8 [B,L]: 1 positive, 0 negative, -1 unknown."""
    maps: Tensor | None = None
    """Score maps [B,L,G,G] in the view frame: the sigmoid of the network's maps, in at least float32."""

    logit_map: Tensor | None = None
    """The network's maps [B,L,G,G] as they are, before the sigmoid; `logits` are their means."""

    # From the memory, see FROM_MEMORY

    scores: Tensor | None = None
    """[B,L]: running average of the prediction."""
    target: Tensor | None = None
    """Heatmaps as the view shows them: [B,L,G,G], or [B,k,G,G] of `classes`."""
    weight: Tensor | None = None
    """Weight of each cell of a corrected target: [B,1,G,G], in 0 to 1."""
    classes: Tensor | None = None
    """[B,k], distinct: the classes that have a heatmap, the others' is 0; None: all have one."""
    expected: Tensor | None = None
    """bool [B,L]: the expected positives."""
    pseudo_positives: Tensor | None = None
    """bool [B,L]: those of them with the highest scores, which count as positives."""

    # From the run

    positives_per_image: float | None = None
    """K, the expected number of positives per image."""
    epoch: int | None = None
    """The number of the epoch, from 0."""
    progress: float | None = None
    """The share of the run's epochs that are done."""

    # Statistics of the global batch; missing: this is the global batch

    mean_counts: tuple[Tensor, ...] = ()
    """Means of `predicted_count` over the global batch: of the network, and of the label estimates."""
    class_means: Tensor | None = None
    """[L]: means of f over the global batch, without gradient."""
    threshold: Tensor | None = None
    """The logit from which on losses of unknown labels are large, see `large_loss.find_large`."""

    # From the state of the loss

    estimates: Tensor | None = None
    """Logits [B,L] of the label estimates, which are trained together with the network."""
    corrections: Tensor | None = None
    """bool [B,L]: unknown labels that were corrected to positives in earlier epochs."""
    cuts: Tensor | None = None
    """[L]: unknown labels with a lower score in the memory are negative pseudo-labels."""
    priors: Tensor | None = None
    """[L]: share of the images that have each class, estimated in the epoch before."""
    given_share: Tensor | None = None
    """[L]: share of the images with each class as a given positive."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MixedInputs:
    """Further values of a batch of mixed images."""

    share: Tensor
    """[B]: weight of the image's own labels, the rest is that of its neighbour's."""
    neighbours: LossInputs
    """The same prediction, with the labels and expected positives of the neighbours."""
    visible: LossInputs
    """For the consistency: the prediction and the target of the cells that show the image alone."""
    is_visible: Tensor
    """bool [B]: whether there are such cells."""


FROM_MEMORY = frozenset({"scores", "target", "weight", "classes", "expected", "pseudo_positives"})
"""Fields that the memory has."""
EXPECTED = frozenset({"expected", "pseudo_positives"})
"""Fields that the selection of expected positives gives."""
PER_IMAGE = frozenset({"labels", *EXPECTED})
"""Fields that say what an image shows: a mixed image has them of two."""
