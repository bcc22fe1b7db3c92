"""The plan of an epoch, made once: which samples each rank trains on, in which step."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bigscl.config import Config
from bigscl.data.plan import Plan, training_plan


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EpochPlan:
    """A whole epoch, and what is left of it if the run was resumed within it."""

    whole: Plan
    remaining: Plan
    accumulate: int
    """Batches of each rank in an optimizer step."""

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the whole epoch."""
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
    config: Config,
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
