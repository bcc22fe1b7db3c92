"""Load batches: each rank's workers read, decode and transform images in the planned order."""

# Shapes: B samples of the batch, S side of the views.

import logging
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from bigscl.data.batch import Batch
from bigscl.data.decode import decode, jpeg_decoder
from bigscl.data.index import Index, Labels, check_shards
from bigscl.data.plan import Plan, Stream
from bigscl.data.reader import Encoded, encoded_images
from bigscl.data.sources import Unreadable
from bigscl.data.transforms import Transform, TransformedImage
from bigscl.data.workers import obey_parent_only
from bigscl.text import first_few, printable

logger = logging.getLogger(__name__)
# Bad samples of an epoch that are named in the log, and in the error about too many of them.
MOST_WARNINGS = 100
MOST_LISTED = 20


class TooManyBadSamples(ValueError):
    """More samples could not be read than the configuration allows."""


class BadSamples:
    """The samples of an epoch that could not be read; stops the run if there are too many.

    They count as visited when the epoch is resumed: their batches were trained without them.
    """

    def __init__(
        self,
        index: Index,
        num_samples: int,
        *,
        max_share: float = 0.01,
        reasons: dict[int, str] | None = None,
    ) -> None:
        self.reasons = dict(reasons or {})
        """The reason of each; a resumed epoch starts with those of its first part."""
        self._index, self._num_samples, self._max_share = index, num_samples, max_share

    @property
    def ids(self) -> NDArray[np.int64]:
        """Their ids, in the order in which they were found."""
        return np.array(list(self.reasons), np.int64)

    def record(self, batch: Batch) -> None:
        """Count and log the samples that a batch skipped."""
        for sample_id, reason in zip(batch.skipped.tolist(), batch.reasons, strict=True):
            self._warn(sample_id, reason)
            self.reasons[sample_id] = reason
        if len(batch.reasons) and len(self.reasons) > self._max_share * self._num_samples:
            lines = (f"  {self._index.name(n)}: {reason}" for n, reason in self.reasons.items())
            named = first_few(lines, len(self.reasons), most=MOST_LISTED, join="\n")
            raise TooManyBadSamples(
                f"{len(self.reasons)} of {self._num_samples} samples could not be read; the tolerated "
                f"fraction is {self._max_share}. Repair the shards, or raise max_bad_share.\n{named}"
            )

    def _warn(self, sample_id: int, reason: str) -> None:
        if len(self.reasons) < MOST_WARNINGS:
            logger.warning("skipped %s: %s", self._index.name(sample_id), printable(reason))
        elif len(self.reasons) == MOST_WARNINGS:
            logger.warning("skipped more than %d samples: further ones are only counted", MOST_WARNINGS)


class Loader:
    """The batches of one rank, for one epoch or the rest of it, exactly as planned."""

    def __init__(
        self,
        index: Index,
        plan: Plan,
        rank: int,
        transform: Transform,
        *,
        labels: Labels = "observed",
        bad: BadSamples | None = None,
        prefetch_batches: int = 2,
        pin_memory: bool = False,
        allow_pipe: bool = False,
    ) -> None:
        check_shards(index)
        self._num_batches = plan.num_batches(rank)
        self.bad = bad or BadSamples(index, plan.num_samples(rank))
        self.wait_seconds = 0.0
        """How long the consumer has waited for batches."""
        # An empty stream has no turn, and needs no process.
        streams = [stream for stream in plan.streams[rank] if len(stream.ids)]
        batches = Batches(index, streams, plan.batch_size, transform, labels, allow_pipe)
        workers = min(plan.workers, len(streams))
        jpeg_decoder()  # here, once: forked workers inherit the import
        self._loader: DataLoader[Batch] = DataLoader(
            batches,
            batch_size=None,
            num_workers=workers,
            prefetch_factor=prefetch_batches if workers else None,
            pin_memory=pin_memory,
            # The seed that DataLoader draws for its workers is not taken from the generator of training.
            generator=torch.Generator(),
            worker_init_fn=obey_parent_only,
        )

    def __len__(self) -> int:
        return self._num_batches

    def __iter__(self) -> Iterator[Batch]:
        # Here, not at the first batch: the caller of iter() forks the workers.
        batches: Iterator[Batch] = iter(self._loader) if self._num_batches else iter(())
        return self._watched(batches)

    def _watched(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        started = time.perf_counter()
        for batch in batches:
            self.wait_seconds += time.perf_counter() - started
            self.bad.record(batch)
            yield batch
            started = time.perf_counter()


class Batches(IterableDataset[Batch]):
    """The batches of each worker's stream; DataLoader takes one batch of each worker in turn."""

    def __init__(
        self,
        index: Index,
        streams: list[Stream],
        batch_size: int,
        transform: Transform,
        labels: Labels,
        allow_pipe: bool,
    ) -> None:
        self._index, self._streams, self._batch_size = index, streams, batch_size
        self._transform, self._labels, self._allow_pipe = transform, labels, allow_pipe

    def __iter__(self) -> Iterator[Batch]:
        worker: Any = get_worker_info()
        stream = self._streams[0 if worker is None else worker.id]
        encoded = encoded_images(self._index, stream, allow_pipe=self._allow_pipe)
        for first in range(0, len(stream.ids), self._batch_size):
            count = min(self._batch_size, len(stream.ids) - first)
            yield self._batch([next(encoded) for _ in range(count)])

    def _batch(self, samples: list[tuple[int, Encoded]]) -> Batch:
        size = self._transform.size
        # Channels last, as images are decoded and as GPUs want them: the copy is ten times cheaper.
        images = torch.empty((len(samples), size, size, 3), dtype=torch.uint8).permute(0, 3, 1, 2)
        transformed: dict[int, TransformedImage] = {}
        skipped: dict[int, str] = {}
        for sample_id, content in samples:
            try:
                transformed[sample_id] = self._transformed(sample_id, content)
                images[len(transformed) - 1] = transformed[sample_id].pixels
            except Unreadable as error:
                skipped[sample_id] = str(error)
        views = torch.tensor([one.view for one in transformed.values()], dtype=torch.float32)
        erased = torch.tensor([one.erased for one in transformed.values()], dtype=torch.float32)
        ids = np.array(list(transformed), np.int64)
        return Batch(
            ids=torch.from_numpy(ids),
            images=images[: len(transformed)],
            labels=torch.from_numpy(self._index.labels_of(ids, self._labels)),
            views=views.reshape(-1, 5),
            erased=erased.reshape(-1, 4) if self._transform.erases else None,
            skipped=torch.tensor(list(skipped), dtype=torch.int64),
            reasons=tuple(skipped.values()),
        )

    def _transformed(self, sample_id: int, content: Encoded) -> TransformedImage:
        if isinstance(content, Unreadable):
            raise content
        return self._transform(decode(content), sample_id)
