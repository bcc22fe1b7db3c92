"""What a network says of every image of a set: the same to the last bit however the set is dealt out.

How convolutions sum depends on the shape of what they get, so the last bits of an image's logits would depend
on the batch it came in. Here the network always gets batches of one shape, whatever the loader's; then an
image's logits depend on the image alone. One thing stays the caller's: the number of CPU threads.
"""

# Shapes: B images in a network batch, n images of a part, S side of the images, L classes.

import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from bigscl.data.batch import Batch, normalize
from bigscl.store import Transport

NETWORK_BATCH = 32
Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Predictions:
    """The logits of every image that could be read, in the order of their ids."""

    ids: NDArray[np.int64]
    """[n], ascending, each once."""
    logits: NDArray[np.float32]
    """[n,L]."""


@torch.inference_mode()
def predict(
    model: nn.Module,
    loader: Iterable[Batch],
    device: torch.device | str,
    *,
    mean: Sequence[float],
    std: Sequence[float],
    transport: Transport,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Predictions | None:
    """Predictions of all ranks' images on rank 0, None on the others.

    The model is the bare SpatialClassifier, in evaluation mode. Ranks may have different numbers of batches,
    or none: they meet only at the end.
    """
    assert not model.training, "predict() takes a model in evaluation mode"

    def own_part() -> Arrays:
        ids, logits = [], []
        for part in network_batches(loader):
            with autocast():
                found = model(normalize(part.images.to(device), mean, std)).logits
            ids.append(part.ids.numpy())
            logits.append(found[: len(part.ids)].float().cpu().numpy())
        return _joined({"ids": ids, "logits": logits})

    parts = gather_arrays(transport, own_part)
    if parts is None:
        return None
    whole = _joined({name: [part[name] for part in parts if part] for name in ("ids", "logits")})
    if not whole:
        raise ValueError(
            "no image could be read: nothing to predict. See the warnings above for the reasons."
        )
    order = np.argsort(whole["ids"])
    return Predictions(ids=whole["ids"][order], logits=whole["logits"][order])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NetworkBatch:
    """Images in a batch of fixed shape."""

    ids: Tensor
    """int64 [n], of the first n images; what is behind them means nothing."""
    views: Tensor
    """float32 [n,5]."""
    images: Tensor
    """uint8 [B,3,S,S], channels last; overwritten when the next batch is asked for."""


def network_batches(loader: Iterable[Batch], size: int = NETWORK_BATCH) -> Iterator[NetworkBatch]:
    """The loader's images in batches of `size`; only the last is not full, and it has that shape too."""
    images = torch.empty(0)
    rows: list[tuple[Tensor, Tensor]] = []
    filled = 0
    for batch in loader:
        if not len(images):
            shape = (size, *batch.images.shape[1:])
            images = torch.zeros(shape, dtype=torch.uint8).contiguous(memory_format=torch.channels_last)
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
    """What each rank's work gave, on rank 0; None elsewhere. A rank's failure is raised there and on rank 0.

    So the ranks that are done do not wait for one that never comes.
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
            raise ValueError(f"rank {rank}: {received[1:].decode()}")
    return [_unpacked(received[1:]) for received in payloads]


def _joined(parts: dict[str, list[NDArray[Any]]]) -> Arrays:
    """Each list as one array; nothing at all of no parts."""
    return {name: np.concatenate(arrays) for name, arrays in parts.items() if arrays}


def _packed(arrays: Arrays) -> bytes:
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, **arrays)
    return file.getvalue()


def _unpacked(payload: bytes) -> Arrays:
    with np.load(io.BytesIO(payload), allow_pickle=False) as arrays:
        return dict(arrays)
