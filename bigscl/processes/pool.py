"""Work on many items in processes of their own. Imports no torch."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from typing import TypeVar

from bigscl.errors import explain

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class _Mistake:
    """A mistake of the user's that work in another process found."""

    message: str


def map_in_processes(work: Callable[[T], R], items: Sequence[T], processes: int) -> Iterator[tuple[T, R]]:
    """Yield (item, work(item)) when each is finished; with 0 processes in this process, in order."""
    if processes == 0 or not items:
        yield from ((item, work(item)) for item in items)
        return
    # Not forked: the caller may have threads (a progress bar has).
    with ProcessPoolExecutor(min(processes, len(items)), mp_context=get_context("spawn")) as pool:
        try:
            waiting = {pool.submit(partial(_try, work), item): item for item in items}
            for future in as_completed(waiting):
                result = future.result()
                if isinstance(result, _Mistake):
                    raise ValueError(result.message)
                yield waiting[future], result
        finally:
            pool.shutdown(cancel_futures=True)


def _try(work: Callable[[T], R], item: T) -> R | _Mistake:
    """Return the result. Only this process knows who raised an error: a mistake is told, a bug is raised."""
    try:
        return work(item)
    except ValueError as error:
        told = explain(error) if type(error) is ValueError else None
        if told is None:
            raise
        return _Mistake(told)
