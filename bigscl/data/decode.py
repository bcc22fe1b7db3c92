"""Decode image files: each gives an upright RGB image, or the reason why it cannot be decoded."""

import io
from collections.abc import Callable
from functools import cache
from importlib import import_module

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from bigscl.data.headers import FORMATS, check_header, check_pixels
from bigscl.data.sources import Unreadable

RGB = 3  # torchvision.io.ImageReadMode.RGB


@cache
def jpeg_decoder() -> Callable[..., Tensor] | None:
    """Return the operator below torchvision.io.decode_jpeg; None if there is none: Pillow decodes then.

    Since torchvision 0.29 that function warns at each call that TorchCodec will replace it. Importing
    torchvision takes seconds: that happens with the first image, or before workers are forked.
    """
    import_module("torchvision.io")
    return getattr(torch.ops.image, "decode_jpeg", None)


def decode(data: bytearray) -> Tensor:
    """Return uint8 `[3,H,W]`, RGB, turned upright by its EXIF orientation, channels last in memory.

    Grayscale and CMYK become RGB, palettes are resolved, transparency is dropped, 16 bits become 8. Raises
    Unreadable for truncated or broken files, for other formats, and for images of more than MAX_PIXELS.
    """
    size_is_known = check_header(data)
    decode_jpeg = jpeg_decoder() if size_is_known and data[:3] == b"\xff\xd8\xff" else None
    if decode_jpeg is not None:
        try:
            return decode_jpeg(torch.frombuffer(data, dtype=torch.uint8), RGB, True)
        except RuntimeError:
            # Pillow decodes some rare variants; for a broken file its message is better, too.
            pass
    return _decode_with_pillow(data)


def _decode_with_pillow(data: bytearray) -> Tensor:
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            check_pixels(*image.size)
            upright = _to_rgb(ImageOps.exif_transpose(image))
    except Unreadable:
        raise
    except UnidentifiedImageError as error:
        raise Unreadable(f"cannot be decoded: it is none of {', '.join(FORMATS)}") from error
    except Exception as error:  # A broken file can make Pillow's plugins raise anything.
        raise Unreadable(f"cannot be decoded: {str(error) or type(error).__name__}") from error
    return torch.from_numpy(np.array(upright)).permute(2, 0, 1)


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):
        high_byte = np.asarray(image).astype(np.int64) >> 8
        image = Image.fromarray(high_byte.clip(0, 255).astype(np.uint8))
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return image.convert("RGB")
