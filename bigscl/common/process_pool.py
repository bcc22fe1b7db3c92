"""Work on many items in processes of their own. Imports no torch."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import TypeVar

from bigscl.common.url_secrets import environment, receive

T = TypeVar("T")
R = TypeVar("R")


def map_in_processes(work: Callable[[T], R], items: Sequence[T], processes: int) -> Iterator[tuple[T, R]]:
    """Yield (item, work(item)) when each is finished; with 0 processes in this process, in order."""
    if processes == 0 or not items:
        yield from ((item, work(item)) for item in items)
        return
    # Not forked: the caller may have threads (a progress bar has).
    context, secrets = get_context("spawn"), (environment(),)
    with ProcessPoolExecutor(
        min(processes, len(items)), context, initializer=receive, initargs=secrets
    ) as pool:
        try:
            waiting = {pool.submit(work, item): item for item in items}
            for future in as_completed(waiting):
                yield waiting[future], future.result()
        finally:
            pool.shutdown(cancel_futures=True)
