"""Pixels from bytes: every image file gets a defined answer, an upright RGB image or the reason why not."""

import io
import struct
from collections.abc import Callable
from functools import cache
from importlib import import_module

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from bigscl.data.sources import Unreadable

# Pillow's own limit, beyond which it warns of a decompression bomb.
MAX_PIXELS = 89_478_485
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
RGB = 3  # torchvision.io.ImageReadMode.RGB


@cache
def jpeg_decoder() -> Callable[..., Tensor] | None:
    """The operator below torchvision.io.decode_jpeg; None where there is none, and Pillow decodes JPEG too.

    Since torchvision 0.29 that function says at each call that it will leave in favour of TorchCodec.
    Importing torchvision takes seconds: that happens with the first image, or before workers are forked.
    """
    import_module("torchvision.io")
    return getattr(torch.ops.image, "decode_jpeg", None)


def decode(data: bytearray) -> Tensor:
    """uint8 `[3,H,W]`, RGB, turned upright by its EXIF orientation, channels last in memory.

    Grayscale and CMYK become RGB, palettes are resolved, transparency is dropped, 16 bits become 8. Raises
    Unreadable for truncated or broken files, for other formats, and for images of more than MAX_PIXELS.
    """
    decode_jpeg = jpeg_decoder() if data[:3] == b"\xff\xd8\xff" else None
    if decode_jpeg is not None:
        _check_size(*_jpeg_size(data))
        try:
            return decode_jpeg(torch.frombuffer(data, dtype=torch.uint8), RGB, True)
        except RuntimeError:
            # Rare variants that Pillow knows; for a broken file its message is the better one, too.
            pass
    return _decode_with_pillow(data)


def _decode_with_pillow(data: bytearray) -> Tensor:
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            _check_size(*image.size)
            upright = _to_rgb(ImageOps.exif_transpose(image))
    except Unreadable:
        raise
    except UnidentifiedImageError as error:
        raise Unreadable(f"cannot be decoded: it is none of {', '.join(FORMATS)}") from error
    except Exception as error:  # Pillow's plugins raise whatever a broken file makes them trip over.
        raise Unreadable(f"cannot be decoded: {str(error) or type(error).__name__}") from error
    return torch.from_numpy(np.array(upright)).permute(2, 0, 1)


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):
        high_byte = np.asarray(image).astype(np.int64) >> 8
        image = Image.fromarray(high_byte.clip(0, 255).astype(np.uint8))
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return image.convert("RGB")


def _check_size(width: int, height: int) -> None:
    if width * height > MAX_PIXELS:
        raise Unreadable(f"{width} x {height} pixels, more than the {MAX_PIXELS} that are decoded")


def _jpeg_size(data: bytearray) -> tuple[int, int]:
    """(width, height) that the frame header of a JPEG states; (0, 0) if there is none."""
    position = 2
    while position + 9 <= len(data) and data[position] == 0xFF:
        marker = data[position + 1]
        # Start of frame, except for the three markers in that range which are tables.
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            height, width = struct.unpack_from(">HH", data, position + 5)
            return width, height
        length = 0 if marker == 0xFF else struct.unpack_from(">H", data, position + 2)[0] + 1
        position += 1 + length
    return 0, 0
