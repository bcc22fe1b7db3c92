"""Random colours, Mixup and CutMix, drawn by (seed, epoch, sample id) like the views. Off by default.

The config holds these values, so importing this module imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from bigscl.common.bounds import Count, NonNegative, Share
from bigscl.common.user_error import UserError
from bigscl.data.crops import Purpose, uniforms

if TYPE_CHECKING:
    from torch import Tensor

NUM_MAGNITUDES = 31


@cache
def _F() -> Any:  # noqa: N802
    """Torchvision's functions, imported when the first image is changed: the import takes seconds."""
    return import_module("torchvision.transforms.v2.functional")


@dataclass(frozen=True, slots=True, kw_only=True)
class ColorJitter:
    """Random brightness, contrast, saturation and hue, in random order, as torchvision's ColorJitter."""

    brightness: NonNegative = 0.0
    """Largest change of the brightness, whose factor is 1 for no change."""
    contrast: NonNegative = 0.0
    """Largest change of the contrast, whose factor is 1 for no change."""
    saturation: NonNegative = 0.0
    """Largest change of the saturation, whose factor is 1 for no change."""
    hue: Annotated[float, Field(ge=0, le=0.5)] = 0.0
    """Largest turn of the hue, as a fraction of the colour circle."""

    def __call__(self, image: Tensor, *, seed: int, epoch: int, sample_id: int) -> Tensor:
        random = uniforms(seed, epoch, sample_id, Purpose.COLOR, 8)
        changes = [
            lambda image: _F().adjust_brightness(image, _factor(random[0], self.brightness)),
            lambda image: _F().adjust_contrast(image, _factor(random[1], self.contrast)),
            lambda image: _F().adjust_saturation(image, _factor(random[2], self.saturation)),
            lambda image: _F().adjust_hue(image, (2 * random[3] - 1) * self.hue),
        ]
        strengths = (self.brightness, self.contrast, self.saturation, self.hue)
        for change in sorted(range(4), key=lambda change: random[4 + change]):
            if strengths[change]:
                image = changes[change](image)
        return image


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomColors:
    """RandAugment, restricted to the operations that move no pixel."""

    num_operations: Count = 2
    """Operations per image."""
    magnitude: Annotated[int, Field(ge=0, lt=NUM_MAGNITUDES)] = 9
    """Strength of the operations, 0 to 30 as in torchvision."""
    probability: Share = 1.0
    """Probability with which each of the operations is applied: 1 in torchvision, 0.5 in timm."""
    operations: tuple[str, ...] = ()
    """Names of the operations to draw from. Default: all of identity, brightness, color, contrast, sharpness,
    posterize, solarize, autocontrast, equalize."""

    def __post_init__(self) -> None:
        for name in self.operations:
            if name in GEOMETRIC:
                raise UserError(
                    f"operations: {name} moves pixels, and the heatmaps of the memory follow crops and flips "
                    f"only. Leave it out"
                )
            if name not in OPERATIONS:
                raise UserError(f"operations: found {name!r}, expected some of {', '.join(OPERATIONS)}")

    def __call__(self, image: Tensor, *, seed: int, epoch: int, sample_id: int) -> Tensor:
        count, names = self.num_operations, self.operations or tuple(OPERATIONS)
        random = uniforms(seed, epoch, sample_id, Purpose.COLOR, 3 * count)
        strength = self.magnitude / (NUM_MAGNITUDES - 1)
        for number in range(count):
            if random[2 * count + number] < self.probability:
                operation = OPERATIONS[names[int(random[2 * number] * len(names))]]
                image = operation(image, strength if random[2 * number + 1] < 0.5 else -strength)
        return image


# Strength in -1..1; operations without a direction ignore its sign.
OPERATIONS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "identity": lambda image, strength: image,
    "brightness": lambda image, strength: _F().adjust_brightness(image, 1 + 0.9 * strength),
    "color": lambda image, strength: _F().adjust_saturation(image, 1 + 0.9 * strength),
    "contrast": lambda image, strength: _F().adjust_contrast(image, 1 + 0.9 * strength),
    "sharpness": lambda image, strength: _F().adjust_sharpness(image, 1 + 0.9 * strength),
    "posterize": lambda image, strength: _F().posterize(image, 8 - round(4 * abs(strength))),
    "solarize": lambda image, strength: _F().solarize(image, 255 * (1 - abs(strength))),
    "autocontrast": lambda image, strength: _F().autocontrast(image),
    "equalize": lambda image, strength: _F().equalize(image),
}
GEOMETRIC = ("rotate", "shear_x", "shear_y", "translate_x", "translate_y")
"""RandAugment's other operations, which are refused."""


def _factor(random: float, strength: float) -> float:
    """Return a factor between max(0, 1 - strength) and 1 + strength."""
    low = max(0.0, 1 - strength)
    return low + random * (1 + strength - low)


# Mixup and CutMix: how much of each image of a batch is its neighbour's. These are neighbours in pairs: the
# first and the second, the third and the fourth. Shapes: B samples of a batch.


Alpha = Annotated[float, Field(ge=0, le=1)]
NUM_TRIES = 16
"""Of draws of a Beta distribution, at least half of which are taken: all fail once in 65,000 times."""
NUM_UNIFORMS = 4 + 2 * NUM_TRIES
Numbers = NDArray[np.float64]


class MixRow(NamedTuple):
    """How an image is mixed, a row of a batch's `mix`. Default: not at all."""

    share: float = 1.0
    """Weight of the image's own labels; the rest is that of its neighbour's."""
    left: float = 0.0
    """The box, in fractions of the view, that shows the neighbour. No box: all pixels are blended."""
    top: float = 0.0
    width: float = 0.0
    height: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixing:
    """Mixup and CutMix between neighbours in a batch."""

    mixup: Alpha = 0.0
    """Mixup: parameter of the Beta distribution of the image's share; 0: none. The memory skips the image."""
    cutmix: Alpha = 0.0
    """CutMix: the same of the area that is kept; 0: none. The pasted box is left out of the memory."""
    probability: Share = 1.0
    """Share of the images that are mixed."""
    cutmix_share: Share = 0.5
    """Share of the mixed images that have CutMix, if there is Mixup too."""

    def rows(self, ids: Sequence[int], *, size: int, seed: int, epoch: int) -> NDArray[np.float32]:
        """Return a `MixRow` for each image of a batch, [B,5]; it depends on these arguments alone."""
        rows = np.tile(np.array(MixRow(), np.float32), (len(ids), 1))
        # An odd batch has one without a neighbour. One generator serves the batch: a sample comes once per
        # epoch, so its first id names it.
        paired = len(ids) - len(ids) % 2
        if not paired:
            return rows
        drawn = uniforms(seed, epoch, ids[0], Purpose.MIX, paired * NUM_UNIFORMS)
        random = np.array(drawn).reshape(paired, NUM_UNIFORMS)
        is_mixed, draws = random[:, 0] < self.probability, random[:, 4:]
        cut_share = self.cutmix_share if self.mixup and self.cutmix else float(self.cutmix > 0)
        is_cut = is_mixed & (random[:, 1] < cut_share)
        if self.mixup:
            rows[:paired, 0] = np.where(is_mixed, beta(self.mixup, draws), 1.0)
        if self.cutmix:
            boxes = pasted_boxes(beta(self.cutmix, draws), random[:, 2:4], size) / size
            kept = 1 - boxes[:, 2] * boxes[:, 3]
            rows[:paired][is_cut] = np.column_stack([kept, boxes])[is_cut]
        return rows


def beta(alpha: float, uniform: Numbers) -> Numbers:
    """Return numbers of the Beta distribution with both parameters `alpha`, one for each row of uniform ones.

    Johnk's way: of pairs (u, v) take the first with x + y <= 1, x = u^(1/alpha) and y = v^(1/alpha); the
    number is x / (x + y). In logarithms, as x may be far below the smallest number that is not 0.
    """
    # Never log 0.
    log_x, log_y = np.log(uniform.reshape(len(uniform), -1, 2).clip(2.0**-54)).transpose(2, 0, 1) / alpha
    first = (np.logaddexp(log_x, log_y) <= 0).argmax(1)
    places = np.arange(len(uniform))
    # Far apart they are 0 and 1.
    apart = (log_y - log_x)[places, first].clip(-700, 700)
    return np.asarray(1 / (1 + np.exp(apart)))


def pasted_boxes(kept: Numbers, centres: Numbers, size: int) -> NDArray[Any]:
    """Return boxes in pixels of area `1 - kept` around centres, cut off at the edge as by the paper."""
    side = (size * np.sqrt(1 - kept)).astype(np.int64)[:, None]
    middle = (centres * size).astype(np.int64)
    start, end = (middle - side // 2).clip(0, size), (middle + side // 2).clip(0, size)
    return np.concatenate([start, end - start], 1)
