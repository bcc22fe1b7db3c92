"""Views: which part of an image training sees, as a pure function of (seed, epoch, sample id)."""

import math
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from bigscl.common.bounds import AreaRange, Range, Share

NUM_TRIES = 10


class Purpose(IntEnum):
    """What random numbers are drawn for; the numbers of different purposes are independent."""

    VIEW = 0
    COLOR = 1
    ERASE = 2


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
        """Where it is in an image [3,H,W]."""
        return slice(None), slice(self.top, self.top + self.height), slice(self.left, self.left + self.width)

    def fractions(self) -> tuple[float, float, float, float, float]:
        """Return (left, top, width, height, flip) in fractions of the image: a row of a batch's views."""
        return (
            self.left / self.image_width,
            self.top / self.image_height,
            self.width / self.image_width,
            self.height / self.image_height,
            float(self.flip),
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
