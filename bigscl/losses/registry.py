"""The table of all losses: the values each is computed from, its settings, and what it keeps.

A file of this folder adds its losses with `base_loss` and `consistency`; `objective` imports every file.
A loss is a function that returns one value per sample, [B]; the caller sums them and divides by the number of
samples of the global batch. Its parameters have the names of fields of `LossInputs`: these are what it needs.
One with a default may be missing. The others are settings: `settings` are those of the loss itself, other
names are fields of the objective. Labels are int8 [B,L]: 1 positive, 0 negative, -1 unknown. A known label
outranks what is expected of it. Arithmetic is in float32 (float64 for float64 logits), also under autocast.
"""

# Shapes: B batch, L classes, G side of the score map, k classes with a heatmap.

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from bigscl.common.user_error import UserError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from bigscl.losses.objective import Objective
    from bigscl.losses.state import LossState, RunFacts


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

INPUTS = frozenset(field.name for field in fields(LossInputs))
ALWAYS_GIVEN = frozenset({"logits", "labels"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A field of the objective that one loss uses, or few."""

    name: str
    type: Any
    """A dataclass of settings, or a number with its bounds."""
    default: Any
    text: str
    """The sentence about it in the reference of all settings."""


def section(name: str, kind: Callable[[], Any], losses: str = "") -> Setting:
    """Return settings of a dataclass that has a default for each; `losses` are those that use them."""
    return Setting(name=name, type=kind, default=kind(), text=f"Settings of {losses or name}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalBatch:
    """The batch of a step over all ranks. All ranks call `sum` and `gather` together, idle ones too."""

    num_samples: int
    num_classes: int
    most_per_rank: int
    """The largest number of samples of a rank."""
    world_size: int
    epoch: int
    device: torch.device
    sum: Callable[[Tensor], Tensor]
    """Returns a tensor summed over the ranks."""
    gather: Callable[[Tensor], Tensor]
    """Returns the tensors of all ranks, of one shape, one after the other."""


Statistics = Callable[[LossInputs | None, GlobalBatch, Any], dict[str, Any]]
"""Returns fields of LossInputs, from the inputs of this rank (None: it has no samples) and the settings."""


@dataclass(frozen=True, slots=True)
class LossTerm:
    """A loss as the objective uses it."""

    function: Callable[..., Tensor]
    parameters: Mapping[str, inspect.Parameter]
    """Those of the function, by their names."""
    setting: Setting | None = None
    statistics: Statistics | None = None
    """Compares samples of the global batch, so a step cannot be divided into smaller ones."""
    state: Callable[[RunFacts], LossState] | None = None
    """Makes what the loss keeps from step to step."""
    mixes: bool = False
    """Whether a mixed image (Mixup, CutMix) has the loss of each of its images, weighted by their shares."""

    @property
    def needs(self) -> frozenset[str]:
        return (INPUTS & self.parameters.keys()) - ALWAYS_GIVEN

    @property
    def needs_memory(self) -> bool:
        return bool(self.needs & FROM_MEMORY)

    @property
    def needs_k(self) -> bool:
        """Whether K must be known: for the loss itself, or to select the expected positives."""
        return bool(self.needs & (EXPECTED | {"positives_per_image"}))

    def settings(self, objective: Objective) -> Any:
        return None if self.setting is None else getattr(objective, self.setting.name)

    def __call__(self, inputs: LossInputs, objective: Objective) -> Tensor:
        """Return the loss of each sample [B]; UserError if something that it needs is missing."""
        values = {}
        for name, parameter in self.parameters.items():
            if name == "settings":
                values[name] = self.settings(objective)
            elif name not in INPUTS:
                values[name] = getattr(objective, name)
            else:
                values[name] = getattr(inputs, name)
                if values[name] is None and parameter.default is parameter.empty:
                    raise UserError(f"{name}: missing, and this objective needs it")
        return self.function(**values)


BASES: dict[str, LossTerm] = {}
CONSISTENCIES: dict[str, LossTerm] = {}


def base_loss(
    name: str,
    function: Callable[..., Tensor],
    *,
    setting: Setting | None = None,
    statistics: Statistics | None = None,
    state: Callable[[RunFacts], LossState] | None = None,
    mixes: bool = False,
) -> None:
    """Add a loss of the pooled prediction with the labels, for `objective.base`."""
    assert name not in BASES, f"{name} is defined twice"
    parameters = inspect.signature(function).parameters
    BASES[name] = LossTerm(
        function, parameters, setting=setting, statistics=statistics, state=state, mixes=mixes
    )
    # A mixed image has two rows of these, and of nothing else.
    assert not mixes or BASES[name].needs <= PER_IMAGE, name


def consistency(name: str, function: Callable[..., Tensor]) -> None:
    """Add an agreement with the memory, for `objective.consistency`."""
    assert name not in CONSISTENCIES, f"{name} is defined twice"
    CONSISTENCIES[name] = LossTerm(function, inspect.signature(function).parameters)
