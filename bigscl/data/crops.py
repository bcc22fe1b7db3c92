"""Views: which part of an image training sees, as a pure function of (seed, epoch, sample id).

This module defines the numbers of a view; others use them by name. The config holds the random crops, so
importing it imports no torch.
"""

# Shapes: B samples of a batch.

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bigscl.common.bounds import AreaRange, Positive, Range, Share
from bigscl.common.user_error import UserError

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from bigscl.common import torch_later as torch

NUM_TRIES = 10


class Box(NamedTuple):
    """A box in fractions of the view, a row of a batch's erased boxes; all 0: none."""

    left: float = 0.0
    top: float = 0.0
    width: float = 0.0
    height: float = 0.0


class ViewRow(NamedTuple):
    """A view in fractions of the image, a row of a batch's views; its box comes first. Default: all of it."""

    left: float = 0.0
    top: float = 0.0
    width: float = 1.0
    height: float = 1.0
    flip: float = 0.0


MEANING = {
    Box: "left, top, width, height as fractions in 0 to 1 of the view",
    ViewRow: "left, top, width, height as fractions in 0 to 1 of the image, and 1 where mirrored, else 0",
}


def box_origins(boxes: Tensor) -> Tensor:
    """Return (left, top) of views or boxes, [B,2]."""
    return boxes[:, 0:2]


def box_extents(boxes: Tensor) -> Tensor:
    """Return (width, height) of views or boxes, [B,2]."""
    return boxes[:, 2:4]


def view_flips(views: Tensor) -> Tensor:
    """Return 1 for mirrored views and 0 for others, [B]."""
    return views[:, ViewRow._fields.index("flip")]


def stack_rows(row_type: type[ViewRow] | type[Box], rows: Iterable[tuple[float, ...]]) -> Tensor:
    """Return rows as float32 [B,number of fields]."""
    return torch.tensor(list(rows), dtype=torch.float32).reshape(-1, len(row_type._fields))


def check_rows(
    name: str,
    row_type: type[ViewRow] | type[Box],
    boxes: Tensor | NDArray[np.floating[Any]] | Sequence[Sequence[float]],
    count: int,
) -> Tensor:
    """Return views or erased boxes as float32 [B,number of fields]; UserError if they are none."""
    rows = torch.as_tensor(boxes, dtype=torch.float32)
    shape = [count, len(row_type._fields)]
    if count == 0 and rows.numel() == 0:
        return rows.reshape(shape)
    if list(rows.shape) != shape:
        raise UserError(f"{name}: found {list(rows.shape)}, expected {shape}, one row per sample")
    # Values on a GPU are not read back: the host would wait for it.
    if rows.device.type == "cpu" and (bad := ~_fits(rows, row_type)).any():
        row = [round(value, 4) for value in rows[bad][0].tolist()]
        raise UserError(f"{name}: found {row}, expected {MEANING[row_type]}")
    return rows


def _fits(rows: Tensor, row_type: type[ViewRow] | type[Box]) -> Tensor:
    """Return which boxes lie within the unit square, but for rounding; views must not be empty. [B]"""
    starts, sizes = box_origins(rows), box_extents(rows)
    fits = (starts >= 0).all(1) & (sizes >= 0).all(1) & (starts + sizes <= 1 + 1e-4).all(1)
    if row_type is ViewRow:
        fits &= ((view_flips(rows) == 0) | (view_flips(rows) == 1)) & (sizes > 0).all(1)
    return fits


class Purpose(IntEnum):
    """The use of random numbers; those of different purposes are independent."""

    VIEW = 0
    COLOR = 1
    ERASE = 2
    MIX = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A pixel box of an image, and whether it is mirrored."""

    left: int
    top: int
    width: int
    height: int
    flip: bool
    image_width: int
    image_height: int

    @property
    def box(self) -> tuple[slice, slice, slice]:
        """Index of its pixels in an image [3,H,W]."""
        return slice(None), slice(self.top, self.top + self.height), slice(self.left, self.left + self.width)

    def fractions(self) -> ViewRow:
        """Return the view in fractions of the image."""
        return ViewRow(
            left=self.left / self.image_width,
            top=self.top / self.image_height,
            width=self.width / self.image_width,
            height=self.height / self.image_height,
            flip=float(self.flip),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomCrop:
    """Training views: the distribution of torchvision's RandomResizedCrop, and mirroring."""

    scale: AreaRange = (0.08, 1.0)
    """Smallest and largest share of the image's area."""
    ratio: Range = (3 / 4, 4 / 3)
    """Smallest and largest width / height."""
    flip: Share = 0.5
    """Share of the views that are mirrored left to right."""
    squash: bool = False
    """Draw the box on the image squashed to a square (COCO, VOC), not on the image as it is."""

    def view(self, *, seed: int, epoch: int, sample_id: int, width: int, height: int) -> View:
        """Return the view of one image in one epoch: the same on any rank and worker, and after a restart."""
        random = uniforms(seed, epoch, sample_id, Purpose.VIEW, 2 * NUM_TRIES + 3)
        flip = random[0] < self.flip
        if self.squash:
            side = max(width, height)
            left, top, box_width, box_height = _box(random[1:], side, side, self.scale, self.ratio)
            left, box_width = _stretch(left, box_width, width / side)
            top, box_height = _stretch(top, box_height, height / side)
        else:
            left, top, box_width, box_height = _box(random[1:], width, height, self.scale, self.ratio)
        return View(
            left=left,
            top=top,
            width=box_width,
            height=box_height,
            flip=flip,
            image_width=width,
            image_height=height,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomErasing:
    """Random erasing with torchvision's distribution; erased cells are left out of the heatmaps' averages."""

    probability: Share = 0.5
    """Share of the views in which a box is erased."""
    scale: tuple[Positive, Positive] = (0.02, 0.33)
    """Smallest and largest share of the view's area."""
    ratio: ClassVar[tuple[float, float]] = (0.3, 3.3)
    """Smallest and largest height / width."""
    color: ClassVar[tuple[int, int, int]] = (124, 116, 104)
    """ImageNet's mean."""

    def box(self, size: int, *, seed: int, epoch: int, sample_id: int) -> tuple[int, int, int, int] | None:
        """Return (left, top, width, height) in pixels of a view of this size; None if nothing is erased."""
        random = uniforms(seed, epoch, sample_id, Purpose.ERASE, 3 + 2 * NUM_TRIES)
        if random[0] >= self.probability:
            return None
        low, high = math.log(self.ratio[0]), math.log(self.ratio[1])
        for attempt in range(NUM_TRIES):
            area = size**2 * (self.scale[0] + random[3 + 2 * attempt] * (self.scale[1] - self.scale[0]))
            aspect = math.exp(low + random[4 + 2 * attempt] * (high - low))
            height, width = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
            if 0 < width < size and 0 < height < size:
                return (
                    int(random[1] * (size - width + 1)),
                    int(random[2] * (size - height + 1)),
                    width,
                    height,
                )
        return None


def whole(width: int, height: int) -> View:
    """Return the view of the whole image, not mirrored."""
    return View(left=0, top=0, width=width, height=height, flip=False, image_width=width, image_height=height)


def uniforms(seed: int, epoch: int, sample_id: int, purpose: Purpose, count: int) -> list[float]:
    """Return `count` numbers in [0, 1) that depend on the arguments alone.

    Philox is counter-based: it gives any sample's numbers without those of the samples before it. Its raw
    output is fixed by definition, so views are the same in all versions of numpy.
    """
    key: NDArray[np.uint64] = np.array([seed, epoch], dtype=np.uint64)
    # The first word counts the blocks drawn from this position on.
    counter: NDArray[np.uint64] = np.array([0, purpose, sample_id, 0], dtype=np.uint64)
    raw = np.random.Philox(key=key, counter=counter).random_raw(count)
    uniform: list[float] = ((raw >> np.uint64(11)) * 2.0**-53).tolist()
    return uniform


def _box(
    random: list[float], width: int, height: int, scale: tuple[float, float], ratio: tuple[float, float]
) -> tuple[int, int, int, int]:
    """Return (left, top, width, height) of a random crop, or of the central one if no try fits the image."""
    low, high = math.log(ratio[0]), math.log(ratio[1])
    for attempt in range(NUM_TRIES):
        area = width * height * _between(random[2 + 2 * attempt], *scale)
        aspect = math.exp(_between(random[3 + 2 * attempt], low, high))
        box_width, box_height = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < box_width <= width and 0 < box_height <= height:
            left = int(random[0] * (width - box_width + 1))
            top = int(random[1] * (height - box_height + 1))
            return left, top, box_width, box_height
    return central_box(width, height, ratio)


def central_box(width: int, height: int, ratio: tuple[float, float]) -> tuple[int, int, int, int]:
    """Return (left, top, width, height) of the largest central box whose aspect ratio is in `ratio`."""
    box_width, box_height = width, height
    if width / height < ratio[0]:
        box_height = max(1, round(width / ratio[0]))
    elif width / height > ratio[1]:
        box_width = max(1, round(height * ratio[1]))
    return (width - box_width) // 2, (height - box_height) // 2, box_width, box_height


def _between(uniform: float, low: float, high: float) -> float:
    return low + uniform * (high - low)


def _stretch(start: int, length: int, factor: float) -> tuple[int, int]:
    """Return (start, length) of an interval scaled to other pixels, at least one pixel long."""
    first, end = round(start * factor), round((start + length) * factor)
    if end == first:
        first = min(first, max(0, math.ceil(factor * (start + length)) - 1))
        end = first + 1
    return first, end - first
