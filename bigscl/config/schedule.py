"""Learning rate and phase of a run, and the steps of an epoch, as pure functions.

Progress is counted in epochs from the start of the run, as a fraction: 2.5 is halfway through the third.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from bigscl.common.bounds import CountOrZero, NonNegative, Positive
from bigscl.common.user_error import UserError
from bigscl.data.epoch_plan import Plan, training_plan

if TYPE_CHECKING:
    from bigscl.config import Config


Decay = Literal["constant", "cosine"]


def learning_rate(
    step: int, *, peak: float, total_steps: int, warmup_steps: int = 0, final: float = 0.0
) -> float:
    """Return the rate of a step: a line up to `peak` over `warmup_steps`, then half a cosine to `final`.

    Step `warmup_steps` has the peak; the first step is never 0, and step `total_steps` would have `final`.
    """
    if step < warmup_steps:
        return peak * (step + 1) / (warmup_steps + 1)
    progress = min((step - warmup_steps) / max(total_steps - warmup_steps, 1), 1.0)
    rate = final + (peak - final) * 0.5 * (1 + math.cos(math.pi * progress))
    # A rounding error must not lift the first rate above the peak.
    return min(max(rate, min(peak, final)), max(peak, final))


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """Consecutive epochs that train the same parameters under one learning-rate curve."""

    epochs: CountOrZero
    """Number of epochs; 0 leaves the phase out."""
    learning_rate: Positive
    """Peak of the learning rate."""
    decay: Decay = "cosine"
    """The curve after `warmup_steps`."""
    warmup_steps: CountOrZero = 0
    """Steps over which the learning rate rises from 0 to its peak."""
    final_learning_rate: NonNegative = 0.0
    """Learning rate at the end of the cosine."""

    def rate(self, step: int, steps_per_epoch: int) -> float:
        """Return the learning rate of a step, counted from the start of the phase."""
        return learning_rate(
            step,
            peak=self.learning_rate,
            total_steps=self.epochs * steps_per_epoch,
            warmup_steps=self.warmup_steps,
            final=self.learning_rate if self.decay == "constant" else self.final_learning_rate,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Warmup(Phase):
    """The phase of the linear head; `epochs: 0` is enough to leave it out."""

    epochs: CountOrZero = 5
    learning_rate: Positive = 1e-4
    decay: Decay = "constant"


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Warm-up of the linear head over a frozen backbone, then the whole network."""

    warmup: Warmup = Warmup()
    """Trains the linear head only; the backbone is frozen in eval mode."""
    main: Phase = Phase(epochs=25, learning_rate=1e-5)
    """Trains the whole network."""

    @property
    def epochs(self) -> int:
        return self.warmup.epochs + self.main.epochs

    def phase_start(self, epoch: int) -> int:
        return 0 if self.is_warmup(epoch) else self.warmup.epochs

    def is_warmup(self, epoch: int) -> bool:
        if not 0 <= epoch < self.epochs:
            raise UserError(f"epoch: found {epoch}, expected 0 to {self.epochs - 1}")
        return epoch < self.warmup.epochs

    def learning_rate(self, step: int, steps_per_epoch: int) -> float:
        """Return the learning rate of a step of the run; schedulers also ask for the step after its end."""
        epoch = min(step // steps_per_epoch, self.epochs - 1)
        phase = self.warmup if self.is_warmup(epoch) else self.main
        return phase.rate(step - self.phase_start(epoch) * steps_per_epoch, steps_per_epoch)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EpochPlan:
    """A whole epoch, and what is left of it if the run was resumed within it."""

    whole: Plan
    remaining: Plan
    accumulate: int
    """Batches of each rank in an optimizer step."""

    @property
    def num_steps(self) -> int:
        return -(-self.whole.num_steps // self.accumulate)

    @property
    def first_step(self) -> int:
        """The place of the first remaining step among them."""
        return self.num_steps - -(-self.remaining.num_steps // self.accumulate)

    def num_batches(self, place: int) -> int:
        """Return how many batches the ranks with the most of them have in a step, by its place."""
        done = (place - self.first_step) * self.accumulate
        return min(self.accumulate, self.remaining.num_steps - done)


def plan_epoch(
    config: "Config",
    shard_sizes: NDArray[np.int64],
    rows_per_shard: int,
    *,
    epoch: int,
    world_size: int,
    visited: NDArray[np.bool_] | None = None,
) -> EpochPlan:
    """Return the plan of an epoch that has had the visited rows already."""
    settings: dict[str, Any] = {
        "seed": config.seed,
        "epoch": epoch,
        "batch_size": config.data.batch_size,
        "world_size": world_size,
        "workers": config.data.workers,
        "shuffle_buffer": config.data.shuffle_buffer,
    }
    whole = remaining = training_plan(shard_sizes, rows_per_shard, **settings)
    if visited is not None and visited.any():
        remaining = training_plan(shard_sizes, rows_per_shard, **settings, visited=visited)
    return EpochPlan(whole=whole, remaining=remaining, accumulate=config.optimizer.accumulate)
