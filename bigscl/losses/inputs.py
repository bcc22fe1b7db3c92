"""What a loss is computed from, and what it needs of that. No torch import."""

# Shapes: B batch, L classes, G side of the score map, k classes with a heatmap.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from bigscl.common.user_error import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from bigscl.losses.objective import Objective

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a loss is computed from, in addition to the logits and the labels."""

    scores: bool = False
    """The scores that the memory keeps of each image."""
    heatmaps: bool = False
    """The heatmaps that the memory keeps of each image, and the network's score maps."""
    counts: bool = False
    """The visits of each heatmap cell that the memory counts."""
    expected: bool = False
    """The expected positives, which are selected by the scores in the memory."""
    asserted: bool = False
    """The surest of the expected positives, see `selection.asserted`."""
    positives_per_image: bool = False
    """K, the expected number of positives per image, in the loss itself."""
    mean_counts: bool = False
    """The mean number of predicted positives over the global batch."""
    class_means: bool = False
    """The mean prediction of each class over the global batch."""
    threshold: bool = False
    """The rank of each unknown label's loss in the global batch."""
    estimates: bool = False
    """Label estimates, which are trained together with the network."""
    corrections: bool = False
    """The unknown labels that were corrected to positives in earlier epochs."""
    cuts: bool = False
    """A cut per class, below which remembered scores are those of negative pseudo-labels."""
    priors: bool = False
    """Class priors, which are estimated from the predictions of the epoch before."""
    epoch: bool = False
    """The number of the epoch."""
    progress: bool = False
    """The share of the run's epochs that are done."""

    @property
    def memory(self) -> bool:
        """Whether it needs a store."""
        return self.scores or self.heatmaps or self.expected

    @property
    def k(self) -> bool:
        """Whether K must be known: for the loss itself, or to select the expected positives."""
        return self.positives_per_image or self.expected

    @property
    def whole_batch(self) -> bool:
        """Whether it compares samples of the global batch, so a step cannot be divided into smaller ones."""
        return self.mean_counts or self.class_means or self.threshold

    @property
    def num_mean_counts(self) -> int:
        """How many means are reduced over the ranks: the network's, and that of the label estimates."""
        return int(self.mean_counts) * (1 + int(self.estimates))

    def __or__(self, other: Needs) -> Needs:
        """What two losses need together."""
        return Needs(**{name: getattr(self, name) or getattr(other, name) for name in self.__slots__})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossInputs:
    """What losses are computed from, for a batch of B samples; only what `Needs` asks for must be there."""

    logits: Tensor
    """[B,L], of the pooled prediction."""
    labels: Tensor
    """int8 [B,L]: 1 positive, 0 negative, -1 unknown."""
    maps: Tensor | None = None
    """Score maps [B,L,G,G] in the view frame: the sigmoid of the network's maps, in at least float32."""
    scores: Tensor | None = None
    """Scores [B,L] from the memory."""
    target: Tensor | None = None
    """Heatmaps from the memory as the view shows them: [B,L,G,G], or [B,k,G,G] of `classes`."""
    weight: Tensor | None = None
    """How far each cell of a corrected target is trusted: [B,1,G,G], in 0 to 1."""
    classes: Tensor | None = None
    """[B,k], distinct: the classes that have a heatmap, the others' is 0; None: all have one."""
    expected: Tensor | None = None
    """bool [B,L]: the expected positives."""
    asserted: Tensor | None = None
    """bool [B,L]: the surest of them, which count as positives."""
    positives_per_image: float | None = None
    """K."""
    mean_counts: tuple[Tensor, ...] = ()
    """Means of `predicted_count` over the global batch; none: this is the global batch."""
    class_means: Tensor | None = None
    """[L]: means of f over the global batch, without gradient; None: this is the global batch."""
    threshold: Tensor | None = None
    """The logit from which on losses of unknown labels are large in the global batch, see
    `pseudo_label_losses.find_large`; None: this is the global batch."""
    estimates: Tensor | None = None
    """Logits [B,L] of the label estimates."""
    corrections: Tensor | None = None
    """bool [B,L]: unknown labels that were corrected to positives."""
    cuts: Tensor | None = None
    """[L]: unknown labels with a lower score in the memory are negative pseudo-labels."""
    priors: Tensor | None = None
    """[L]: share of the images that have each class."""
    observed_share: Tensor | None = None
    """[L]: share of the images with each class as an observed positive."""
    epoch: int | None = None
    """The number of the epoch, from 0."""
    progress: float | None = None
    """The share of the run's epochs that are done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTerm:
    """A loss as the objective uses it."""

    compute: Callable[[LossInputs, Objective], Tensor]
    needs: Needs = Needs()
    settings: tuple[str, ...] = ()
    """Fields of `Objective` that only this loss, or few, use."""


def needed(name: str, value: Value | None) -> Value:
    """Return the value; ValueError if it is missing."""
    if value is None:
        raise UserError(f"{name}: missing, and this objective needs it")
    return value
