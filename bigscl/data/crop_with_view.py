"""A random crop for other people's pipelines that also says where in the image it is."""

from typing import Any

import torch
from torch import Tensor

from bigscl.common.user_error import UserError


class RandomResizedCropWithView:
    """Torchvision's RandomResizedCrop and RandomHorizontalFlip, which returns (image, view).

    The image is a PIL image or a tensor [...,H,W]. The view is float32 [5]: left, top, width and height in
    fractions of the image, and 1 where it is mirrored. Transforms that follow must move no pixel.
    """

    def __init__(
        self,
        size: int,
        *,
        scale: tuple[float, float] = (0.08, 1.0),
        ratio: tuple[float, float] = (3 / 4, 4 / 3),
        flip: float = 0.5,
        interpolation: str = "bilinear",
        antialias: bool = True,
    ) -> None:
        """`flip` is the share of views that are mirrored; `interpolation` as in torchvision's enum."""
        from torchvision.transforms import InterpolationMode

        if not 0 <= flip <= 1:
            raise UserError(f"flip: found {flip}, expected a share in 0 to 1")
        self.size, self.scale, self.ratio, self.flip = size, scale, ratio, flip
        self.interpolation, self.antialias = InterpolationMode(interpolation), antialias

    def __call__(self, image: Any) -> tuple[Any, Tensor]:
        """Return a random part of the image in the size, and the view of it."""
        from torchvision.transforms import RandomResizedCrop
        from torchvision.transforms.v2 import functional as F

        image_height, image_width = F.get_size(image)
        top, left, height, width = RandomResizedCrop.get_params(image, list(self.scale), list(self.ratio))
        mirrored = torch.rand(()).item() < self.flip
        pixels = F.resized_crop(
            image, top, left, height, width, [self.size] * 2, self.interpolation, self.antialias
        )
        view = (left / image_width, top / image_height, width / image_width, height / image_height)
        return F.horizontal_flip(pixels) if mirrored else pixels, torch.tensor([*view, float(mirrored)])
