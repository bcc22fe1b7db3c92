"""The memory of one epoch: batches come with what is remembered of them, and give back what was learnt."""

import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from types import TracebackType
from typing import Self

import numpy as np
import torch
from torch import Tensor

from bigscl.config import StoreConfig
from bigscl.data.batch import Batch
from bigscl.store import HeatmapStore, Prefetcher, Rows, ShardCache, Update, Writeback
from bigscl.training.transfer import allocate_pinned, to_host


class EpochMemory:
    """Prefetch and writeback of one epoch. Without a store, batches come alone."""

    def __init__(
        self, store: HeatmapStore | None, epoch: int, config: StoreConfig, device: torch.device
    ) -> None:
        self._stack = ExitStack()
        self._store = store
        self._data_seconds = 0.0
        if store is None:
            return
        limit = None if config.resident_gb is None else int(config.resident_gb * 2**30)
        allocate = allocate_pinned if device.type == "cuda" else np.empty
        # Closed in reverse: first nothing new comes in, then nothing more goes out, then the shards go.
        self.cache = self._stack.enter_context(
            ShardCache(store, epoch, limit_bytes=limit, io_threads=config.io_threads)
        )
        self._writeback = self._stack.enter_context(Writeback(self.cache, depth=config.writeback_batches))
        self._prefetcher = self._stack.enter_context(
            Prefetcher(self.cache, depth=config.prefetch_batches, allocate=allocate)
        )

    def pair(self, batches: Iterable[Batch]) -> Iterator[tuple[Batch, Rows | None]]:
        """Each batch with the rows of its samples."""
        if self._store is not None:
            yield from self._prefetcher.pair(batches, lambda batch: batch.ids.numpy())
            return
        asked = time.perf_counter()
        for batch in batches:
            self._data_seconds += time.perf_counter() - asked
            yield batch, None
            asked = time.perf_counter()

    def put(self, batch: Batch, updates: dict[str, Tensor]) -> None:
        """Take back the rows of a batch; its samples that could not be read keep theirs."""
        if self._store is None:
            return
        if len(batch):
            arrays, ready = to_host(updates)
            self._writeback.put(batch.ids.numpy(), Update(**arrays), ready=ready)
        self._writeback.skip(batch.skipped.numpy())

    def drain(self) -> None:
        """Return when all rows that were put are written."""
        if self._store is not None:
            self._writeback.drain()

    @property
    def waits(self) -> dict[str, float]:
        """Seconds the step stood still in this epoch, by what it waited for."""
        if self._store is None:
            return {"wait_data": self._data_seconds}
        seen = self._prefetcher.waits
        return {
            "wait_data": seen.data,
            "wait_heatmaps": seen.heatmaps,
            "wait_writeback": self._writeback.wait_seconds,
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
