"""Decode only the box of a JPEG that a view needs, with nvImageCodec on the CPU."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bigscl.common.user_error import UserError
from bigscl.data.decode import decode
from bigscl.data.headers import plain_jpeg_size


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
