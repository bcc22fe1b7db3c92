"""Random colours, drawn by (seed, epoch, sample id) like the views. Off by default.

The config holds these values, so importing this module imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any

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
        """Return the image with changed colours."""
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
        """Return the image after some operations."""
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
