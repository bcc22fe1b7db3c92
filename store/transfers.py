"""Rows between shards and the step: a thread reads ahead of it, another one writes behind it."""

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from bigscl.store.format.spec import Rows
from bigscl.store.shard_cache import Allocate, ShardCache
from bigscl.store.threads import BoundedQueue, OnStart, join, nothing, take

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


# Writing behind: a thread puts updated rows into their shards while the step trains


class Writeback(AbstractContextManager["Writeback"]):
    """Takes updated rows from the step and scatters them into their shards, in order. One thread.

    At most `depth` updates wait; then `put` waits, and counts the seconds in `wait_seconds`.
    """

    # Invariant: written <= scattered <= put. drain() returns when all three are equal.

    def __init__(self, cache: ShardCache, *, depth: int = 4, on_start: OnStart = nothing) -> None:
        """Start the thread, which calls `on_start` first: to choose the GPU that it waits for."""
        self.wait_seconds = 0.0
        self._cache = cache
        self._actions: BoundedQueue[Callable[[], object]] = BoundedQueue(depth)
        self._actions.put(on_start, nothing)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="store-writeback", daemon=True)
        self._thread.start()

    def put(self, ids: NDArray[np.int64], update: Rows, *, ready: Callable[[], object] = nothing) -> None:
        """Hand new values back. `ready` blocks until they are valid, like the synchronize of a CUDA event."""

        def scatter() -> None:
            ready()
            self._cache.scatter(ids, update)

        self._enqueue(scatter)

    def skip(self, ids: NDArray[np.int64]) -> None:
        if len(ids):
            self._enqueue(lambda: self._cache.skip(ids))

    def _enqueue(self, action: Callable[[], object]) -> None:
        asked = time.perf_counter()
        self._actions.put(action, self._check)
        self.wait_seconds += time.perf_counter() - asked

    def _check(self) -> None:
        self._cache.check()
        if not self._thread.is_alive():
            raise RuntimeError("writeback: its thread has ended; open a new one to write more.")

    def drain(self) -> None:
        """Return when everything put so far is written, or raise what went wrong."""
        scattered: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._actions.put(lambda: scattered.put(None), self._check)
        take(scattered, self._check)
        self._cache.check()
        self._cache.flush()

    def _run(self) -> None:
        failed = False
        while (action := self._actions.get(nothing)) is not None:
            try:
                # After a failure the remaining actions are dropped, so that `put` does not wait for ever.
                if not failed and not self._closed.is_set():
                    action()
            except BaseException as error:
                failed = True
                self._cache.fail(error)

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the thread; what was not drained is lost."""
        self._closed.set()
        self._actions.end()
        join(self._thread, "the current update (writeback)")
