"""Transforms of decoded images before they go into a batch, in training and in evaluation.

The config makes them, so importing this module imports no torch.
"""

# Shapes: S side of the view.

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from bigscl.common.user_error import UserError
from bigscl.data.augmentation import ColorJitter, RandomColors
from bigscl.data.crops import Box, RandomCrop, RandomErasing, View, ViewRow, whole
from bigscl.data.headers import check_pixels

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from bigscl.common import torch_later as torch

# Of the colours in ImageNet's images.
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
# The usual evaluation on ImageNet: the shorter side becomes 256, of which the central 224 are used.
USUAL_SHORTER, USUAL_SIZE = 256, 224
Interpolation = Literal["bilinear", "bicubic"]
Resize = Literal["square", "shorter"]
DecoderName = Literal["torchvision", "nvimgcodec"]


class Image(Protocol):
    """An image: a tensor uint8 [3,H,W], or a file of which only what is indexed is decoded."""

    @property
    def shape(self) -> tuple[int, ...]:
        """(3, H, W)."""
        ...

    def __getitem__(self, box: Any, /) -> Tensor:
        """Return uint8 [3,h,w] of `[:, top:bottom, left:right]`."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class TransformedImage:
    """The pixels that the network gets, and where in the image they come from."""

    pixels: Tensor
    """uint8 [3,S,S]."""
    view: ViewRow
    erased: Box = Box()  # noqa: RUF009


class Transform(Protocol):
    """Crops and resizes images, and may change their colours or erase boxes."""

    @property
    def size(self) -> int:
        """S."""
        ...

    @property
    def erases(self) -> bool:
        """Whether boxes may be erased."""
        ...

    def seen(self, sample_id: int, *, width: int, height: int) -> View:
        """Return the part of an image of this size that is needed."""
        ...

    def finish(self, pixels: Tensor, view: View, sample_id: int) -> TransformedImage:
        """Return the transformed image of the pixels of that part, uint8 [3,h,w], on their device."""
        ...


def transform_image(transform: Transform, image: Image, sample_id: int) -> TransformedImage:
    """Return the transformed image, uint8 [3,S,S], of an image uint8 [3,H,W]."""
    height, width = image.shape[1:]
    view = transform.seen(sample_id, width=width, height=height)
    return transform.finish(image[view.box], view, sample_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingTransform:
    """Draws a random view with random colours, different in each epoch."""

    size: int
    seed: int
    epoch: int
    crop: RandomCrop = field(default_factory=RandomCrop)
    color: ColorJitter | RandomColors | None = None
    erase: RandomErasing | None = None
    interpolation: Interpolation = "bilinear"

    @property
    def erases(self) -> bool:
        """Whether boxes may be erased."""
        return self.erase is not None

    def geometry(self, sample_id: int, *, width: int, height: int) -> tuple[ViewRow, Box]:
        """Return the view and the erased box of an image of this size, as in its TransformedImage."""
        view = self.seen(sample_id, width=width, height=height).fractions()
        box = None if self.erase is None else self.erase.box(self.size, **self._drawn(sample_id))
        return view, Box() if box is None else _shares(box, self.size)

    def seen(self, sample_id: int, *, width: int, height: int) -> View:
        return self.crop.view(**self._drawn(sample_id), width=width, height=height)

    def __call__(self, image: Image, sample_id: int) -> TransformedImage:
        """Return the image in the view and colours of this epoch."""
        return transform_image(self, image, sample_id)

    def _drawn(self, sample_id: int) -> dict[str, int]:
        """Return all that the random numbers of a sample depend on."""
        return {"seed": self.seed, "epoch": self.epoch, "sample_id": sample_id}

    def finish(self, pixels: Tensor, view: View, sample_id: int) -> TransformedImage:
        """Return the pixels of the view in its size and the colours of this epoch."""
        drawn = self._drawn(sample_id)
        pixels = resize(pixels, self.size, self.size, self.interpolation)
        pixels = pixels.flip(-1) if view.flip else pixels
        if self.color is not None:
            pixels = self.color(pixels, **drawn)
        if self.erase is None or (box := self.erase.box(self.size, **drawn)) is None:
            return TransformedImage(pixels, view.fractions())
        return TransformedImage(
            _painted(pixels, box, self.erase.color), view.fractions(), _shares(box, self.size)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationTransform:
    """Squashes the whole image to a square, or resizes its shorter side and crops the centre."""

    size: int
    resize: Resize = "square"
    shorter: int = 256
    """Length of the shorter side before the centre is cropped; only for `resize: shorter`."""
    interpolation: Interpolation = "bilinear"

    @property
    def erases(self) -> bool:
        """Never: evaluation erases nothing."""
        return False

    def __post_init__(self) -> None:
        if self.resize == "shorter" and self.shorter < self.size:
            raise UserError(
                f"shorter: {self.shorter}, expected at least size {self.size}, which is cropped from it"
            )

    def seen(self, sample_id: int, *, width: int, height: int) -> View:
        return whole(width, height)

    def __call__(self, image: Image, sample_id: int) -> TransformedImage:
        """Return the transformed image, in the same way for every sample."""
        return transform_image(self, image, sample_id)

    def finish(self, pixels: Tensor, view: View, sample_id: int) -> TransformedImage:
        """Return the whole image as a square, or the centre of the image in its new size."""
        if self.resize == "square":
            pixels = resize(pixels, self.size, self.size, self.interpolation)
            return TransformedImage(pixels, view.fractions())
        height, width = view.height, view.width
        scale = self.shorter / min(height, width)
        height, width = max(self.shorter, int(height * scale)), max(self.shorter, int(width * scale))
        # A line of pixels would become a huge square.
        check_pixels(width, height)
        top, left = round((height - self.size) / 2), round((width - self.size) / 2)
        resized = resize(pixels, height, width, self.interpolation)
        resized = resized[:, top : top + self.size, left : left + self.size]
        return TransformedImage(
            resized, ViewRow(left / width, top / height, self.size / width, self.size / height)
        )


def shorter_side(size: int) -> int:
    """Return the length of the shorter side from which `size` is cropped, in the usual proportion."""
    return -(-size * USUAL_SHORTER // USUAL_SIZE)


def resize(image: Tensor, height: int, width: int, interpolation: Interpolation = "bilinear") -> Tensor:
    """Return the image in another size, with antialiasing, on uint8 as torchvision does it."""
    rows, columns = image.shape[1:]
    if (rows, columns) == (height, width):
        return image
    if image.device.type != "cpu":
        return _resize_in_float(image, height, width, interpolation)
    pixels = image.permute(1, 2, 0).contiguous()
    # These strides make torch see a batch of one as channels last: 0.40 ms instead of 0.60 for a view of 224.
    batch = pixels.as_strided((1, 3, rows, columns), (pixels.numel(), 1, 3 * columns, 3))
    size = (height, width)
    return torch.nn.functional.interpolate(batch, size=size, mode=interpolation, antialias=True)[0]


def _resize_in_float(image: Tensor, height: int, width: int, interpolation: Interpolation) -> Tensor:
    """Resize on a device that has no antialiasing of uint8, as torchvision does there: rounded at the end."""
    batch = image[None].to(torch.float32)
    resized = torch.nn.functional.interpolate(
        batch, size=(height, width), mode=interpolation, antialias=True
    )[0]
    # Bicubic values go beyond those of the pixels.
    return resized.round_().clamp_(0, 255).to(torch.uint8)


def _painted(pixels: Tensor, box: tuple[int, int, int, int], color: tuple[int, int, int]) -> Tensor:
    left, top, width, height = box
    painted = pixels.clone()
    painted[:, top : top + height, left : left + width] = pixels.new_tensor(color)[:, None, None]
    return painted


def _shares(box: tuple[int, int, int, int], size: int) -> Box:
    return Box(*(pixels / size for pixels in box))
