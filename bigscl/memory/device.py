"""Copies between the host and the training device that the step does not wait for; labels on the device."""

# Shapes: B batch, L classes.

from collections.abc import Callable
from copy import copy
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bigscl.store import Annotations

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


class AnnotatedClasses:
    """The annotated positives of all rows, on one device."""

    def __init__(
        self, annotations: Annotations, device: torch.device, started: Annotations | None = None
    ) -> None:
        """`started` are those whose heatmaps started at 1, if these are others."""
        self._started = None if started is None else AnnotatedClasses(started, device)
        self._num_classes = annotations.num_classes
        self._offsets = torch.from_numpy(annotations.offsets).to(device)
        # One entry more, which rows past the last positive may read.
        classes = torch.from_numpy(annotations.classes).to(torch.int32)
        self._classes = torch.cat([classes, classes.new_zeros(1)]).to(device)
        most = int((annotations.offsets[1:] - annotations.offsets[:-1]).max(initial=0))
        self._places = torch.arange(most, device=device)

    def to(self, device: torch.device) -> "AnnotatedClasses":
        """Return the same on another device."""
        moved = copy(self)
        moved._offsets, moved._classes = self._offsets.to(device), self._classes.to(device)
        moved._places = self._places.to(device)
        moved._started = None if self._started is None else self._started.to(device)
        return moved

    def of(self, ids: Tensor) -> Tensor:
        """Return the annotated positives of some rows, bool [B,L]; the host does not wait for the device."""
        first, end = self._offsets[ids], self._offsets[ids + 1]
        places = first[:, None] + self._places
        found = self._classes[places.clamp(max=len(self._classes) - 1)].long()
        # A column more for the places that are not the row's own.
        mask = torch.zeros(len(ids), self._num_classes + 1, dtype=torch.bool, device=ids.device)
        mask.scatter_(1, torch.where(places < end[:, None], found, self._num_classes), True)
        return mask[:, :-1]

    def started(self, ids: Tensor) -> Tensor:
        """Return those whose heatmaps started at 1, bool [B,L]."""
        return (self._started or self).of(ids)
