"""The memory of a run whose objective needs none: it remembers nothing, and takes no time."""

import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from torch import Tensor

from bigscl.memory.lookup import Ids, MemoryBatch

Batch = TypeVar("Batch")


class NoMemory:
    """Has what the trainer uses of a memory, without a store."""

    store = None
    snapshot = None
    keeps_heatmaps = False

    def __init__(self) -> None:
        self._data_seconds = 0.0

    def prefetch(self, batches: Iterable[Batch]) -> Iterator[tuple[Batch, None]]:
        """Yield each batch; nothing is remembered of it."""
        self._data_seconds, asked = 0.0, time.perf_counter()
        for batch in batches:
            self._data_seconds += time.perf_counter() - asked
            yield batch, None
            asked = time.perf_counter()

    def update(self, stored: MemoryBatch, *, logits: Tensor, maps: Tensor | None = None) -> None:
        """Do nothing."""

    def skip(self, ids: Ids) -> None:
        """Do nothing."""

    def flush(self) -> None:
        """Do nothing."""

    @property
    def waits(self) -> dict[str, float]:
        """Seconds that the step waited in this epoch, by what it waited for."""
        return {"wait_data": self._data_seconds}

    def end_epoch(self, *, step: int = 0, score_log: object = None) -> None:
        """Do nothing."""

    def commit(self, *, step: int = 0) -> None:
        """Do nothing."""

    def drop_snapshots(self, keep: set[int]) -> None:
        """Do nothing."""

    def check_lease(self) -> None:
        """Do nothing: without a store no other process can take it."""

    def close(self) -> None:
        """Do nothing."""
