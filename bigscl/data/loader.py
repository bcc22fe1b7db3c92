"""Load batches: each rank's workers read, decode and transform images in the planned order."""

# Shapes: B samples of the batch, L classes, S side of the images.

import itertools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from bigscl.common.text import first_few, printable
from bigscl.common.url_secrets import environment
from bigscl.common.url_secrets import receive as receive_secrets
from bigscl.common.user_error import UserError
from bigscl.data.crops import Box, ViewRow, stack_rows
from bigscl.data.decode import find_decoder
from bigscl.data.epoch_plan import Plan, Stream, batch_lengths
from bigscl.data.index import Index, Labels, check_shards
from bigscl.data.open_tar import Unreadable
from bigscl.data.read_samples import Encoded, encoded_images
from bigscl.data.transforms import DecoderName, Transform, TransformedImage, transform_image
from bigscl.data.workers import (
    WAITS,
    SlotBatch,
    SlotLayout,
    SlotMemory,
    Slots,
    on_start,
    start_method,
    without_main_module,
)

logger = logging.getLogger(__name__)
# Bad samples of an epoch that are named in the log, and in the error about too many of them.
MOST_WARNINGS = 100
MOST_LISTED = 20


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """The samples of a step; all tensors have the same samples in the same order."""

    ids: Tensor
    """int64 [B]: sample ids."""
    images: Tensor
    """uint8 [B,3,S,S], channels last in memory; `normalize` makes them the network's input."""
    labels: Tensor
    """int8 [B,L]: 1 positive, 0 negative, -1 unknown."""
    views: Tensor
    """float32 [B,5]: a `ViewRow` of each."""
    erased: Tensor | None = None
    """float32 [B,4]: the erased `Box` of each; None if no box can be erased."""
    mix: Tensor | None = None
    """float32 [B,5]: a `MixRow` of each, set by the trainer; None if no image can be mixed."""
    skipped: Tensor
    """int64: ids that the plan has for this batch but that could not be read."""
    reasons: tuple[str, ...] = ()
    """Why, one for each skipped id."""

    def __len__(self) -> int:
        return len(self.ids)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Batch":
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "Batch":
        """Return the batch in page-locked memory, from which copies to a GPU are asynchronous."""
        return self._map(Tensor.pin_memory)

    def _map(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        changed: dict[str, Any] = {name: change(v) for name, v in values.items() if isinstance(v, Tensor)}
        return replace(self, **changed)


def normalize(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Return `(images / 255 - mean) / std` per channel, on the images' device and in their memory format."""
    # One multiplication and one addition per pixel.
    factor, offset = _factor_and_offset(tuple(mean), tuple(std), images.device)
    return images.to(torch.float32).mul_(factor[:, None, None]).add_(offset[:, None, None])


@cache
def _factor_and_offset(
    mean: tuple[float, ...], std: tuple[float, ...], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Made once: values that are copied to a GPU at every step would make the host wait for it."""
    factor = 1 / (255 * torch.tensor(std, dtype=torch.float32, device=device))
    return factor, -255 * torch.tensor(mean, dtype=torch.float32, device=device) * factor


class TooManyBadSamples(UserError):
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
        labels: Labels = "given",
        bad: BadSamples | None = None,
        prefetch_batches: int = 2,
        pin_memory: bool = False,
        decoder: DecoderName = "torchvision",
        workers: "LoaderWorkers | None" = None,
    ) -> None:
        """Load with `workers` that live on after the epoch, or with new ones that end with it."""
        self._plan, self._rank, self._num_batches = plan, rank, plan.num_batches(rank)
        self._index = index
        self.bad = bad or BadSamples(index, plan.num_samples(rank))
        self.wait_seconds = 0.0
        """How long the consumer has waited for batches."""
        # An empty stream has no turn, and needs no process.
        streams = [stream for stream in plan.streams[rank] if len(stream.ids)]
        self._work = [Work(stream=each, batch_size=plan.batch_size, transform=transform) for each in streams]
        self._workers = workers or LoaderWorkers(
            index,
            min(plan.workers, len(streams)),
            labels=labels,
            prefetch_batches=prefetch_batches,
            pin_memory=pin_memory,
            decoder=decoder,
            persistent=False,
        )

    def __len__(self) -> int:
        return self._num_batches

    def __iter__(self) -> Iterator[Batch]:
        # Here, not at the first batch: the caller of iter() starts the workers.
        return self._watched(self._workers.start(self._work) if self._num_batches else iter(()))

    def _watched(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        for number in itertools.count():
            started = time.perf_counter()
            with WAITS.waiting(lambda number=number: self._describe(number)):  # type: ignore[misc]
                found = next(batches, None)
            if found is None:
                return
            self.wait_seconds += time.perf_counter() - started
            self.bad.record(found)
            yield found

    def _describe(self, number: int) -> str:
        """Return from which tars a batch is made."""
        ids = next(itertools.islice(self._plan.batches(self._rank), number, None), None)
        if ids is None:
            return "its loader workers do not end"
        tars = [self._index.urls[shard] for shard in np.unique(ids // self._index.rows_per_shard)]
        return f"loader worker {number % len(self._work)} reads {first_few(tars, len(tars), most=3)}"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Work:
    """The work of a loader worker in an epoch."""

    stream: Stream
    batch_size: int
    transform: Transform


class LoaderWorkers:
    """The loader processes of one rank; at the start of an epoch each gets its work through a pipe.

    With `persistent` they live for all epochs, so that only the first one pays for starting them. The images
    of a batch are in memory that is filled again when nothing refers to them any more. If more batches than
    `held_batches` are kept, new ones get memory of their own, which takes longer to make.
    """

    def __init__(
        self,
        index: Index,
        num_workers: int,
        *,
        labels: Labels = "given",
        prefetch_batches: int = 2,
        held_batches: int = 8,
        pin_memory: bool = False,
        decoder: DecoderName = "torchvision",
        persistent: bool = True,
    ) -> None:
        """With no workers, this process does the work of the only stream.

        `pin_memory`: batches are in page-locked memory. Copy them to the GPU in the stream that is current
        where the next batch is taken: torch's default stream, unless you change it.
        """
        check_shards(index)
        find_decoder(decoder)  # here, once: forked workers inherit the import
        self._num_classes, self._num_workers = index.num_classes, num_workers
        self._persistent, self._pin_memory = persistent, pin_memory
        self._slots_per_worker = prefetch_batches + -(-held_batches // max(1, num_workers))
        self._batches = Batches(index, labels, decoder)
        self._slots: Slots | None = None
        method = start_method(index.urls) if num_workers else None
        self._loader: DataLoader[Batch | SlotBatch] = DataLoader(
            self._batches,
            batch_size=None,
            num_workers=num_workers,
            prefetch_factor=prefetch_batches if num_workers else None,
            # The seed that DataLoader draws for its workers is not taken from the generator of training.
            generator=torch.Generator(),
            worker_init_fn=on_start(method),
            multiprocessing_context=method,
            persistent_workers=persistent and num_workers > 0,
        )

    def start(self, work: list[Work]) -> Iterator[Batch]:
        """Return the batches of an epoch, one of each worker in turn; workers beyond its work have none."""
        if self._num_workers == 0:
            self._batches.work = work[0]
            return map(self._opened, self._loader)
        # A batch may have one sample more than the others, see `batch_lengths`.
        rows, side = work[0].batch_size + 1, work[0].transform.size
        layout, slots = SlotLayout(rows=rows, size=side, num_classes=self._num_classes), self._slots
        if is_new := not self._persistent or slots is None or slots.memory.layout != layout:
            self.close()
            slots = Slots(layout, self._num_workers, self._slots_per_worker)
        assert slots is not None
        self._batches.slots, self._batches.inboxes = slots.memory, slots.inboxes
        with without_main_module():
            batches = iter(self._loader)
        if is_new and self._pin_memory:
            # Not before: the workers are forks of a process whose memory is not locked.
            slots.lock()
        for worker in range(self._num_workers):
            slots.begin(worker, work[worker] if worker < len(work) else None)
        self._slots = slots
        return self._received(batches, slots)

    def _received(self, batches: Iterator[Batch | SlotBatch], slots: Slots) -> Iterator[Batch]:
        while True:
            slots.give_back()
            if (found := next(batches, None)) is None:
                break
            yield self._opened(found, slots)
        if not self._persistent:
            self.close()

    def _opened(self, found: Batch | SlotBatch, slots: Slots | None = None) -> Batch:
        """Return the batch; if it came in a slot, only its images are there, and all else may be kept."""
        if isinstance(found, Batch):
            return found.pin_memory() if self._pin_memory else found
        assert slots is not None
        (images, labels), count = slots.lend(found.slot), len(found.rest["ids"])
        rest = {**found.rest, "labels": labels[:count].numpy()}
        own: dict[str, Any] = {
            name: torch.tensor(x, pin_memory=self._pin_memory) if isinstance(x, np.ndarray) else x
            for name, x in rest.items()
        }
        return Batch(images=images[:count], **own)

    def close(self) -> None:
        """End the processes; memory lasts as long as batches in it."""
        # DataLoader has no call for it: they end with the last reference to its iterator.
        self._loader._iterator = None
        self._slots = self._batches.slots = None


class Batches(IterableDataset[Batch | SlotBatch]):
    """The batches of each worker's stream; DataLoader takes one batch of each worker in turn."""

    def __init__(self, index: Index, labels: Labels, decoder: DecoderName = "torchvision") -> None:
        self._index, self._labels = index, labels
        self._decode = find_decoder(decoder)
        self._secrets = environment()
        self.work: Work | None = None
        self.inboxes: list[Connection] = []
        self.slots: SlotMemory | None = None

    def __iter__(self) -> Iterator[Batch | SlotBatch]:
        worker: Any = get_worker_info()
        if worker is None:
            assert self.work is not None
            yield from (self._batch(samples, self.work.transform) for samples in self._samples(self.work))
            return
        receive_secrets(self._secrets)
        inbox = self.inboxes[worker.id]
        # Numbers of slots may come first, of an epoch that was not finished.
        while isinstance(message := inbox.recv(), int):
            pass
        work, free = message
        for samples in self._samples(work) if work else ():
            while inbox.poll():
                free.append(inbox.recv())
            # Without a free one, DataLoader shares the memory of the batch.
            in_slot = self._fill(free.pop(), samples, work.transform) if free else None
            yield in_slot or self._batch(samples, work.transform)

    def _samples(self, work: Work) -> Iterator[list[tuple[int, Encoded]]]:
        encoded = encoded_images(self._index, work.stream)
        for length in batch_lengths(len(work.stream.ids), work.batch_size):
            yield [next(encoded) for _ in range(length)]

    def _fill(self, number: int, samples: list[tuple[int, Encoded]], transform: Transform) -> SlotBatch:
        assert self.slots is not None
        images, labels = self.slots.layout.cut(self.slots.slot(number))
        batch = self._batch(samples, transform, images)
        labels[: len(batch)] = batch.labels
        in_slot = {"images", "labels"}
        rest = {one.name: getattr(batch, one.name) for one in fields(batch) if one.name not in in_slot}
        arrays = {name: x.numpy() if isinstance(x, Tensor) else x for name, x in rest.items()}
        return SlotBatch(slot=number, rest=arrays)

    def _batch(
        self, samples: list[tuple[int, Encoded]], transform: Transform, images: Tensor | None = None
    ) -> Batch:
        """Make a batch, with its images in the given memory."""
        size = transform.size
        if images is None:
            # Channels last, as images are decoded and as GPUs want them: the copy is ten times cheaper.
            images = torch.empty((len(samples), size, size, 3), dtype=torch.uint8).permute(0, 3, 1, 2)
        transformed: dict[int, TransformedImage] = {}
        skipped: dict[int, str] = {}
        for sample_id, content in samples:
            try:
                if isinstance(content, Unreadable):
                    raise content
                transformed[sample_id] = transform_image(transform, self._decode(content), sample_id)
                images[len(transformed) - 1] = transformed[sample_id].pixels
            except Unreadable as error:
                skipped[sample_id] = str(error)
        erased = stack_rows(Box, (image.erased for image in transformed.values()))
        ids = np.array(list(transformed), np.int64)
        return Batch(
            ids=torch.from_numpy(ids),
            images=images[: len(transformed)],
            labels=torch.from_numpy(self._index.labels_of(ids, self._labels)),
            views=stack_rows(ViewRow, (image.view for image in transformed.values())),
            erased=erased if transform.erases else None,
            skipped=torch.tensor(list(skipped), dtype=torch.int64),
            reasons=tuple(skipped.values()),
        )
