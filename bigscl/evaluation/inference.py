"""Predict every image of a set: the same bits for any batch size, worker count and number of processes.

The order of a convolution's sums depends on the shape of its input, so the last bits of an image's logits
would depend on the batch size. Here the network always gets batches of one shape, whatever the loader's
batches are; then an image's logits depend on the image alone. The number of CPU threads matters
too: the caller fixes it.
"""

# Shapes: B images in a network batch, n images of a part, S side of the images, L classes.

import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bigscl.common.user_error import UserError
from bigscl.data.loader import Batch, normalize
from bigscl.models.spatial import Prediction, SpatialClassifier, map_pooled
from bigscl.store import Transport

NETWORK_BATCH = 32
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


@torch.inference_mode()
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
    assert not model.training, "predict() takes a model in evaluation mode"

    def predict_batch(batch: NetworkBatch) -> Arrays:
        found: Prediction = model(normalize(batch.images.to(device), mean, std), maps=True)
        assert found.logit_map is not None
        measured = measure(batch, found.logit_map) if measure else {}
        poolings = {"logits": found.logits, "map_logits": map_pooled(found)}
        return {
            "ids": batch.ids.numpy(),
            **{name: logits[: len(batch.ids)].float().cpu().numpy() for name, logits in poolings.items()},
            **{MEASURED + name: values for name, values in measured.items()},
        }

    parts = gather_arrays(transport, lambda: concatenate(map(predict_batch, network_batches(loader))))
    if parts is None:
        return None
    whole = concatenate(parts)
    if not whole:
        raise UserError("no image could be read: nothing to predict. See the warnings above for the reasons.")
    order = np.argsort(whole["ids"])
    return Predictions(
        ids=whole.pop("ids")[order],
        logits=whole.pop("logits")[order],
        map_logits=whole.pop("map_logits")[order],
        measured={name.removeprefix(MEASURED): values for name, values in whole.items()},
    )


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
        payload = b"+" + _packed(work())
    except Exception as error:
        transport.gather(b"-" + str(error).encode())
        raise
    payloads = transport.gather(payload)
    if payloads is None:
        return None
    for rank, received in enumerate(payloads):
        if received[:1] == b"-":
            raise UserError(f"rank {rank}: {received[1:].decode()}")
    return [_unpacked(received[1:]) for received in payloads]


def concatenate(parts: Iterable[Arrays]) -> Arrays:
    """Return the arrays of all parts, one after the other, by name; parts without any arrays are skipped."""
    filled = [part for part in parts if part]
    return {name: np.concatenate([part[name] for part in filled]) for name in (filled[0] if filled else ())}


def _packed(arrays: Arrays) -> bytes:
    file = io.BytesIO()
    np.savez(file, **arrays)  # type: ignore[arg-type]  # to mypy an array may be its option
    return file.getvalue()


def _unpacked(payload: bytes) -> Arrays:
    with np.load(io.BytesIO(payload), allow_pickle=False) as arrays:
        return dict(arrays)
