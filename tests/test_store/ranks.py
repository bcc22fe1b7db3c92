"""Helpers for tests of a store: ranks as real processes, without torch."""

import multiprocessing as mp
import pickle
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray


class PipeTransport:
    """Ranks joined by pipes to rank 0."""

    def __init__(self, rank: int, world_size: int, pipes: list[Connection]) -> None:
        self.rank = rank
        self.world_size = world_size
        self._pipes = pipes

    def gather(self, payload: bytes) -> list[bytes] | None:
        """Everyone's payload in rank order on rank 0, None elsewhere."""
        if self.rank:
            self._pipes[0].send_bytes(payload)
            return None
        return [payload, *(pipe.recv_bytes() for pipe in self._pipes)]

    def broadcast(self, payload: bytes | None) -> bytes:
        """Rank 0's payload, on every rank."""
        if self.rank:
            return self._pipes[0].recv_bytes()
        assert payload is not None
        for pipe in self._pipes:
            pipe.send_bytes(payload)
        return payload

    def sum_counts(self, counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """The sum of the ranks' arrays, on every rank."""
        parts = self.gather(counts.tobytes())
        total = None if parts is None else sum(np.frombuffer(part, np.int64) for part in parts)
        summed = self.broadcast(None if total is None else np.asarray(total).tobytes())
        return np.frombuffer(summed, np.int64).reshape(counts.shape)

    def exchange(self, payloads: Sequence[bytes]) -> list[bytes]:
        """Send each rank its payload; return the payloads for this rank."""
        parts = self.gather(pickle.dumps(list(payloads)))
        everything = self.broadcast(None if parts is None else pickle.dumps(parts))
        return [pickle.loads(part)[self.rank] for part in pickle.loads(everything)]


def run_threads(function: Callable[[PipeTransport], Any], world_size: int) -> list[Any]:
    """The results of `function(transport)` on all ranks, which are threads of this process."""
    ends = [mp.Pipe() for _ in range(world_size - 1)]
    transports = [PipeTransport(0, world_size, [ours for ours, _ in ends])]
    transports += [PipeTransport(rank + 1, world_size, [theirs]) for rank, (_, theirs) in enumerate(ends)]
    with ThreadPoolExecutor(world_size) as pool:
        return [each.result(60) for each in [pool.submit(function, one) for one in transports]]


def _run_rank(function: Callable[..., Any], transport: PipeTransport, args: tuple[Any, ...]) -> None:
    try:
        function(transport, *args)
    except BaseException:
        traceback.print_exc()
        raise SystemExit(1) from None


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120) -> list[int]:
    """Exit codes of `function(transport, *args)` in as many new processes as there are ranks."""
    context = mp.get_context("forkserver")
    # The same server as for loader workers, of which a process has one.
    context.set_forkserver_preload(["bigscl.data.loader"])
    ends = [context.Pipe() for _ in range(world_size - 1)]
    transports = [PipeTransport(0, world_size, [ours for ours, _ in ends])]
    transports += [PipeTransport(rank + 1, world_size, [theirs]) for rank, (_, theirs) in enumerate(ends)]
    processes = [context.Process(target=_run_rank, args=(function, each, args)) for each in transports]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout)
        if process.is_alive():
            process.kill()
            process.join()
    return [process.exitcode or 0 for process in processes]
