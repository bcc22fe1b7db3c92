"""Writing behind: a thread puts updated rows into their shards while the step trains."""

import queue
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np
from numpy.typing import NDArray

from bigscl.store.epoch.shard_cache import ShardCache
from bigscl.store.epoch.threads import BoundedQueue, OnStart, join, nothing, take
from bigscl.store.format.spec import Rows


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
