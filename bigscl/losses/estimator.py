"""ROLE's label estimator: estimated labels of every training image, trained together with the network."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from bigscl.losses.sample_rows import SampleRows, check_bytes
from bigscl.store import Annotations

# As published: observed positives start at 0.995, the rest between 0.4 and 0.6; ten times the network's rate.
OBSERVED, LOW, HIGH = 0.995, 0.4, 0.6
RATE_FACTOR = 10.0
BETAS, EPSILON = (0.9, 0.999), 1e-8


class LabelEstimator(SampleRows):
    """Label logits of every sample, and the state of Adam for each row."""

    def __init__(self, observed: Annotations, seed: int) -> None:
        rows, classes = len(observed.offsets) - 1, observed.num_classes
        sum_of = f"3 x 4 bytes for each of {rows:,} images x {classes:,} classes"
        check_bytes("role", 3 * 4 * rows * classes, sum_of)
        generator = torch.Generator().manual_seed(seed)
        start = LOW + (HIGH - LOW) * torch.rand(rows, classes, generator=generator)
        owners = np.repeat(np.arange(rows), np.diff(observed.offsets))
        start[torch.from_numpy(owners), torch.from_numpy(observed.classes)] = OBSERVED
        logits = torch.logit(start)
        super().__init__(
            {
                "logits": logits,
                "mean": torch.zeros_like(logits),
                "square": torch.zeros_like(logits),
                "steps": torch.zeros(rows, dtype=torch.int64),
            }
        )

    @property
    def logits(self) -> Tensor:
        """The label logits [N,L]."""
        return self.tables["logits"]

    def of(self, ids: Tensor, device: torch.device) -> Tensor:
        """Return the logits [B,L] of some samples, as a leaf that collects their gradient."""
        return self.rows_of("logits", ids, device).requires_grad_()

    def step(
        self,
        ids: Tensor,
        gradient: Tensor,
        learning_rate: float,
        ready: Callable[[], object] = lambda: None,
    ) -> None:
        """Update these samples' rows by one step of Adam, by a gradient that is valid once `ready` returns.

        Ids and gradient are on the host. The update is made with the next call, so as not to wait here.
        """
        self.update_later(ids, ready, lambda: self._update(ids, gradient, learning_rate))

    def _update(self, rows: Tensor, slope: Tensor, learning_rate: float) -> None:
        logits, means, squares, steps = self.tables.values()
        steps[rows] += 1
        count = steps[rows][:, None]
        means[rows] = BETAS[0] * means[rows] + (1 - BETAS[0]) * slope
        squares[rows] = BETAS[1] * squares[rows] + (1 - BETAS[1]) * slope.square()
        mean = means[rows] / (1 - BETAS[0] ** count)
        square = squares[rows] / (1 - BETAS[1] ** count)
        logits[rows] -= RATE_FACTOR * learning_rate * mean / (square.sqrt() + EPSILON)
