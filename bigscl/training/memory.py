"""The memory of a run: recall what is known of a batch, learn from its prediction, end an epoch."""

# Shapes: B batch, L classes, G side of the score map.

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from bigscl.config import StoreConfig
from bigscl.data.batch import Batch
from bigscl.method.heatmaps import blend, blend_scores, gather_classes
from bigscl.method.selection import Selection, expected_counts, select
from bigscl.store import HeatmapStore, Prefetcher, ShardCache, Update, Writeback
from bigscl.training.run import Run
from bigscl.training.transfer import Recalled, allocate_pinned, choose_device, to_device, to_host

ShowWork = Callable[[str, int | None], AbstractContextManager[Callable[[int], None]]]
"""Shows the title of long work and its number of units; what it yields is called with the units done."""
Chunk = TypeVar("Chunk")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Predicted:
    """What the memory learns of a batch, on the device."""

    logits: Tensor
    """[B,L]"""
    maps: Tensor | None
    """[B,L,G,G], probabilities; None if only scores are kept."""


class Memory:
    """Scores and heatmaps of every sample, and the expected positives, on one rank.

    In each epoch: `recall` yields the batches with what is remembered of them, `learn` takes each batch's
    prediction, `end_epoch` commits. Without a store nothing is remembered: `recall` yields None, the other
    calls do nothing. All ranks call `commit`, `end_epoch` and `drop_snapshots` together.
    """

    def __init__(
        self,
        run: Run,
        store: HeatmapStore | None,
        selection: Selection,
        device: torch.device,
        show_work: ShowWork,
    ) -> None:
        self._run, self._config = run, run.config
        self._device = device
        self._show_work = show_work
        self.store = store
        self.selection = selection.to(device)
        self._threads: _EpochThreads | None = None
        self._data_seconds = 0.0

    @property
    def keeps_heatmaps(self) -> bool:
        """Whether there are heatmaps to update, not only scores."""
        return self.store is not None and self.store.group.layout != "scores"

    @property
    def snapshot(self) -> int | None:
        """The id of the store's current snapshot."""
        return None if self.store is None else self.store.snapshot.id

    # A step

    def recall(self, batches: Iterable[Batch], epoch: int) -> Iterator[tuple[Batch, Recalled | None]]:
        """Yield each batch with what is remembered of its samples, on the device."""
        if self.store is None:
            return self._time(batches)
        self._threads = _EpochThreads(self.store, epoch, self._config.store, self._device)
        pairs = self._threads.prefetcher.pair(batches, lambda batch: batch.ids.numpy())
        return ((batch, to_device(rows, self._device)) for batch, rows in pairs)

    def _time(self, batches: Iterable[Batch]) -> Iterator[tuple[Batch, None]]:
        self._data_seconds, asked = 0.0, time.perf_counter()
        for batch in batches:
            self._data_seconds += time.perf_counter() - asked
            yield batch, None
            asked = time.perf_counter()

    def learn(self, batch: Batch, recalled: Recalled | None, predicted: Predicted | None) -> None:
        """Update the averages of a batch that `recall` yielded; its skipped samples keep theirs.

        `predicted` is None if none of the batch's samples could be read.
        """
        if self._threads is None:
            return
        if predicted is not None:
            assert recalled is not None
            arrays, ready = to_host(updated_averages(batch, recalled, predicted, self._config.store))
            self._threads.writeback.put(batch.ids.numpy(), Update(**arrays), ready=ready)
        self._threads.writeback.skip(batch.skipped.numpy())

    def flush(self) -> None:
        """Return when all that was learnt is written."""
        if self._threads is not None:
            self._threads.writeback.drain()

    @property
    def waits(self) -> dict[str, float]:
        """Seconds that the step waited in this epoch, by what it waited for."""
        return {"wait_data": self._data_seconds} if self._threads is None else self._threads.waits

    # The end of an epoch

    def end_epoch(self, epoch: int, step: int, shards: list[int]) -> None:
        """Select the expected positives of the next epoch, commit this one, and compact the heatmaps if due.

        `shards` are those that this rank has trained on.
        """
        self.flush()
        self._close_threads()
        if self.store is None:
            return
        self.selection = self._select(epoch, shards)
        self.commit(epoch, step, next_epoch=epoch + 1)
        if epoch + 1 == self._config.compact_after and self.store.group.layout != "topk":
            self._compact(self.store)

    def _select(self, epoch: int, shards: list[int]) -> Selection:
        if not self._config.objective.needs.expected or epoch + 1 < self._config.selection.start_epoch:
            return self.selection
        assert self.store is not None
        assert self._run.data.positives_per_image is not None
        counts = expected_counts(self._run.data.annotations.counts(), self._run.data.positives_per_image)
        with self._show_work("selecting the expected positives", len(shards)) as show:
            # Before they are committed, a rank sees the scores of its own shards, and only of those.
            chunks = _counted(self.store.scores_by_shard(shards), show)
            return select(chunks, counts, self._run.ranks).to(self._device)

    def commit(self, epoch: int, step: int, *, next_epoch: int, skipped: Iterable[int] = ()) -> None:
        """Make what was learnt so far permanent, with all that a run needs to resume from it.

        Within an epoch (`next_epoch` is the same), `skipped` are its samples that could not be read.
        """
        if self.store is None:
            return
        attributes = {
            "selection": self.selection.to_json(),
            "next_epoch": next_epoch,
            "skipped": list(skipped),
        }
        self.store.commit(epoch=epoch, step=step, attributes=attributes)

    def _compact(self, store: HeatmapStore) -> None:
        """From now on keep only the heatmaps of each image's top classes."""
        ranks = self._run.ranks
        top = min(self._config.store.top or 0, self._run.data.train.num_classes)
        num_shards = sum(slot >= 0 for slot in store.snapshot.slots)
        share = len(range(ranks.rank, num_shards, ranks.world_size))
        with self._show_work(f"keeping heatmaps of {top} classes per image", share) as show:
            store.compact(top, progress=show)

    def drop_snapshots(self, keep: set[int]) -> None:
        """Delete all snapshots but these and the current one."""
        if self.store is not None:
            with self._show_work("deleting snapshots that no checkpoint needs", None):
                self.store.drop_snapshots(keep=keep)

    def check_lease(self) -> None:
        """Raise StoreError if another process has taken the store meanwhile."""
        if self.store is not None:
            self.store.check_lease()

    def close(self) -> None:
        """Stop the threads and close the store; a store in memory is deleted."""
        self._close_threads()
        if self.store is not None:
            self.store.close()
            if self._config.store.kind == "memory" and self._run.ranks.rank == 0:
                self.store.backend.delete_tree("")

    def _close_threads(self) -> None:
        if self._threads is not None:
            self._threads.close()
            self._threads = None


class _EpochThreads:
    """The threads that read rows ahead of the step and write them behind it, for one epoch."""

    def __init__(self, store: HeatmapStore, epoch: int, config: StoreConfig, device: torch.device) -> None:
        limit = None if config.resident_gb is None else int(config.resident_gb * 2**30)
        allocate = allocate_pinned if device.type == "cuda" else np.empty
        on_start = partial(choose_device, device)
        # Closed in reverse: first nothing new comes in, then nothing more goes out, then the shards go.
        self._stack = ExitStack()
        cache = self._stack.enter_context(
            ShardCache(store, epoch, limit_bytes=limit, io_threads=config.io_threads)
        )
        self.writeback = self._stack.enter_context(
            Writeback(cache, depth=config.writeback_batches, on_start=on_start)
        )
        self.prefetcher = self._stack.enter_context(
            Prefetcher(cache, depth=config.prefetch_batches, allocate=allocate, on_start=on_start)
        )

    @property
    def waits(self) -> dict[str, float]:
        read = self.prefetcher.waits
        written = self.writeback.wait_seconds
        return {"wait_data": read.data, "wait_heatmaps": read.heatmaps, "wait_writeback": written}

    def close(self) -> None:
        self._stack.close()


@torch.no_grad()
def updated_averages(
    batch: Batch, recalled: Recalled, predicted: Predicted, config: StoreConfig
) -> dict[str, Tensor]:
    """Return the running averages of a batch after its prediction, by the names of the store's arrays."""
    visits = recalled.max_visits if config.ema == "debiased" else None
    pooled = predicted.logits.float().sigmoid()
    updated = {"scores": blend_scores(recalled.scores, pooled, config.momentum, visits)}
    if recalled.heatmaps is None:
        return updated
    assert predicted.maps is not None
    maps, device = predicted.maps, recalled.heatmaps.device
    if recalled.classes is not None:
        maps = gather_classes(maps, recalled.classes)
    views = batch.views.to(device, non_blocking=True)
    erased = None if batch.erased is None else batch.erased.to(device, non_blocking=True)
    updated["heatmaps"], counts = blend(
        recalled.heatmaps, maps, views, config.momentum, erased=erased, counts=recalled.counts
    )
    return updated if counts is None else updated | {"counts": counts}


def _counted(chunks: Iterable[Chunk], show: Callable[[int], None]) -> Iterator[Chunk]:
    """Yield the chunks; show how many are done when the next one is asked for."""
    for done, chunk in enumerate(chunks):
        show(done)
        yield chunk
