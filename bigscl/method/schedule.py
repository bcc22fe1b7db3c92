"""What changes while a run proceeds, as pure functions of progress: learning rate, gamma, and the phase.

Progress is counted in epochs from the start of the run, as a fraction: 2.5 is halfway through the third.
"""

import math
from dataclasses import dataclass
from typing import Literal

from bigscl.bounds import NonNegative


def _at_least(least: float, **values: float) -> None:
    for name, value in values.items():
        if not value >= least:
            raise ValueError(f"{name}: found {value}, expected at least {least}")


def learning_rate(
    step: int, *, peak: float, total_steps: int, warmup_steps: int = 0, final: float = 0.0
) -> float:
    """The rate of a step: a line up to `peak` over the warm-up steps, then half a cosine down to `final`.

    Step `warmup_steps` has the peak; the first step is never 0, and step `total_steps` would have `final`.
    """
    if step < warmup_steps:
        return peak * (step + 1) / (warmup_steps + 1)
    progress = min((step - warmup_steps) / max(total_steps - warmup_steps, 1), 1.0)
    return final + (peak - final) * 0.5 * (1 + math.cos(math.pi * progress))


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
        """Gamma after `progress` epochs."""
        return gamma(progress, peak=self.peak, ramp_epochs=self.epochs, start_epoch=self.start_epoch)


def gamma(progress: float, *, peak: float = 1.0, ramp_epochs: float = 5.0, start_epoch: float = 0.0) -> float:
    """The consistency weight after `progress` epochs."""
    since = progress - start_epoch
    if since < 0:
        return 0.0
    return peak * since / ramp_epochs if since < ramp_epochs else peak


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A stretch of epochs that trains the same parameters under one learning-rate curve."""

    name: str
    epochs: int
    learning_rate: float
    decay: Literal["constant", "cosine"] = "cosine"
    warmup_steps: int = 0
    final_learning_rate: float = 0.0
    trains: Literal["head", "all"] = "all"
    """`head`: the linear layer only, over a backbone frozen in eval mode."""

    def __post_init__(self) -> None:
        _at_least(0, epochs=self.epochs, learning_rate=self.learning_rate, warmup_steps=self.warmup_steps)
        _at_least(0, final_learning_rate=self.final_learning_rate)
        if self.decay == "constant" and self.final_learning_rate:
            raise ValueError(f"final_learning_rate: no effect on phase {self.name!r}, whose rate is constant")

    def rate(self, step: int, steps_per_epoch: int) -> float:
        """The learning rate of the phase's own step, counted from the phase's start."""
        return learning_rate(
            step,
            peak=self.learning_rate,
            total_steps=self.epochs * steps_per_epoch,
            warmup_steps=self.warmup_steps,
            final=self.learning_rate if self.decay == "constant" else self.final_learning_rate,
        )


WARMUP = Phase(name="warmup", epochs=5, learning_rate=1e-4, decay="constant", trains="head")
MAIN = Phase(name="main", epochs=25, learning_rate=1e-5)


@dataclass(frozen=True, slots=True)
class Schedule:
    """The phases of a run, one after the other. A phase of no epochs is left out of it."""

    phases: tuple[Phase, ...] = (WARMUP, MAIN)

    def __post_init__(self) -> None:
        if self.epochs < 1:
            raise ValueError(f"schedule: phases {[phase.name for phase in self.phases]} have no epoch")

    @property
    def epochs(self) -> int:
        """Epochs of the whole run."""
        return sum(phase.epochs for phase in self.phases)

    def phase_at(self, epoch: int) -> Phase:
        """The phase an epoch belongs to."""
        return self._locate(epoch)[0]

    def phase_start(self, epoch: int) -> int:
        """The first epoch of an epoch's phase: the time to freeze, unfreeze and wrap the model anew."""
        return self._locate(epoch)[1]

    def learning_rate(self, step: int, steps_per_epoch: int) -> float:
        """The learning rate of a step of the run; schedulers also ask for the step after its end."""
        phase, first_epoch = self._locate(min(step // steps_per_epoch, self.epochs - 1))
        return phase.rate(step - first_epoch * steps_per_epoch, steps_per_epoch)

    def _locate(self, epoch: int) -> tuple[Phase, int]:
        """The phase of an epoch and that phase's first epoch."""
        first = 0
        for phase in self.phases:
            if first <= epoch < first + phase.epochs:
                return phase, first
            first += phase.epochs
        raise ValueError(f"epoch: found {epoch}, expected 0 to {self.epochs - 1}")
