"""Rows of the store on their way to the training device and back; the step does not wait for the copies."""

# Shapes: B batch, L classes, W side of the heatmap, k classes with a heatmap.

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bigscl.selection.selection import Selection
from bigscl.store import Rows
from bigscl.training.annotated import AnnotatedClasses
from bigscl.training.recalled import CheckedViews, Recalled

Array = NDArray[Any]


def allocate_pinned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Return an array in page-locked memory, from which copies to a GPU are asynchronous."""
    # The array keeps the tensor alive; torch's allocator reuses the block only when its copies are done.
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()
    return pinned.view(dtype).reshape(shape)


def to_device(
    rows: Rows,
    sample_views: CheckedViews,
    selection: Selection,
    annotations: AnnotatedClasses,
    *,
    device: torch.device,
    momentum: float,
    source: object = None,
) -> Recalled:
    """Return the rows of a batch, and how it looks at them, as tensors on the device."""

    # As they are: a conversion on the host would make an unpinned copy, whose transfer blocks.
    def move(array: Array | Tensor) -> Tensor:
        return torch.as_tensor(array).to(device, non_blocking=True)

    assert rows.visits is not None
    return Recalled(
        rows=sample_views.rows,
        ids=move(sample_views.rows),
        views=move(sample_views.views),
        erased=None if sample_views.erased is None else move(sample_views.erased),
        selection=selection,
        scores=move(rows.scores),
        visits=move(rows.visits),
        heatmaps=None if rows.heatmaps is None else move(rows.heatmaps),
        classes=None if rows.classes is None else _as_int64(move(_signed(rows.classes)), rows.classes.dtype),
        counts=None if rows.counts is None else move(rows.counts),
        ranking=None if rows.ranking is None else move(rows.ranking),
        annotations=annotations,
        momentum=momentum,
        source=source,
    )


def _signed(array: Array) -> Array:
    """Return the bits of unsigned integers as signed ones, which every device can convert."""
    return array.view(np.dtype(f"i{array.dtype.itemsize}"))


def _as_int64(bits: Tensor, dtype: np.dtype[Any]) -> Tensor:
    return bits.long() & np.iinfo(dtype).max


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
