"""The threads of a memory in an epoch: rows are read ahead of the step and written behind it."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from bigscl.common.user_error import UserError
from bigscl.config import StoreConfig
from bigscl.memory.device import allocate_pinned, choose_device
from bigscl.memory.lookup import CheckedViews
from bigscl.store import HeatmapStore, Prefetcher, Rows, ShardCache, Writeback

Batch = TypeVar("Batch")
Item = TypeVar("Item")


class EpochThreads:
    """The threads that read rows ahead of the step and write them behind it, for one epoch."""

    def __init__(self, store: HeatmapStore, epoch: int, settings: StoreConfig, device: torch.device) -> None:
        limit = None if settings.resident_gb is None else int(settings.resident_gb * 2**30)
        self._allocate = allocate_pinned if device.type == "cuda" else np.empty
        self._on_start = partial(choose_device, device)
        self._depth = settings.prefetch_batches
        self._prefetchers: list[Prefetcher] = []
        self._read_seconds = 0.0
        self._closed = False
        # Closed in reverse: first nothing new comes in, then nothing more goes out, then the shards go.
        self._stack = ExitStack()
        self._cache = self._stack.enter_context(
            ShardCache(store, epoch, limit_bytes=limit, io_threads=settings.io_threads)
        )
        self.writeback = self._stack.enter_context(
            Writeback(self._cache, depth=settings.writeback_batches, on_start=self._on_start)
        )

    def read(self, ids: NDArray[np.int64]) -> Rows:
        """Return the rows of a batch, now."""
        asked = time.perf_counter()
        self._cache.check()
        rows = self._cache.gather(ids, self._allocate)
        self._read_seconds += time.perf_counter() - asked
        return rows

    def read_ahead(
        self, batches: Iterator[tuple[Batch, CheckedViews] | Exception]
    ) -> Iterator[tuple[tuple[Batch, CheckedViews] | Exception, Rows]]:
        """Yield the batches with their rows, read by a thread; an exception has none."""
        none = np.empty(0, np.int64)
        with Prefetcher(
            self._cache, depth=self._depth, allocate=self._allocate, on_start=self._on_start
        ) as prefetcher:
            self._prefetchers.append(prefetcher)
            pairs = prefetcher.pair(batches, lambda one: none if isinstance(one, Exception) else one[1].rows)
            while (pair := self._next(pairs)) is not None:
                yield pair

    def _next(self, pairs: Iterator[Item]) -> Item | None:
        if self._closed:
            raise UserError("prefetch: the epoch has ended. Call prefetch again for the next one.")
        return next(pairs, None)

    @property
    def waits(self) -> dict[str, float]:
        """Seconds that the step waited, by what it waited for."""
        data = sum(one.waits.data for one in self._prefetchers)
        heatmaps = sum(one.waits.heatmaps for one in self._prefetchers) + self._read_seconds
        written = self.writeback.wait_seconds
        return {"wait_data": data, "wait_heatmaps": heatmaps, "wait_writeback": written}

    def close(self) -> None:
        """End all threads."""
        self._closed = True
        for prefetcher in self._prefetchers:
            prefetcher.close()
        self._stack.close()


def announced(
    batches: Iterator[Batch], sample_views: Callable[[Batch], CheckedViews]
) -> Iterator[tuple[Batch, CheckedViews] | Exception]:
    """Yield each batch with its views; at last the error that ended them, which is not one of the store."""
    try:
        for batch in batches:
            yield batch, sample_views(batch)
    except Exception as error:
        yield error
