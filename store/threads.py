"""Threads: waiting for another one with a regular check whether it failed, and passes over many shards."""

import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

logger = logging.getLogger(__name__)

Item = TypeVar("Item")
Result = TypeVar("Result")
Check = Callable[[], None]
"""Raises when there is no point in waiting on: the other side failed, or was told to stop."""
OnStart = Callable[[], object]
"""Called by a thread before its work."""
POLL_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 5.0
WARN_SECONDS = 30.0
# Reading, checksums and most of numpy release the GIL. Each thread holds up to two shards in RAM.
PASS_THREADS = min(4, os.cpu_count() or 1)


def nothing() -> None:
    """Do nothing: there is nothing to wait for, and nothing wrong."""


class BoundedQueue(Generic[Item]):
    """A queue of bounded length between two threads, ended by its writer."""

    # Two queues in C, one of them for the free places: an exception that a signal raises in the middle of a
    # wait leaves no lock behind, as it can in queue.Queue, where the other thread would then wait for ever.

    def __init__(self, depth: int) -> None:
        self._items: queue.SimpleQueue[Item | None] = queue.SimpleQueue()
        self._room: queue.SimpleQueue[None] = queue.SimpleQueue()
        for _ in range(depth):
            self._room.put(None)

    def put(self, item: Item, check: Check) -> None:
        take(self._room, check)
        self._items.put(item)

    def get(self, check: Check) -> Item | None:
        """The next item, or None when the channel was ended."""
        item = take(self._items, check)
        self._room.put(None)
        return item

    def end(self) -> None:
        """Tell the reader that nothing follows. Never waits."""
        self._items.put(None)


def take(source: "queue.SimpleQueue[Item]", check: Check) -> Item:
    """The next item; raises what `check` raises while it waits."""
    while True:
        check()
        try:
            return source.get(timeout=POLL_SECONDS)
        except queue.Empty:
            continue


def result_of(future: "Future[Item]", check: Check) -> Item:
    """The result of the future; raises what `check` raises while it waits."""
    while True:
        try:
            return future.result(timeout=POLL_SECONDS)
        except TimeoutError:
            if future.done():
                return future.result()  # its own TimeoutError, or the result that came just now
            check()


def pauses(seconds: float, check: Check) -> Iterator[None]:
    """Yield after pauses that grow, for so many seconds in all; `check` raises to end that."""
    deadline, pause = time.monotonic() + seconds, POLL_SECONDS
    while (left := deadline - time.monotonic()) > 0:
        check()
        time.sleep(min(pause, left))
        pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
        yield


def join(thread: threading.Thread, what: str) -> None:
    """Return when the thread has ended; log what is waited for while that takes long."""
    started = warned = time.monotonic()
    while thread.is_alive():
        thread.join(POLL_SECONDS)
        if time.monotonic() - warned > WARN_SECONDS:
            warned = time.monotonic()
            logger.warning("waiting for %s since %.0f s", what, warned - started)


def in_order(
    work: Callable[[Item], Result], items: Iterable[Item], threads: int = PASS_THREADS
) -> Iterator[Result]:
    """Yield `work(item)` of each item in its order, computed by threads a few items ahead of the caller.

    At most `2 * threads` results exist at a time. The first error is raised in place of its result; what had
    not started by then, or when the caller stops early, is never started.
    """
    pool = ThreadPoolExecutor(threads, thread_name_prefix="pass")
    waiting: deque[Future[Result]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(work, item))
            if len(waiting) >= 2 * threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
