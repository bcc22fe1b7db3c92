"""Images for a browser: the files of the shards as they are, small ones, their size, boxes and views."""

import io
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image, ImageOps

from bigscl.data.headers import FORMATS, check_header, check_pixels, image_size
from bigscl.data.index import Index
from bigscl.data.reader import read_encoded, read_metadata
from bigscl.data.sources import Unreadable

if TYPE_CHECKING:
    from bigscl.config import Config

CACHE_BYTES = 64_000_000
QUALITY = 85
MAX_BOXES = 1000
SMALL_BYTES = 65_536
JPEG = b"\xff\xd8\xff"
TYPES = {
    JPEG: "image/jpeg",
    b"\x89PNG\r\n\x1a\n": "image/png",
    b"RIFF": "image/webp",
    b"GIF8": "image/gif",
    b"BM": "image/bmp",
}
"""How files begin that are sent as they are."""


class Cache:
    """The bytes that were made last, up to a size."""

    def __init__(self, largest: int = CACHE_BYTES) -> None:
        self._largest, self._bytes = largest, 0
        self._kept: OrderedDict[Any, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Any, make: Callable[[], bytes]) -> bytes:
        """Return what is kept under a key, or make it."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        made = make()
        with self._lock:
            self._bytes += len(made) - len(self._kept.pop(key, b""))
            self._kept[key] = made
            while self._bytes > self._largest:
                self._bytes -= len(self._kept.popitem(last=False)[1])
        return made


def original(index: Index, row: int) -> tuple[str, bytes]:
    """Return (type, content) of a sample's image file; Unreadable if it is none that a browser shows."""
    data = bytes(read_encoded(index, row))
    kind = next((kind for start, kind in TYPES.items() if data.startswith(start)), None)
    if kind is None:
        raise Unreadable(f"cannot be shown: it is none of {', '.join(FORMATS)}")
    return kind, data


def thumbnail(index: Index, row: int, side: int) -> bytes:
    """Return a JPEG of a sample's image, upright, that fits into a square of this side.

    A JPEG that is small enough is sent as it is: that takes no time of a training's processors.
    """
    data = read_encoded(index, row)
    if len(data) <= SMALL_BYTES and data.startswith(JPEG) and check_header(data):
        return bytes(data)
    image = _opened(data)
    try:
        image.draft("RGB", (side, side))
        small = ImageOps.exif_transpose(image)
        small.thumbnail((side, side))
        out = io.BytesIO()
        small.convert("RGB").save(out, "JPEG", quality=QUALITY)
    except Exception as error:  # A broken file can make Pillow's plugins raise anything.
        raise Unreadable(f"cannot be decoded: {str(error) or type(error).__name__}") from error
    return out.getvalue()


def upright_size(index: Index, row: int) -> tuple[int, int]:
    """Return (width, height) of a sample's image as it is shown."""
    data = read_encoded(index, row)
    check_header(data)
    width, height = image_size(data)
    check_pixels(width, height)
    return width, height


def _opened(data: bytearray) -> Image.Image:
    check_header(data)
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except Exception as error:  # as above
        raise Unreadable(f"cannot be decoded: it is none of {', '.join(FORMATS)}") from error
    check_pixels(*image.size)
    return image


def boxes_of(index: Index, row: int) -> list[list[float]]:
    """Return the boxes of a sample as (class, x0, y0, x1, y1) in 0 to 1; none if the shards have none."""
    try:
        found = read_metadata(index, np.array([row]))[row].get("boxes", [])
    except Unreadable:
        return []
    boxes = np.array(found, np.float64).reshape(-1, 5)[:MAX_BOXES]
    boxes[:, 1:] = boxes[:, 1:].clip(0, 1)
    plain: list[list[float]] = boxes.tolist()
    return plain


def views_of(
    config: "Config", row: int, size: tuple[int, int], last_epoch: int, count: int
) -> list[dict[str, Any]]:
    """Return what training saw of a sample in its last epochs, the newest first."""
    found = []
    for epoch in range(last_epoch, max(-1, last_epoch - count), -1):
        view = config.data.crop.view(
            seed=config.seed, epoch=epoch, sample_id=row, width=size[0], height=size[1]
        )
        found.append({"epoch": epoch, "box": view.fractions()[:4], "flip": view.flip})
    return found
