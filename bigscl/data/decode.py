"""Decode image files: each gives an upright RGB image, or the reason why it cannot be decoded.

`data.decoder` names the decoder: torchvision's decodes whole images, nvImageCodec's only the box of a JPEG
that a view needs, on the CPU.
"""

import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from bigscl.common.user_error import UserError
from bigscl.data.headers import FORMATS, check_header, check_pixels, plain_jpeg_size
from bigscl.data.open_tar import Unreadable
from bigscl.data.transforms import DecoderName
from bigscl.data.transforms import Image as DecodedImage

Decode = Callable[[bytearray], DecodedImage]
"""Returns the upright RGB image of a file; raises Unreadable, here or where the image is indexed."""

RGB = 3  # torchvision.io.ImageReadMode.RGB


def find_decoder(name: DecoderName) -> Decode:
    """Return a decoder and import its library; UserError if that is not installed."""
    # Of both: nvImageCodec leaves some files to the other.
    jpeg_decoder()
    if name == "torchvision":
        return decode
    load_library()
    return open_regions


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


# Boxes of JPEGs


class JpegRegions:
    """An image file as `decode` returns it, of which only the box that is asked for is decoded."""

    def __init__(self, data: bytearray, width: int, height: int) -> None:
        self._data = data
        self.shape = (3, height, width)

    def __getitem__(self, box: tuple[slice, slice, slice]) -> Tensor:
        """Return uint8 `[3,h,w]`, channels last in memory, of `[:, top:bottom, left:right]`."""
        top, bottom, _ = box[1].indices(self.shape[1])
        left, right, _ = box[2].indices(self.shape[2])
        pixels = _decode_box(self._data, left, top, right, bottom)
        return decode(self._data)[box] if pixels is None else pixels


def open_regions(data: bytearray) -> Tensor | JpegRegions:
    """Return an image whose boxes are decoded when they are needed; the whole image if that cannot be done.

    `decode` decodes all files but plain JPEGs, and what nvImageCodec cannot decode; it raises Unreadable for
    broken ones. Damage outside of the box may remain unseen, but not a file that is cut off.
    """
    size = plain_jpeg_size(data)
    return decode(data) if size is None else JpegRegions(data, *size)


def _decode_box(data: bytearray, left: int, top: int, right: int, bottom: int) -> Tensor | None:
    library, decoder = load_library(), _decoder(os.getpid())
    with suppress(RuntimeError):
        stream = library.CodeStream(np.frombuffer(data, np.uint8))
        region = library.Region(top, left, bottom, right)
        image = decoder.decode(stream.get_sub_code_stream(region=region))
        # None for what it cannot decode.
        if image is not None and image.shape == (bottom - top, right - left, 3):
            return torch.from_numpy(np.asarray(image)).permute(2, 0, 1)
    return None


@cache
def load_library() -> Any:
    """Return nvImageCodec's module; UserError if it is not installed."""
    # It says at every start, as errors, that libraries for GPUs are missing.
    os.environ.setdefault("PYNVIMGCODEC_VERBOSITY", "0")
    try:
        with _quiet():
            library = import_module("nvidia.nvimgcodec")
            # The import is lazy about its extensions: they are loaded with the first decoder.
            _make_decoder(library)
    except ImportError as error:
        raise UserError(
            f"data.decoder: nvimgcodec needs nvImageCodec, which cannot be imported ({error}). "
            f"Run `pip install 'bigscl[fast-input]'`, or choose data.decoder: torchvision."
        ) from error
    return library


@cache
def _decoder(process: int) -> Any:
    """Return the decoder of this process: one that was made before a fork is its parent's."""
    return _make_decoder(load_library())


def _make_decoder(library: Any) -> Any:
    return library.Decoder(
        device_id=library.NVIMGCODEC_DEVICE_CPU_ONLY,
        # This thread, no other: workers are forked, and there is one for each core.
        max_num_cpu_threads=1,
        backends=[library.Backend(library.BackendKind.CPU_ONLY)],
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Discard what native code writes to stderr."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
