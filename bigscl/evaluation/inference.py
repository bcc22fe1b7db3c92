"""Predict every image of a set: the same bits for any batch size, worker count and number of processes.

The order of a convolution's sums depends on the shape of its input, so the last bits of an image's logits
would depend on the batch size. Here the network always gets batches of one shape, whatever the loader's
batches are; then an image's logits depend on the image alone. The number of CPU threads matters
too: the caller fixes it.
"""

# Shapes: B images in a network batch, n images of a part, S side of the images, L classes.

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bigscl.common.user_error import UserError
from bigscl.data.loader import Batch, normalize
from bigscl.distributed.ranks import Ranks, pack_arrays, unpack_arrays
from bigscl.models.spatial import Prediction, SpatialClassifier, map_pooled
from bigscl.store import Transport

NETWORK_BATCH, GPU_NETWORK_BATCH = 32, 128
"""Images of a batch that the network sees, on a CPU and on other devices."""
MEASURED = "measured."
Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Predictions:
    """The logits of every image that could be read, in the order of their ids."""

    ids: NDArray[np.int64]
    """[n], ascending, each once."""
    logits: NDArray[np.float32]
    """[n,L], as the network pools."""
    map_logits: NDArray[np.float32] | None = None
    """[n,L], by map pooling."""
    measured: Arrays = field(default_factory=dict)
    """Results of `measure` for all batches, concatenated in the order in which they were predicted."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NetworkBatch:
    """Images in a batch of fixed shape."""

    ids: Tensor
    """int64 [n], of the first n images; the others are padding."""
    views: Tensor
    """float32 [n,5]."""
    images: Tensor
    """uint8 [B,3,S,S], channels last; overwritten when the next batch is asked for."""


Measure = Callable[[NetworkBatch, Tensor], Arrays]
"""Measures a batch by its logit map [B,L,G,G]; returns arrays under the same names for every batch."""


def predict(
    model: SpatialClassifier,
    loader: Iterable[Batch],
    device: torch.device | str,
    *,
    mean: Sequence[float],
    std: Sequence[float],
    transport: Transport,
    measure: Measure | None = None,
) -> Predictions | None:
    """Return the predictions of all ranks' images on rank 0, None on the others.

    The model is the bare SpatialClassifier, in evaluation mode. Ranks may have different numbers of batches,
    or none: they meet only at the end. One pass over the images gives the logits of both poolings and, with
    `measure`, the measures of their maps.
    """
    batches = predict_batches(model, loader, device, mean=mean, std=std, measure=measure)
    parts = gather_arrays(transport, lambda: concatenate(batches))
    if parts is None:
        return None
    whole = concatenate(parts)
    check_any(whole)
    order = np.argsort(whole["ids"])
    return Predictions(
        ids=whole.pop("ids")[order],
        logits=whole.pop("logits")[order],
        map_logits=whole.pop("map_logits")[order],
        measured={name.removeprefix(MEASURED): values for name, values in whole.items()},
    )


def check_any(predictions: Arrays) -> None:
    """Refuse predictions of no image."""
    if not predictions:
        raise UserError("no image could be read: nothing to predict. See the warnings above for the reasons.")


@torch.inference_mode()
def predict_batches(
    model: SpatialClassifier,
    loader: Iterable[Batch],
    device: torch.device | str,
    *,
    mean: Sequence[float],
    std: Sequence[float],
    measure: Measure | None = None,
) -> Iterator[Arrays]:
    """Yield `ids`, `logits` and `map_logits` of this rank's images, batch by batch, and their measures.

    Results are copied to the host while the device computes the next batch.
    """
    assert not model.training, "the model must be in evaluation mode"
    device = torch.device(device)

    def launch(batch: NetworkBatch) -> tuple[dict[str, Tensor], Arrays]:
        found: Prediction = model(normalize(batch.images, mean, std), maps=True)
        assert found.logit_map is not None
        measured = measure(batch, found.logit_map) if measure else {}
        poolings = {"logits": found.logits, "map_logits": map_pooled(found)}
        tensors = {name: logits[: len(batch.ids)].float() for name, logits in poolings.items()}
        return {"ids": batch.ids, **tensors}, {MEASURED + name: each for name, each in measured.items()}

    launched: tuple[dict[str, Tensor], Arrays] | None = None
    for batch in network_batches(_on_device(loader, device), network_batch_size(device)):
        following = launch(batch)
        if launched is not None:
            yield _on_host(*launched)
        launched = following
    if launched is not None:
        yield _on_host(*launched)


def _on_device(loader: Iterable[Batch], device: torch.device) -> Iterator[Batch]:
    """Yield the batches with their images on the device, copied asynchronously from pinned memory."""
    for batch in loader:
        yield replace(batch, images=batch.images.to(device, non_blocking=True))


def _on_host(tensors: dict[str, Tensor], measured: Arrays) -> Arrays:
    return {**{name: tensor.cpu().numpy() for name, tensor in tensors.items()}, **measured}


def network_batch_size(device: torch.device) -> int:
    """Return the size of the network's batches, the same on every machine for one type of device."""
    return NETWORK_BATCH if device.type == "cpu" else GPU_NETWORK_BATCH


def network_batches(loader: Iterable[Batch], size: int = NETWORK_BATCH) -> Iterator[NetworkBatch]:
    """Yield the loader's images in batches of `size`; the last one is padded to that shape."""
    images = torch.empty(0)
    rows: list[tuple[Tensor, Tensor]] = []
    filled = 0
    for batch in loader:
        if not len(images):
            shape = (size, *batch.images.shape[1:])
            images = torch.zeros(shape, dtype=torch.uint8, device=batch.images.device)
            images = images.contiguous(memory_format=torch.channels_last)
        first = 0
        while first < len(batch):
            count = min(size - filled, len(batch) - first)
            taken = slice(first, first + count)
            images[filled : filled + count] = batch.images[taken]
            rows.append((batch.ids[taken], batch.views[taken]))
            first, filled = first + count, filled + count
            if filled == size:
                yield _network_batch(rows, images)
                rows, filled = [], 0
    if filled:
        yield _network_batch(rows, images)


def _network_batch(rows: list[tuple[Tensor, Tensor]], images: Tensor) -> NetworkBatch:
    ids, views = zip(*rows, strict=True)
    return NetworkBatch(ids=torch.cat(ids), views=torch.cat(views), images=images)


def gather_arrays(transport: Transport, work: Callable[[], Arrays]) -> list[Arrays] | None:
    """Return what each rank's work returned on rank 0, None elsewhere.

    A rank's failure is raised there and on rank 0: no rank waits for one that never comes.
    """
    try:
        payload = b"+" + pack_arrays(work())
    except Exception as error:
        transport.gather(_failure(error))
        raise
    payloads = transport.gather(payload)
    return None if payloads is None else _received(payloads)


def exchange_arrays(ranks: Ranks, work: Callable[[], list[Arrays]]) -> list[Arrays]:
    """Return the arrays that each rank's work has for this rank; `work` returns those for each rank.

    A rank's failure is raised there and on rank 0. The others have no arrays of it, and end when they next
    wait for one of the two: one report is enough.
    """
    try:
        parts = work()
        if ranks.world_size == 1:
            return parts
        payloads = [b"+" + pack_arrays(part) for part in parts]
    except Exception as error:
        ranks.exchange([_failure(error)] * ranks.world_size)
        raise
    received = ranks.exchange(payloads)
    return _received(received if ranks.rank == 0 else [each for each in received if each[:1] == b"+"])


def _failure(error: Exception) -> bytes:
    return b"-" + str(error).encode()


def _received(payloads: list[bytes]) -> list[Arrays]:
    """Return the arrays in the payloads of the ranks; raise the failure of the first rank that has one."""
    for rank, received in enumerate(payloads):
        if received[:1] == b"-":
            raise UserError(f"rank {rank}: {received[1:].decode()}")
    return [unpack_arrays(received[1:]) for received in payloads]


def concatenate(parts: Iterable[Arrays]) -> Arrays:
    """Return the arrays of all parts, one after the other, by name; parts without any arrays are skipped."""
    filled = [part for part in parts if part]
    return {name: np.concatenate([part[name] for part in filled]) for name in (filled[0] if filled else ())}
