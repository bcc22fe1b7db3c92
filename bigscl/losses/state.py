"""State of a loss from step to step, beside the memory; tables with a row for each image. No torch import."""

# Shapes: B batch, L classes.

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from bigscl.common.user_error import UserError
from bigscl.losses.registry import LossInputs

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from bigscl.distributed.ranks import Ranks
    from bigscl.store import Annotations
else:
    from bigscl.common import torch_later as torch

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
        table = self.tables[name]
        shape = (len(ids), *table.shape[1:])
        rows = torch.empty(shape, dtype=table.dtype, pin_memory=device.type == "cuda")
        torch.index_select(table, 0, ids, out=rows)
        return rows.to(device, non_blocking=True)

    def update_later(self, ids: Tensor, ready: Callable[[], object], update: Callable[[], None]) -> None:
        """Update the rows of some samples with the next call, by values that `ready` waits for."""
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
        self._finish()
        return dict(self.tables)

    def load(self, state: Mapping[str, Tensor]) -> None:
        self.tables = {name: state[name] for name in self.tables}


def check_bytes(base: str, needed: int, sum_of: str) -> None:
    """Refuse tables that do not fit into the memory of a process; `sum_of` says how they are made up."""
    if needed > MAX_BYTES:
        raise UserError(
            f"objective.base: {base} keeps {sum_of} = {needed / 2**30:.1f} GB in every process, more than "
            f"{MAX_BYTES / 2**30:.0f} GB. Use en, which needs no memory in addition to the store."
        )


def _packed(tensors: Sequence[Tensor]) -> bytes:
    buffer = io.BytesIO()
    torch.save(list(tensors), buffer)
    return buffer.getvalue()


def _unpacked(payload: bytes) -> list[Tensor]:
    tensors: list[Tensor] = torch.load(io.BytesIO(payload), weights_only=True)
    return tensors
