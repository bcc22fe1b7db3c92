"""Passes over many shards: several at a time in threads, results in order, memory bounded."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

# Reading, checksums and most of numpy release the GIL. Each thread holds up to two shards in RAM.
PASS_THREADS = min(4, os.cpu_count() or 1)


def in_order(
    work: Callable[[Item], Result], items: Iterable[Item], threads: int = PASS_THREADS
) -> Iterator[Result]:
    """`work(item)` of each item in its order, computed by threads a few items ahead of the caller.

    At most `2 * threads` results exist at a time. The first error is raised in its place; what had not
    started by then, or when the caller stops early, is never started.
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
