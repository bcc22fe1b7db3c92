"""Communication between ranks: any object that gathers, broadcasts and exchanges bytes, and sums counts."""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from bigscl.store.errors import StoreError


class Transport(Protocol):
    """A group of ranks. Every rank must make the same calls in the same order."""

    rank: int
    world_size: int

    def gather(self, payload: bytes) -> list[bytes] | None:
        """Everyone's payload in rank order on rank 0, None elsewhere."""
        ...

    def broadcast(self, payload: bytes | None) -> bytes:
        """Rank 0's payload, on every rank; the others pass None."""
        ...

    def sum_counts(self, counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """The sum of the ranks' arrays, which have the same shape, on every rank."""
        ...

    def exchange(self, payloads: Sequence[bytes]) -> list[bytes]:
        """Send each rank its payload, in rank order; the payloads for this rank, in rank order."""
        ...


class SingleProcess:
    """The group of one process."""

    rank = 0
    world_size = 1

    def gather(self, payload: bytes) -> list[bytes] | None:
        return [payload]

    def broadcast(self, payload: bytes | None) -> bytes:
        assert payload is not None
        return payload

    def sum_counts(self, counts: NDArray[np.int64]) -> NDArray[np.int64]:
        return counts

    def exchange(self, payloads: Sequence[bytes]) -> list[bytes]:
        return list(payloads)


def on_rank_zero(transport: Transport, action: Callable[[], bytes | None]) -> bytes:
    """The result of the action on rank 0, on every rank; its failure is raised on every rank too."""
    if transport.rank == 0:
        try:
            answer = b"+" + (action() or b"")
        except Exception as error:
            transport.broadcast(b"-" + str(error).encode())
            raise
        return transport.broadcast(answer)[1:]
    answer = transport.broadcast(None)
    if answer[:1] == b"-":
        raise StoreError(f"rank 0 failed: {answer[1:].decode()}")
    return answer[1:]
