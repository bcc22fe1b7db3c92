"""Rows of the memory on their way to the training device and back, without the step waiting for copies."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bigscl.store import Rows

Array = NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Memory:
    """What is remembered of a batch, on the training device; None for what the store's layout lacks."""

    scores: Tensor
    """float16 [B,L]"""
    visits: Tensor
    """[B]: epochs that have looked at the image so far."""
    heatmaps: Tensor | None
    """float16 [B,L,W,W], or [B,k,W,W] with `classes`."""
    classes: Tensor | None
    """int64 [B,k]"""
    counts: Tensor | None
    """uint8 [B,W,W]: looks at each cell; only for the debiased average."""


def allocate_pinned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """An array in page-locked memory, from which copies to a GPU are asynchronous."""
    # The array keeps the tensor alive; torch's allocator reuses the block only when its copies are done.
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()
    return pinned.view(dtype).reshape(shape)


def to_device(rows: Rows, device: torch.device) -> Memory:
    """The rows of a batch as tensors on the device."""

    def move(array: Array | None) -> Tensor | None:
        return None if array is None else torch.from_numpy(array).to(device, non_blocking=True)

    classes = None if rows.classes is None else rows.classes.astype(np.int64)
    scores, visits = move(rows.scores), move(rows.visited + 1)
    assert scores is not None
    assert visits is not None
    return Memory(
        scores=scores,
        visits=visits,
        heatmaps=move(rows.heatmaps),
        classes=move(classes),
        counts=move(rows.counts),
    )


def to_host(tensors: dict[str, Tensor]) -> tuple[dict[str, Array], Callable[[], object]]:
    """Arrays of the tensors' values, and a call that blocks until these are there."""
    device = next(iter(tensors.values())).device
    if device.type != "cuda":
        return {name: tensor.cpu().numpy() for name, tensor in tensors.items()}, lambda: None
    copies = {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
        for name, tensor in tensors.items()
    }
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record()
    return {name: copy.numpy() for name, copy in copies.items()}, copied.synchronize
