"""The objective of a run: a base loss plus gamma times a consistency. Importing it imports no torch."""

import importlib
import pkgutil
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from bigscl.common.bounds import NonNegative
from bigscl.losses import registry
from bigscl.losses.consistency import Norm
from bigscl.losses.registry import LossInputs, LossTerm, MixedInputs

if TYPE_CHECKING:
    from torch import Tensor

# Every file of this folder may add losses: the folder is the table.
for _file in pkgutil.iter_modules([str(Path(__file__).parent)]):
    importlib.import_module(f"bigscl.losses.{_file.name}")
# By name: the order of imports depends on who imports a file first.
BASES = dict(sorted(registry.BASES.items()))
CONSISTENCIES = dict(sorted(registry.CONSISTENCIES.items()))

if TYPE_CHECKING:
    Base = str
    Consistency = str
else:
    Base = Literal[tuple(BASES)]
    Consistency = Literal[tuple(CONSISTENCIES)]


class Loss(NamedTuple):
    """A loss and its parts, each [B], by the names they have in the logs."""

    total: "Tensor"
    base: "Tensor"
    consistency: "Tensor"
    """Before its weight gamma."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ramp:
    """The consistency weight gamma: 0 before `start_epoch`, then a line up to `peak` over `epochs`."""

    peak: NonNegative = 1.0
    """Gamma after the ramp."""
    epochs: NonNegative = 5.0
    """Length of the ramp."""
    start_epoch: NonNegative = 0.0
    """Where the ramp starts; gamma is 0 before it."""

    def at(self, progress: float) -> float:
        since = progress - self.start_epoch
        if since < 0:
            return 0.0
        return self.peak * since / self.epochs if since < self.epochs else self.peak


@dataclass(frozen=True, slots=True, kw_only=True)
class _Objective:
    """The loss that training minimises: base + gamma * consistency."""

    base: Base = "en"
    """The loss of the pooled prediction with the labels."""
    consistency: Consistency = "scl"
    """The agreement with the memory: none, scores (cl), heatmaps (scl), or heatmaps less their start values,
    each cell weighted by its visits (scl_corrected)."""
    norm: Norm = "mse"
    """Reduction of the consistency: mse, rms, or the literal l2."""
    gamma: Ramp = Ramp()
    """Weight of the consistency."""

    @property
    def terms(self) -> tuple[LossTerm, LossTerm]:
        return BASES[self.base], CONSISTENCIES[self.consistency]

    @property
    def needs(self) -> frozenset[str]:
        """Fields of LossInputs that its losses are computed from, besides logits and labels."""
        base, consistency = self.terms
        return base.needs | consistency.needs

    @property
    def needs_memory(self) -> bool:
        return any(term.needs_memory for term in self.terms)

    @property
    def needs_k(self) -> bool:
        return any(term.needs_k for term in self.terms)

    @property
    def needs_whole_batch(self) -> bool:
        """Whether it compares samples of the global batch, so a step cannot be divided into smaller ones."""
        return any(term.statistics is not None for term in self.terms)

    def __call__(self, inputs: LossInputs, *, gamma: float = 1.0) -> Loss:
        """Return the loss of each sample; UserError if something that it needs is missing."""
        base, consistency = (term(inputs, self) for term in self.terms)
        return Loss(base + gamma * consistency, base, consistency)

    def of_mixed(self, inputs: LossInputs, mixed: MixedInputs, *, gamma: float = 1.0) -> Loss:
        """Return the loss of each sample of a batch whose images show something of a second one."""
        first, agreement = self.terms
        base = mixed.share * first(inputs, self) + (1 - mixed.share) * first(mixed.neighbours, self)
        consistency = mixed.is_visible * agreement(mixed.visible, self)
        return Loss(base + gamma * consistency, base, consistency)


def _with_settings(kind: type[_Objective]) -> type[_Objective]:
    """Return the class with a field for the settings of each loss, by their names."""
    settings = {term.setting.name: term.setting for term in BASES.values() if term.setting is not None}
    added = [
        (each.name, each.type, field(default=each.default, metadata={"text": each.text}))
        for each in settings.values()
    ]
    namespace = {"__module__": __name__, "__doc__": kind.__doc__}
    return make_dataclass(
        "Objective", added, bases=(kind,), namespace=namespace, frozen=True, slots=True, kw_only=True
    )


if TYPE_CHECKING:
    Objective = _Objective
else:
    Objective = _with_settings(_Objective)
