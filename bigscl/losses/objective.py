"""What a run minimises: a base loss plus gamma times a consistency. Importing it imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from bigscl.common.bounds import Share
from bigscl.losses.inputs import LossInputs, Needs
from bigscl.losses.losses import BASES, CONSISTENCIES, Base, Consistency, Norm
from bigscl.losses.settings import Asl, Crisp, EmApl, Focal, GeneralizedRobust, Hill, LargeLoss, Splc
from bigscl.training.schedule import Ramp

if TYPE_CHECKING:
    from torch import Tensor


class Loss(NamedTuple):
    """A loss and its parts, each [B], by the names they have in the logs."""

    total: Tensor
    base: Tensor
    consistency: Tensor
    """Before its weight gamma."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """What is minimised: base + gamma * consistency."""

    base: Base = "en"
    """The loss of the pooled prediction with the labels."""
    consistency: Consistency = "scl"
    """The agreement with the memory: none, scores (cl), heatmaps (scl), or heatmaps less their start values,
    each cell weighted by its visits (scl_corrected)."""
    norm: Norm = "mse"
    """Reduction of the consistency: mse, rms, or the literal l2."""
    gamma: Ramp = field(default_factory=Ramp)
    """Weight of the consistency."""
    smoothing: Share = 0.1
    """Label smoothing of an_ls."""
    focal: Focal = field(default_factory=Focal)
    """Settings of focal."""
    asl: Asl = field(default_factory=Asl)
    """Settings of asl."""
    hill: Hill = field(default_factory=Hill)
    """Settings of hill."""
    splc: Splc = field(default_factory=Splc)
    """Settings of splc."""
    gr: GeneralizedRobust = field(default_factory=GeneralizedRobust)
    """Settings of gr."""
    large_loss: LargeLoss = field(default_factory=LargeLoss)
    """Settings of ll_r, ll_ct and ll_cp."""
    em_apl: EmApl = field(default_factory=EmApl)
    """Settings of em_apl."""
    crisp: Crisp = field(default_factory=Crisp)
    """Settings of crisp."""

    @property
    def needs(self) -> Needs:
        """What its two losses are computed from."""
        return BASES[self.base].needs | CONSISTENCIES[self.consistency].needs

    def __call__(self, inputs: LossInputs, *, gamma: float = 1.0) -> Loss:
        """Return the loss of each sample; UserError if something that it needs is missing."""
        base = BASES[self.base].compute(inputs, self)
        consistency = CONSISTENCIES[self.consistency].compute(inputs, self)
        return Loss(base + gamma * consistency, base, consistency)
