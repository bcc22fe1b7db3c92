"""ROLE's label estimator: estimated labels of every training image, trained together with the network."""

import io
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from bigscl.processes.ranks import Ranks
from bigscl.store import Annotations
from bigscl.user_error import UserError

# As published: observed positives start at 0.995, the rest between 0.4 and 0.6; ten times the network's rate.
OBSERVED, LOW, HIGH = 0.995, 0.4, 0.6
RATE_FACTOR = 10.0
BETAS, EPSILON = (0.9, 0.999), 1e-8
MAX_BYTES = 8 * 2**30


class LabelEstimator:
    """Label logits of every sample, and the state of Adam for each row.

    A rank updates the rows of the samples it trains; `share` brings all ranks to the same state.
    """

    # Invariant: `_pending` is the last update, whose gradient may still be on its way from the GPU. It is
    # made before the next one. Until then its rows are not asked for: an epoch has each sample once, and
    # `share` and `state` make it first.

    def __init__(self, observed: Annotations, seed: int) -> None:
        rows, classes = len(observed.offsets) - 1, observed.num_classes
        needed = 3 * 4 * rows * classes
        if needed > MAX_BYTES:
            raise UserError(
                f"objective.base: role keeps 3 x 4 bytes for each of {rows:,} images x {classes:,} classes = "
                f"{needed / 2**30:.1f} GB in every process, more than {MAX_BYTES / 2**30:.0f} GB. "
                f"Use en, which needs no memory in addition to the store."
            )
        generator = torch.Generator().manual_seed(seed)
        start = LOW + (HIGH - LOW) * torch.rand(rows, classes, generator=generator)
        owners = np.repeat(np.arange(rows), np.diff(observed.offsets))
        start[torch.from_numpy(owners), torch.from_numpy(observed.classes)] = OBSERVED
        self.logits = torch.logit(start)
        self._mean = torch.zeros_like(self.logits)
        self._square = torch.zeros_like(self.logits)
        self._steps = torch.zeros(rows, dtype=torch.int64)
        self._updated: set[int] = set()
        self._pending: Callable[[], None] | None = None

    def of(self, ids: Tensor, device: torch.device) -> Tensor:
        """Return the logits [B,L] of some samples, as a leaf that collects their gradient."""
        rows = torch.empty((len(ids), self.logits.shape[1]), pin_memory=device.type == "cuda")
        torch.index_select(self.logits, 0, ids, out=rows)
        return rows.to(device, non_blocking=True).requires_grad_()

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
        self._finish()

        def update() -> None:
            ready()
            self._update(ids, gradient, learning_rate)

        self._pending = update

    def _finish(self) -> None:
        if self._pending is not None:
            self._pending()
            self._pending = None

    def _update(self, rows: Tensor, slope: Tensor, learning_rate: float) -> None:
        self._steps[rows] += 1
        count = self._steps[rows][:, None]
        self._mean[rows] = BETAS[0] * self._mean[rows] + (1 - BETAS[0]) * slope
        self._square[rows] = BETAS[1] * self._square[rows] + (1 - BETAS[1]) * slope.square()
        mean = self._mean[rows] / (1 - BETAS[0] ** count)
        square = self._square[rows] / (1 - BETAS[1] ** count)
        self.logits[rows] -= RATE_FACTOR * learning_rate * mean / (square.sqrt() + EPSILON)
        self._updated.update(rows.tolist())

    def share(self, ranks: Ranks) -> None:
        """Send the rows that each rank has updated to all ranks; all ranks call it together."""
        self._finish()
        rows = torch.tensor(sorted(self._updated), dtype=torch.int64)
        parts = ranks.gather(_packed([rows, *(table[rows] for table in self._tables())]))
        merged = None
        if parts is not None:
            merged = _packed([torch.cat(each) for each in zip(*map(_unpacked, parts), strict=True)])
        rows, *values = _unpacked(ranks.broadcast(merged))
        for table, value in zip(self._tables(), values, strict=True):
            table[rows] = value
        self._updated.clear()

    def state(self) -> dict[str, Tensor]:
        """Return everything that a checkpoint must keep."""
        self._finish()
        names = ("logits", "mean", "square", "steps")
        return dict(zip(names, self._tables(), strict=True))

    def load(self, state: dict[str, Tensor]) -> None:
        """Load what `state` returned."""
        self.logits, self._mean, self._square = state["logits"], state["mean"], state["square"]
        self._steps = state["steps"]

    def _tables(self) -> tuple[Tensor, ...]:
        return self.logits, self._mean, self._square, self._steps


def _packed(tensors: Sequence[Tensor]) -> bytes:
    buffer = io.BytesIO()
    torch.save(list(tensors), buffer)
    return buffer.getvalue()


def _unpacked(payload: bytes) -> list[Tensor]:
    tensors: list[Tensor] = torch.load(io.BytesIO(payload), weights_only=True)
    return tensors
