"""The ranks of a run as one group on the host: bytes and small sums, whatever backend moves the tensors."""

import time
from collections.abc import Sequence
from typing import Protocol, cast

import torch
import torch.distributed as dist

from bigscl import store
from bigscl.store import Transport


class Ranks(Transport, Protocol):
    """A transport that can also add numbers up."""

    wait_seconds: float
    """How long this rank has waited for the others to join in a sum."""

    def sum(self, values: Sequence[float]) -> list[float]:
        """Each number summed over the ranks, on every rank."""
        ...


class GlooTransport:
    """All ranks of the initialised process group, over a gloo group of its own: nothing touches the GPU."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        # None is the default group.
        group = None if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")
        self._group = cast(dist.ProcessGroup | None, group)
        self.wait_seconds = 0.0

    def gather(self, payload: bytes) -> list[bytes] | None:
        """Everyone's payload in rank order on rank 0, None elsewhere."""
        payloads: list[bytes] | None = [b""] * self.world_size if self.rank == 0 else None
        dist.gather_object(payload, payloads, dst=0, group=self._group)
        return payloads

    def broadcast(self, payload: bytes | None) -> bytes:
        """Rank 0's payload, on every rank."""
        box = [payload]
        dist.broadcast_object_list(box, src=0, group=self._group)
        assert box[0] is not None
        return box[0]

    def sum(self, values: Sequence[float]) -> list[float]:
        """Each number summed over the ranks, on every rank."""
        # float64 holds every count exactly.
        totals = torch.tensor(values, dtype=torch.float64)
        asked = time.perf_counter()
        dist.all_reduce(totals, group=self._group)
        self.wait_seconds += time.perf_counter() - asked
        return cast(list[float], totals.tolist())


class SingleProcess(store.SingleProcess):
    """The group of one process."""

    wait_seconds = 0.0

    def sum(self, values: Sequence[float]) -> list[float]:
        """The numbers themselves."""
        return list(values)


def transport() -> Ranks:
    """The group this process belongs to: all ranks of torch.distributed, or this process alone."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return GlooTransport()
    return SingleProcess()
