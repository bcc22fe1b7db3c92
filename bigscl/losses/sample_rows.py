"""Rows that a loss keeps of every training image, on the host: the same on all ranks once they are shared."""

import io
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from bigscl.common.user_error import UserError
from bigscl.distributed.ranks import Ranks

MAX_BYTES = 8 * 2**30


class SampleRows:
    """Tables with a row for each sample, in every process.

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

    def share(self, ranks: Ranks) -> None:
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
    buffer = io.BytesIO()
    torch.save(list(tensors), buffer)
    return buffer.getvalue()


def _unpacked(payload: bytes) -> list[Tensor]:
    tensors: list[Tensor] = torch.load(io.BytesIO(payload), weights_only=True)
    return tensors
