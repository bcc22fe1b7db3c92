"""EPR and ROLE (Cole et al. 2021): the number of predicted positives is regularised. No torch import."""

# Shapes: B batch, L classes, N samples; f is sigmoid(logits).

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from bigscl.losses.cross_entropy import at_least_float32, bce, negatives, positives, probabilities
from bigscl.losses.registry import GlobalBatch, LossInputs, base_loss
from bigscl.losses.state import SampleRows, TrainedBatch, check_bytes

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from bigscl.store import Annotations
else:
    from bigscl.common import torch_later as torch

# As published: given positives start at 0.995, the rest between 0.4 and 0.6; ten times the network's rate.
GIVEN, LOW, HIGH = 0.995, 0.4, 0.6
RATE_FACTOR = 10.0
BETAS, EPSILON = (0.9, 0.999), 1e-8


def epr(
    logits: Tensor, labels: Tensor, positives_per_image: float, mean_counts: tuple[Tensor, ...] = ()
) -> Tensor:
    """Expected positive regularisation (Cole et al. 2021): `bce`, and ((mean of sum f) - K)^2 / L^2.

    That mean is over the batch. `mean_counts` has the mean of `predicted_count` over the *global* batch,
    reduced over ranks (it carries no gradient); without it these samples are the whole batch. The mean of the
    values over the global batch, and its gradient, are exact however ranks share the batch.
    """
    return bce(logits, labels) + _count_penalty(logits, positives_per_image, *mean_counts)


def role(
    logits: Tensor,
    estimates: Tensor,
    labels: Tensor,
    positives_per_image: float,
    mean_counts: tuple[Tensor, ...] = (),
) -> Tensor:
    """Regularised online label estimation (Cole et al. 2021), half for the network, half for the estimator.

    `estimates` [B,L] are the label estimator's logits for these samples. Each side's loss is `epr` plus the
    cross-entropy with the other side's probabilities, which carry no gradient. `mean_counts`: as in `epr`, of
    the network and of the estimator.
    """
    k, of_network, of_estimator = positives_per_image, mean_counts[:1], mean_counts[1:]
    network = epr(logits, labels, k, of_network) + _agreement(logits, estimates)
    estimator = epr(estimates, labels, k, of_estimator) + _agreement(estimates, logits)
    return 0.5 * (network + estimator)


def predicted_count(logits: Tensor) -> Tensor:
    """Return the number of positives that is predicted for each sample: the sum of f."""
    return probabilities(logits).sum(1)


def _agreement(logits: Tensor, others: Tensor) -> Tensor:
    """Cross-entropy with the probabilities of other logits, which carry no gradient."""
    others = at_least_float32(others).detach()
    return positives(logits, others.sigmoid()) + negatives(logits, (-others).sigmoid())


def _count_penalty(logits: Tensor, positives_per_image: float, mean_count: Tensor | None = None) -> Tensor:
    """The squared error of the batch's mean count over L^2, for each sample, with that sample's gradient.

    With m the mean count of B samples and c one sample's, d(m - K)^2/dc = 2 (m - K) / B. So each sample's
    value is (m - K)^2 and its gradient that of 2 (m - K) c: their means are the penalty and its gradient.
    """
    count = predicted_count(logits)
    mean = (count.mean() if mean_count is None else mean_count).detach()
    error = mean - positives_per_image
    return (error.square() + 2 * error * (count - count.detach())) / logits.shape[1] ** 2


def _mean_count(inputs: LossInputs | None, batch: GlobalBatch, _: None) -> dict[str, Any]:
    return _mean_counts([None] if inputs is None else [inputs.logits], batch)


def _both_mean_counts(inputs: LossInputs | None, batch: GlobalBatch, _: None) -> dict[str, Any]:
    return _mean_counts([None, None] if inputs is None else [inputs.logits, inputs.estimates], batch)


def _mean_counts(counted: list[Tensor | None], batch: GlobalBatch) -> dict[str, Any]:
    zero = torch.zeros((), device=batch.device)
    sums = [zero if logits is None else predicted_count(logits.detach()).sum() for logits in counted]
    return {"mean_counts": tuple(batch.sum(torch.stack(sums)) / max(batch.num_samples, 1))}


class LabelEstimator(SampleRows):
    """Label logits of every sample, trained together with the network, and the state of Adam for each row."""

    file = "estimator.pt"

    def __init__(self, annotations: Annotations, seed: int) -> None:
        rows, classes = len(annotations.given), annotations.num_classes
        sum_of = f"3 x 4 bytes for each of {rows:,} images x {classes:,} classes"
        check_bytes("role", 3 * 4 * rows * classes, sum_of)
        generator = torch.Generator().manual_seed(seed)
        start = LOW + (HIGH - LOW) * torch.rand(rows, classes, generator=generator)
        owners = np.repeat(np.arange(rows), annotations.given.lengths)
        start[torch.from_numpy(owners), torch.from_numpy(annotations.given.values)] = GIVEN
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
        return self.tables["logits"]

    def inputs(self, ids: Tensor, epoch: int, device: torch.device) -> dict[str, Tensor]:
        return {"estimates": self.of(ids, device)}

    def of(self, ids: Tensor, device: torch.device) -> Tensor:
        """Return the logits [B,L] of some samples, as a leaf that collects their gradient."""
        return self.rows_of("logits", ids, device).requires_grad_()

    def update(self, trained: TrainedBatch) -> None:
        """Step along the gradient of the estimates, one call later."""
        estimates = trained.inputs.estimates
        assert estimates is not None
        assert estimates.grad is not None
        gradient = (estimates.grad / trained.gradient_factor()).float()
        copies, ready = trained.copy_to_host({"gradient": gradient})
        self.step(trained.ids, copies["gradient"], trained.rate, ready)

    def step(
        self, ids: Tensor, gradient: Tensor, learning_rate: float, ready: Callable[[], object] = lambda: None
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


base_loss("epr", epr, statistics=_mean_count)
base_loss(
    "role", role, statistics=_both_mean_counts, state=lambda run: LabelEstimator(run.annotations, run.seed)
)
