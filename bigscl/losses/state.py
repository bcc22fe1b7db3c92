"""State of a loss from step to step, beside the memory, and the two forms that it has. No torch import."""

# Shapes: B batch, L classes, T types of labels (unknown, negative, positive).

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from bigscl.common.user_error import UserError
from bigscl.losses.inputs import LossInputs

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from bigscl.distributed.ranks import Ranks
    from bigscl.store import Annotations

MAX_BYTES = 8 * 2**30


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunFacts:
    """Facts of a run from which the state of its loss is made."""

    settings: Any
    """Settings of the loss."""
    annotations: Annotations
    seed: int
    num_epochs: int
    device: torch.device
    is_first: bool
    """Whether this is the first rank."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainedBatch:
    """A batch after its backward pass."""

    ids: Tensor
    """int64 [B], on the host."""
    inputs: LossInputs
    rate: float
    """The network's learning rate."""
    updated_scores: Callable[[], Tensor]
    """Returns the scores that the memory will have, float16 [B,L]."""
    gradient_factor: Callable[[], float]
    """Returns the factor in gradients that DDP and the scaler divide out. In fp16 the host waits for it."""
    copy_to_host: Callable[[dict[str, Tensor]], tuple[dict[str, Tensor], Callable[[], object]]]
    """Returns copies on the host, and a call that blocks until their values are there."""


class LossState(Protocol):
    """State of a loss. All ranks call `share` together; a checkpoint is saved after it."""

    file: str
    """The file of a checkpoint that holds it."""

    def inputs(self, ids: Tensor, epoch: int, device: torch.device) -> dict[str, Tensor]:
        """Return fields of `LossInputs` for a batch, whose ids are on the host."""
        ...

    def update(self, trained: TrainedBatch) -> None:
        """Update the state by a batch, without waiting for the device."""
        ...

    def share(self, ranks: Ranks, *, ends_epoch: bool) -> None:
        """Bring all ranks to the state that follows from the batches of all."""
        ...

    def state(self) -> dict[str, Tensor]:
        """Return everything that a checkpoint must keep."""
        ...

    def load(self, state: dict[str, Tensor]) -> None:
        """Load what `state` returned."""
        ...


# A row for each training image


class SampleRows:
    """Tables with a row for each sample, on the host, in every process.

    A rank updates the rows of the samples it trains; `share` brings all ranks to the same state.
    """

    # Invariant: `_pending` is the last update, whose values may still be on their way from the GPU. It is
    # made before the next one. Until then its rows are not asked for: an epoch has each sample once, and
    # `share` and `state` make it first.

    def __init__(self, tables: Mapping[str, Tensor]) -> None:
        self.tables = dict(tables)
        self._updated: set[int] = set()
        self._pending: Callable[[], None] | None = None

    def rows_of(self, name: str, ids: Tensor, device: torch.device) -> Tensor:
        """Return the rows of some samples, whose ids are on the host, on the device."""
        import torch

        table = self.tables[name]
        shape = (len(ids), *table.shape[1:])
        rows = torch.empty(shape, dtype=table.dtype, pin_memory=device.type == "cuda")
        torch.index_select(table, 0, ids, out=rows)
        return rows.to(device, non_blocking=True)

    def update_later(self, ids: Tensor, ready: Callable[[], object], update: Callable[[], None]) -> None:
        """Update the rows of some samples with the next call, so as not to wait here.

        `update` uses values on the host that are valid once `ready` returns.
        """
        self._finish()

        def finish() -> None:
            ready()
            update()
            self._updated.update(ids.tolist())

        self._pending = finish

    def _finish(self) -> None:
        if self._pending is not None:
            self._pending()
            self._pending = None

    def share(self, ranks: Ranks, *, ends_epoch: bool = False) -> None:
        """Send the rows that each rank has updated to all ranks; all ranks call it together."""
        import torch

        self._finish()
        rows = torch.tensor(sorted(self._updated), dtype=torch.int64)
        parts = ranks.gather(_packed([rows, *(table[rows] for table in self.tables.values())]))
        merged = None
        if parts is not None:
            merged = _packed([torch.cat(each) for each in zip(*map(_unpacked, parts), strict=True)])
        rows, *values = _unpacked(ranks.broadcast(merged))
        for table, value in zip(self.tables.values(), values, strict=True):
            table[rows] = value
        self._updated.clear()

    def state(self) -> dict[str, Tensor]:
        """Return everything that a checkpoint must keep."""
        self._finish()
        return dict(self.tables)

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Load what `state` returned."""
        self.tables = {name: state[name] for name in self.tables}


def check_bytes(base: str, needed: int, sum_of: str) -> None:
    """Refuse tables that do not fit into the memory of a process; `sum_of` says how they are made up."""
    if needed > MAX_BYTES:
        raise UserError(
            f"objective.base: {base} keeps {sum_of} = {needed / 2**30:.1f} GB in every process, more than "
            f"{MAX_BYTES / 2**30:.0f} GB. Use en, which needs no memory in addition to the store."
        )


def _packed(tensors: Sequence[Tensor]) -> bytes:
    import torch

    buffer = io.BytesIO()
    torch.save(list(tensors), buffer)
    return buffer.getvalue()


def _unpacked(payload: bytes) -> list[Tensor]:
    import torch

    tensors: list[Tensor] = torch.load(io.BytesIO(payload), weights_only=True)
    return tensors


# A histogram for each class

SHIFT = 5
ONE = int(np.float16(1).view(np.uint16))
NUM_BINS = (ONE >> SHIFT) + 1
EDGES: NDArray[np.float16] = (np.arange(NUM_BINS, dtype=np.uint16) << SHIFT).view(np.float16)
"""The lowest value of each bin."""
UNKNOWN, NEGATIVE, POSITIVE = range(3)
Counts = NDArray[np.int64]


class ClassHistograms:
    """Histograms of the values that an epoch gives each class: of this epoch so far, and of the one before.

    Counts are whole numbers, so their sum over ranks is the same for any division of the samples. A bin holds
    32 neighbouring float16 values: above 0.0001 its width is 1/64 to 1/32 of the value.
    """

    # Invariant: the sum of `current` over the ranks is the histogram of all samples of the epoch so far.

    file = "histograms.pt"

    def __init__(self, num_classes: int, device: torch.device, *, is_first: bool = True) -> None:
        import torch

        self._shape = (3, num_classes, NUM_BINS)
        self._is_first = is_first
        self._epoch: int | None = None
        self._inputs: dict[str, Tensor] = {}
        self.current = torch.zeros(self._shape, dtype=torch.int64, device=device)
        """int64 [T,L,bins], on the device."""
        self.complete: Counts = np.zeros(self._shape, np.int64)
        """[T,L,bins] of all ranks, of the epoch before, on the host; 0 before the first epoch has ended."""

    def inputs(self, ids: Tensor, epoch: int, device: torch.device) -> dict[str, Tensor]:
        """Return what the loss takes from the histograms, which is the same in the whole epoch."""
        import torch

        if epoch != self._epoch:
            arrays = self.epoch_inputs(epoch)
            self._inputs = {name: torch.as_tensor(array).to(device) for name, array in arrays.items()}
            self._epoch = epoch
        return self._inputs

    def epoch_inputs(self, epoch: int) -> dict[str, NDArray[Any]]:
        """Return fields of `LossInputs`, from the complete histograms."""
        raise NotImplementedError

    def add(self, values: Tensor, labels: Tensor) -> None:
        """Count values [B,L] in 0 to 1 of labels int8 [B,L]."""
        import torch

        with torch.no_grad():
            bins = values.detach().half().view(torch.int16).long() >> SHIFT
            classes = torch.arange(values.shape[1], device=values.device)
            cells = ((labels.long() + 1) * self._shape[1] + classes) * NUM_BINS + bins
            # In one dimension, where scatter_add_ is deterministic also on GPUs.
            self.current.view(-1).scatter_add_(0, cells.flatten(), torch.ones_like(cells).flatten())

    def share(self, ranks: Ranks, *, ends_epoch: bool) -> None:
        """Give rank 0 the counts of all ranks; at the end of an epoch they are complete, on every rank."""
        import torch

        parts = ranks.gather(self.current.cpu().numpy().tobytes())
        total = None if parts is None else sum(np.frombuffer(part, np.int64) for part in parts)
        self.current.zero_()
        if ends_epoch:
            payload = ranks.broadcast(None if total is None else np.asarray(total).tobytes())
            self.complete = np.frombuffer(payload, np.int64).reshape(self._shape).copy()
        elif total is not None:
            self.current.copy_(torch.from_numpy(np.asarray(total)).view(self._shape))

    def state(self) -> dict[str, Tensor]:
        """Return everything that a checkpoint must keep, on rank 0 after `share`."""
        import torch

        return {"current": self.current.cpu(), "complete": torch.from_numpy(self.complete)}

    def load(self, state: dict[str, Tensor]) -> None:
        """Load what `state` returned; the counts of the epoch so far belong to the first rank."""
        self._epoch = None
        self.complete = state["complete"].numpy().copy()
        self.current.zero_()
        if self._is_first:
            self.current.copy_(state["current"])
