"""How ranks talk when they commit: anything that gathers and broadcasts bytes will do."""

from typing import Protocol


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


class Alone:
    """The group of one process."""

    rank = 0
    world_size = 1

    def gather(self, payload: bytes) -> list[bytes] | None:
        """The only payload."""
        return [payload]

    def broadcast(self, payload: bytes | None) -> bytes:
        """The payload itself."""
        assert payload is not None
        return payload
