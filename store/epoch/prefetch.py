"""Reading ahead: a thread loads the rows of the next batches while the step trains."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from bigscl.store.epoch.shard_cache import Allocate, ShardCache
from bigscl.store.epoch.threads import BoundedQueue, OnStart, join, nothing
from bigscl.store.format.spec import Rows

Batch = TypeVar("Batch")


class _Stop(Exception):
    """The consumer has stopped."""


@dataclass(slots=True)
class Waits:
    """Seconds that the training step waited, by what it waited for."""

    data: float = 0.0
    heatmaps: float = 0.0


@dataclass(frozen=True, slots=True)
class _Item(Generic[Batch]):
    batch: Batch
    rows: Rows
    data_ready: float
    """When the batch itself was there; what came after was waiting for its rows."""


class Prefetcher(AbstractContextManager["Prefetcher"]):
    """Pairs batches with their rows, `depth` batches ahead. One thread; it ends with `close`."""

    def __init__(
        self, cache: ShardCache, *, depth: int = 4, allocate: Allocate = np.empty, on_start: OnStart = nothing
    ) -> None:
        self.waits = Waits()
        self._cache = cache
        self._allocate = allocate
        self._on_start = on_start
        self._items: BoundedQueue[_Item[Any]] = BoundedQueue(depth)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def pair(
        self, batches: Iterable[Batch], ids: Callable[[Batch], NDArray[np.int64]]
    ) -> Iterator[tuple[Batch, Rows]]:
        """Each batch with the rows of its samples, in order."""
        assert self._thread is None, "one prefetcher serves one pass over the batches"
        # Here, not in the thread: loader workers are forked by the thread that asks for the iterator.
        iterator = iter(batches)
        self._thread = threading.Thread(
            target=self._run, args=(iterator, ids), name="store-prefetch", daemon=True
        )
        self._thread.start()
        while True:
            asked = time.perf_counter()
            item = self._next()
            if item is None:
                return
            self._account(asked, item)
            yield item.batch, item.rows

    def _next(self) -> _Item[Any] | None:
        item = self._items.get(self._cache.check)
        self._cache.check()
        return item

    def _account(self, asked: float, item: _Item[Any]) -> None:
        got = time.perf_counter()
        for_data = min(max(item.data_ready - asked, 0.0), got - asked)
        self.waits.data += for_data
        self.waits.heatmaps += got - asked - for_data

    def _run(self, batches: Iterator[Any], ids: Callable[[Any], NDArray[np.int64]]) -> None:
        try:
            self._on_start()
            for batch in batches:
                data_ready = time.perf_counter()
                rows = self._cache.gather(ids(batch), self._allocate)
                self._items.put(_Item(batch, rows, data_ready), self._check_wanted)
            self._items.end()
        except _Stop:
            pass
        except BaseException as error:
            self._cache.fail(error)

    def _check_wanted(self) -> None:
        if self._stop.is_set():
            raise _Stop

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop after the current batch and end the thread."""
        self._stop.set()
        if self._thread is not None:
            join(self._thread, "the current batch (prefetch)")
