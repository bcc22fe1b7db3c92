"""The batch of a training step: ids, images, labels and views of some samples, as tensors."""

# Shapes: B samples of the batch, L classes, S side of the images.

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor


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
    """float32 [B,5]: left, top, width, height in fractions of the image, and 1 where mirrored."""
    erased: Tensor | None = None
    """float32 [B,4]: left, top, width, height of the erased box in fractions of the view; None if no box
    can be erased."""
    skipped: Tensor
    """int64: ids that the plan has for this batch but that could not be read."""
    reasons: tuple[str, ...] = ()
    """Why, one for each skipped id."""

    def __len__(self) -> int:
        return len(self.ids)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Batch":
        """Return the batch with its tensors on a device."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "Batch":
        """Return the batch in page-locked memory, from which copies to a GPU are asynchronous."""
        return self._map(Tensor.pin_memory)

    def _map(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        changed: dict[str, Any] = {name: change(v) for name, v in values.items() if isinstance(v, Tensor)}
        return replace(self, **changed)


def normalize(
    images: Tensor, mean: Sequence[float], std: Sequence[float], dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return `(images / 255 - mean) / std` per channel, on the images' device and in their memory format."""
    # One multiplication and one addition per pixel.
    factor, offset = _factor_and_offset(tuple(mean), tuple(std), images.device)
    return images.to(torch.float32).mul_(factor[:, None, None]).add_(offset[:, None, None]).to(dtype)


@cache
def _factor_and_offset(
    mean: tuple[float, ...], std: tuple[float, ...], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Made once: values that are copied to a GPU at every step would make the host wait for it."""
    factor = 1 / (255 * torch.tensor(std, dtype=torch.float32, device=device))
    return factor, -255 * torch.tensor(mean, dtype=torch.float32, device=device) * factor
