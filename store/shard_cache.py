"""Shards in RAM during an epoch: from the first read of a sample to the last update of one."""

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bigscl.store.format.layout import array_plans, check_update, shard_bytes, split_by_shard
from bigscl.store.format.quantize import as_stored
from bigscl.store.format.spec import Array, Rows
from bigscl.store.heatmap_store import HeatmapStore
from bigscl.store.threads import POLL_SECONDS, join, result_of

Allocate = Callable[[tuple[int, ...], np.dtype[Any]], Array]


class CachedShard:
    """One shard in RAM. Its lock is held while rows are copied in or out, and while it is written."""

    def __init__(self, rows: Rows, remaining: int) -> None:
        self.rows = rows
        self.remaining = remaining
        """Samples that this epoch has not updated yet."""
        self.dirty = False
        self.lock = threading.Lock()


class ShardCache(AbstractContextManager["ShardCache"]):
    """The cached shards of one rank in one epoch.

    A shard is written when its last sample of the epoch is in, when a flush asks for it, or when it has to
    make room: beyond `limit_bytes`, shards with no sample in flight are removed, least recently used first.
    Updates of `borrowed` shards, which another rank writes, are kept for `take_unsent`.
    """

    # Invariant: a shard is removed only when it is clean, not pinned, and none of its samples is in flight.
    # `_lock` guards `_shards`, `_pins` and `_in_flight`, and is never held while anything is read or written.

    def __init__(
        self,
        store: HeatmapStore,
        epoch: int,
        *,
        limit_bytes: int | None = None,
        io_threads: int = 2,
        borrowed: Collection[int] = (),
    ) -> None:
        self.store = store
        self.epoch = epoch
        self.peak_shards = 0
        self.shard_bytes = shard_bytes(store.spec, store.group)
        self._plans = array_plans(store.spec, store.group)
        self._limit_shards = None if limit_bytes is None else max(1, limit_bytes // self.shard_bytes)
        self._shards: OrderedDict[int, Future[CachedShard]] = OrderedDict()
        self._pins: Counter[int] = Counter()
        self._in_flight: Counter[int] = Counter()
        self._skipped: Counter[int] = Counter()
        self._borrowed = borrowed
        self._unsent: list[tuple[NDArray[np.int64], Rows]] = []
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(io_threads, thread_name_prefix="store-io")
        # Finished shards wait in RAM for a writer: on slow storage their number must be bounded.
        self._finishing = threading.Semaphore(2 * io_threads)
        self._failure: BaseException | None = None
        self._closed = False

    def check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _check_open(self) -> None:
        self.check()
        if self._closed:
            raise RuntimeError("the shards are dropped: nothing more is written")

    def fail(self, error: BaseException) -> None:
        """Remember the first error; the next step stops with it."""
        if self._failure is None:
            self._failure = error

    # Rows out

    def gather(self, ids: NDArray[np.int64], allocate: Allocate = np.empty) -> Rows:
        """The rows of these samples in their order, in buffers from `allocate`; they are in flight now."""
        parts = list(split_by_shard(ids, self.store.spec.rows_per_shard))
        loading = [self._touch(shard, len(places)) for shard, _, places in parts]
        out = {plan.name: allocate((len(ids), *plan.shape[3:]), plan.dtype) for plan in self._plans}
        for (_, positions, places), future in zip(parts, loading, strict=True):
            cached = result_of(future, self.check)
            with cached.lock:
                for name, array in cached.rows.items():
                    out[name][places] = array[positions]
        self._make_room()
        return Rows(self.store.spec.num_classes, **out)

    def _touch(self, shard: int, taken: int = 0) -> Future[CachedShard]:
        """The shard, being loaded if it was not here; `taken` of its samples go into flight."""
        with self._lock:
            if shard not in self._shards:
                self._shards[shard] = self._pool.submit(self._load, shard)
                self.peak_shards = max(self.peak_shards, len(self._shards))
            self._shards.move_to_end(shard)
            self._in_flight[shard] += taken
            return self._shards[shard]

    def _load(self, shard: int) -> CachedShard:
        rows = self.store.load_shard(shard, self._check_open)
        size = self.store.spec.shard_sizes[shard]
        return CachedShard(rows, int((rows["last_epoch"][:size] != self.epoch).sum()))

    # Rows in

    def scatter(self, ids: NDArray[np.int64], update: Rows) -> None:
        """Put new values in and stamp them with the epoch; a shard whose last sample it was is written."""
        check_update(self.store.spec, self.store.group, ids, update)
        values = as_stored(update, self.store.group, ids, self.epoch)
        for shard, positions, places in split_by_shard(ids, self.store.spec.rows_per_shard):
            if shard in self._borrowed:
                self._unsent.append((ids[places], update.take(places)))
                self._land(shard, len(places))
                continue
            with self._pinned(shard) as cached:
                with cached.lock:
                    for name, array in cached.rows.items():
                        if name in values:
                            array[positions] = values[name][places]
                    cached.remaining -= int((cached.rows["last_epoch"][positions] != self.epoch).sum())
                    cached.rows["last_epoch"][positions] = self.epoch
                    cached.dirty = True
                self._land(shard, len(places))
            self._finish_if_complete(shard, cached)

    def _land(self, shard: int, count: int) -> None:
        """Note that samples of a shard are no more in flight."""
        with self._lock:
            self._in_flight[shard] = max(0, self._in_flight[shard] - count)

    def take_unsent(self) -> list[tuple[NDArray[np.int64], Rows]]:
        """The updates of borrowed shards since the last call; call it when all updates are scattered."""
        unsent, self._unsent = self._unsent, []
        return unsent

    def skip(self, ids: NDArray[np.int64]) -> None:
        """These samples get no update this epoch (unreadable): their shards do not wait for them."""
        for shard, _, places in split_by_shard(ids, self.store.spec.rows_per_shard):
            with self._lock:
                self._skipped[shard] += len(places)
                future = self._shards.get(shard)
            if future is not None:
                self._finish_if_complete(shard, result_of(future, self.check))

    @contextmanager
    def _pinned(self, shard: int) -> Iterator[CachedShard]:
        """The shard, loaded, and sure to stay until the block ends."""
        with self._lock:
            self._pins[shard] += 1
        try:
            yield result_of(self._touch(shard), self.check)
        finally:
            with self._lock:
                self._pins[shard] -= 1

    # Writing and removing

    def _finish_if_complete(self, shard: int, cached: CachedShard) -> None:
        if cached.remaining <= self._skipped[shard]:
            while not self._finishing.acquire(timeout=POLL_SECONDS):
                self.check()
            self._pool.submit(self._finish, shard, cached)

    def _finish(self, shard: int, cached: CachedShard) -> None:
        try:
            self._write(shard, cached)
            self._remove(shard, cached)
        except BaseException as error:
            self.fail(error)
        finally:
            self._finishing.release()

    def _write(self, shard: int, cached: CachedShard) -> None:
        with cached.lock:
            if cached.dirty:
                self.store.save_shard(shard, cached.rows, self._check_open)
                cached.dirty = False

    def _remove(self, shard: int, cached: CachedShard) -> None:
        with self._lock:
            # Only a pinned shard can become dirty, and pinning takes the lock we hold.
            if not (self._pins[shard] or self._in_flight[shard] or cached.dirty):
                self._shards.pop(shard, None)

    def _make_room(self) -> None:
        if self._limit_shards is None:
            return
        with self._lock:
            idle = [(n, held) for n, held in self._shards.items() if held.done() and not self._in_flight[n]]
            surplus = len(self._shards) - self._limit_shards
        for shard, future in idle[: max(0, surplus)]:
            self._write(shard, future.result())
            self._remove(shard, future.result())

    def flush(self) -> None:
        """Write every shard that has changed; what is cached stays so."""
        with self._lock:
            held = list(self._shards.items())
        loaded = [(shard, result_of(future, self.check)) for shard, future in held]
        writes = [self._pool.submit(self._write, shard, cached) for shard, cached in loaded]
        for write in writes:
            result_of(write, self.check)
        self.check()

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Drop all shards and end the threads; what was not flushed is lost."""
        self._closed = True
        ending = threading.Thread(
            target=self._pool.shutdown, kwargs={"wait": True, "cancel_futures": True}, daemon=True
        )
        ending.start()
        join(ending, f"reads and writes of {self.store.backend.url}")
        self._shards.clear()


def update(store: HeatmapStore, epoch: int, ids: NDArray[np.int64], values: Rows) -> None:
    """Update samples at once, without the threads of prefetch and writeback; a commit makes it last."""
    with ShardCache(store, epoch) as cache:
        cache.scatter(ids, values)
        cache.flush()
