"""An epoch of a memory: threads that read ahead and write behind, copies to the device, visited samples."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bigscl.common.user_error import UserError
from bigscl.config import StoreConfig
from bigscl.data.epoch_plan import Plan
from bigscl.distributed.ranks import pack_arrays, unpack_arrays
from bigscl.memory.lookup import ONCE, CheckedViews, RepeatedSample
from bigscl.store import (
    HeatmapStore,
    Prefetcher,
    Rows,
    ShardCache,
    StoreError,
    Transport,
    Writeback,
    on_rank_zero,
)

IDS = "ids"
"""The sample ids of updates on their way to another rank."""
Batch = TypeVar("Batch")
Item = TypeVar("Item")


class EpochThreads:
    """The threads that read rows ahead of the step and write them behind it, for one epoch."""

    def __init__(
        self,
        store: HeatmapStore,
        epoch: int,
        settings: StoreConfig,
        device: torch.device,
        borrowed: frozenset[int],
    ) -> None:
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
            ShardCache(store, epoch, limit_bytes=limit, io_threads=settings.io_threads, borrowed=borrowed)
        )
        self.take_unsent = self._cache.take_unsent
        self.writeback = self._stack.enter_context(
            Writeback(self._cache, depth=settings.writeback_batches, on_start=self._on_start)
        )

    def read(self, ids: NDArray[np.int64]) -> Rows:
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
        data = sum(one.waits.data for one in self._prefetchers)
        heatmaps = sum(one.waits.heatmaps for one in self._prefetchers) + self._read_seconds
        written = self.writeback.wait_seconds
        return {"wait_data": data, "wait_heatmaps": heatmaps, "wait_writeback": written}

    def close(self) -> None:
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


# Samples that the epoch has had


class EpochVisits:
    """The rows that an epoch has updated or skipped, on one rank."""

    # Invariant: `rows` are those that this rank has updated or skipped in the epoch, or that were so
    # before the memory was opened. A row is looked up and updated only while it is not among them,
    # so that the batch has what the epoch before has left, whatever the threads have written meanwhile.

    def __init__(self, store: HeatmapStore, epoch: int, skipped: Sequence[int], ranks: Transport) -> None:
        """Continue the epoch of the store's snapshot, in which samples were skipped, or begin another one."""
        self.epoch = epoch
        self._spec, self._ranks = store.spec, ranks
        within = store.snapshot.epoch == epoch
        self.rows = np.zeros(store.spec.num_rows, bool)
        if within:
            self.rows = _read_rows(store, epoch, ranks)
            self.rows[list(skipped)] = True
        self._skipped = list(skipped) if within and ranks.rank == 0 else []
        self._shards: set[int] = set()
        self.borrowed: frozenset[int] = frozenset()
        """Shards of which this rank updates samples, and that another one writes."""
        self._writers = np.empty(0, np.int64)

    def follow(self, plan: Plan) -> None:
        """Take from the plan of the epoch which rank writes a shard that several ranks train."""
        self._writers, self.borrowed = plan.writers, plan.borrowed(self._ranks.rank)

    def check_new(self, rows: NDArray[np.int64]) -> None:
        if self.rows[rows].any():
            sample = rows[self.rows[rows]][0]
            raise RepeatedSample(f"sample {sample} comes a second time in epoch {self.epoch}. {ONCE}")

    def note(self, rows: NDArray[np.int64], *, skipped: bool = False) -> None:
        self.rows[rows] = True
        self._shards.update({*np.unique(rows // self._spec.rows_per_shard).tolist()} - self.borrowed)
        if skipped:
            self._skipped += rows.tolist()

    def all_skipped(self) -> list[int]:
        """Return the samples that any rank has skipped, on rank 0; an empty list elsewhere. Collective."""
        parts = self._ranks.gather(json.dumps(self._skipped).encode()) or []
        return sorted({sample for part in parts for sample in json.loads(part)})

    def exchange(self, unsent: list[tuple[NDArray[np.int64], Rows]]) -> list[tuple[NDArray[np.int64], Rows]]:
        """Send updates to the ranks that write their shards; return those that came. Collective."""
        updates: list[dict[str, list[Array]]] = [{} for _ in range(self._ranks.world_size)]
        for ids, rows in unsent:
            of_writer = updates[self._writers[ids[0] // self._spec.rows_per_shard]]
            for name, array in {**rows, IDS: ids}.items():
                of_writer.setdefault(name, []).append(array)
        payloads = [
            pack_arrays({name: np.concatenate(parts) for name, parts in update.items()}) if update else b""
            for update in updates
        ]
        received = [unpack_arrays(payload) for payload in self._ranks.exchange(payloads) if payload]
        return [(arrays.pop(IDS), Rows(self._spec.num_classes, **arrays)) for arrays in received]

    def divide_shards(self) -> list[int]:
        """Return the shards that this rank reads; refuse one that two ranks have updated. Collective."""
        parts = self._ranks.gather(json.dumps(sorted(self._shards)).encode())

        def divide() -> bytes:
            assert parts is not None
            updated = [set(json.loads(part)) for part in parts]
            return json.dumps(divide_shards(updated, self._spec.num_shards)).encode()

        divided: list[list[int]] = json.loads(on_rank_zero(self._ranks, divide))
        return divided[self._ranks.rank]


def _read_rows(store: HeatmapStore, epoch: int, ranks: Transport) -> NDArray[np.bool_]:
    """Return the rows stamped with this epoch; rank 0 reads them, as the stamps are a file per shard."""

    def read() -> bytes:
        return np.packbits(store.last_epochs() == epoch).tobytes()

    packed = np.frombuffer(on_rank_zero(ranks, read), np.uint8)
    return np.unpackbits(packed, count=store.spec.num_rows).astype(bool)


def divide_shards(updated: Sequence[set[int]], num_shards: int) -> list[list[int]]:
    """Return for each rank the shards that it has updated, and its part of those that no rank has."""
    owner: dict[int, int] = {}
    for rank, shards in enumerate(updated):
        for shard in sorted(shards):
            if owner.setdefault(shard, rank) != rank:
                raise StoreError(
                    f"shard {shard}: ranks {owner[shard]} and {rank} have updated samples of it in one "
                    f"epoch, and one would overwrite the other's. Divide the samples by `memory.plan(...)`, "
                    f"or give each shard to one rank, as `wds.split_by_node` does."
                )
    idle = [shard for shard in range(num_shards) if shard not in owner]
    for number, shard in enumerate(idle):
        owner[shard] = number % len(updated)
    return [sorted(shard for shard, own in owner.items() if own == rank) for rank in range(len(updated))]


# Copies between the host and the training device


Array = NDArray[Any]


def allocate_pinned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Return an array in page-locked memory, from which copies to a GPU are asynchronous."""
    # The array keeps the tensor alive; torch's allocator reuses the block only when its copies are done.
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()
    return pinned.view(dtype).reshape(shape)


def choose_device(device: torch.device) -> None:
    """Make a thread use the GPU of its rank: by itself it would take memory on the first one."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def to_host(tensors: dict[str, Tensor]) -> tuple[dict[str, Array], Callable[[], object]]:
    """Return arrays for the tensors' values, and a call that blocks until the values are there."""
    copies, ready = copy_to_host(tensors)
    return {name: copy.numpy() for name, copy in copies.items()}, ready


def copy_to_host(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], Callable[[], object]]:
    """The same as tensors."""
    device = next(iter(tensors.values())).device
    if device.type != "cuda":
        return {name: tensor.cpu() for name, tensor in tensors.items()}, lambda: None
    copies = {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
        for name, tensor in tensors.items()
    }
    # Blocking: the thread that waits for it sleeps, instead of keeping a core busy.
    copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    copied.record()
    return copies, copied.synchronize
