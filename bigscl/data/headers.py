"""Read an image file's header without a decoder: its size, to refuse decompression bombs unopened."""

import io
import struct
from collections.abc import Iterator
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from bigscl.data.open_tar import Unreadable

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
"""Formats that are decoded, by their names in Pillow."""
# Pillow's own limit, beyond which it warns of a decompression bomb.
MAX_PIXELS = 89_478_485
# Encoders write about ten scans; each further scan costs a pass over the whole image.
MAX_SCANS = 100
# Start of frame, except for the three markers in that range which are tables.
FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
# Those with Huffman codes, not lossless: baseline, extended and progressive.
USUAL_FRAMES = frozenset({0xC0, 0xC1, 0xC2})
START_OF_SCAN, END_OF_IMAGE, APP1 = 0xDA, 0xD9, 0xE1
ORIENTATION, SHORT = 0x0112, 3
# Orientations of images that lie on their side.
TURNED = (5, 6, 7, 8)
PROGRESSIVE = 0xC2
# What may follow 0xFF in the data of a scan: 0, and restarts; of a progressive JPEG further scans and tables.
IN_SCAN = np.isin(np.arange(256), [0x00, *range(0xD0, 0xD8)])
IN_SCANS = IN_SCAN | np.isin(np.arange(256), [START_OF_SCAN, 0xC4])
# TEM, RST0 to RST7 and SOI: markers without a length field.
BARE = frozenset({0x01, *range(0xD0, 0xD9)})


def check_header(data: bytes | bytearray) -> bool:
    """Return whether the header of a JPEG or WebP states its size; raise Unreadable if that is too large.

    For other formats, and for headers that cannot be read, the decoder must check the size.
    """
    if data[:2] == b"\xff\xd8":
        _check_scans(data)
        size = _largest_frame(data, list(_segments(data)))
    elif data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        size = _webp_size(data)
    else:
        return False
    if size is not None:
        check_pixels(*size)
    return size is not None


def check_pixels(width: int, height: int) -> None:
    """Raise Unreadable for an image of more than MAX_PIXELS."""
    if width * height > MAX_PIXELS:
        raise Unreadable(f"{width} x {height} pixels, more than the {MAX_PIXELS} that are decoded")


def image_size(data: bytes | bytearray) -> tuple[int, int]:
    """Return (width, height) of an image once it is turned upright by its EXIF orientation; raise Unreadable.

    The first bytes of the file are enough. A damaged EXIF part turns nothing, as for the decoder.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            width, height = image.size
            with suppress(Exception):
                if image.getexif().get(ORIENTATION) in TURNED:
                    return height, width
    except UnidentifiedImageError as error:
        raise Unreadable(f"cannot be decoded: it is none of {', '.join(FORMATS)}") from error
    except Exception as error:  # A broken file can make Pillow's plugins raise anything.
        raise Unreadable(f"cannot be decoded: {str(error) or type(error).__name__}") from error
    return width, height


def plain_jpeg_size(data: bytes | bytearray) -> tuple[int, int] | None:
    """Return (width, height) of a JPEG whose boxes can be decoded alone; None for all other files.

    Such a file has one usual frame of 8 bits, gray or of three colours, is stored upright, and ends as it
    should: one that is cut off is unreadable wherever the box is. Raises Unreadable like `check_header`.
    """
    if data[:3] != b"\xff\xd8\xff" or data[-2:] != b"\xff\xd9":
        return None
    octets, positions = _check_scans(data)
    segments = list(_segments(data))
    size = _largest_frame(data, segments)
    frames = [(marker, start) for marker, start in segments if marker in FRAMES]
    if size is None or len(frames) != 1 or segments[-1][0] != START_OF_SCAN:
        return None
    check_pixels(*size)
    marker, start = frames[0]
    # Any other marker may be an error to one decoder and nothing to another, and the last one ends the image.
    within = octets[positions[np.searchsorted(positions, segments[-1][1]) : -1] + 1]
    if not (IN_SCANS if marker == PROGRESSIVE else IN_SCAN)[within].all():
        return None
    kind = bytes(data[start + 2 : start + 3] + data[start + 7 : start + 8])
    usual = marker in USUAL_FRAMES and kind in (b"\x08\x01", b"\x08\x03") and min(size) > 0
    upright = all(_is_upright(data, start) for marker, start in segments if marker == APP1)
    return size if usual and upright else None


def has_several_scans(data: bytes | bytearray) -> bool:
    """Return whether a JPEG has more than one scan: its coefficients are all kept while it is decoded."""
    first = next((start for marker, start in _segments(data) if marker == START_OF_SCAN), len(data))
    return data.find(bytes([0xFF, START_OF_SCAN]), first) >= 0


def _check_scans(data: bytes | bytearray) -> tuple[NDArray[np.uint8], NDArray[np.intp]]:
    """Return a JPEG's bytes and where they are 0xFF; raise Unreadable for too many scans."""
    octets = np.frombuffer(data, np.uint8)
    # `data.count` takes several times as long, 7% of the time of decoding.
    positions = np.flatnonzero(octets[:-1] == 0xFF)
    scans = int(np.count_nonzero(octets[positions + 1] == START_OF_SCAN))
    if scans > MAX_SCANS:
        raise Unreadable(f"{scans} scans, more than the {MAX_SCANS} that are decoded")
    return octets, positions


def _segments(data: bytes | bytearray) -> Iterator[tuple[int, int]]:
    """Yield (marker, start of its length field) of a JPEG's segments up to the header of the first scan.

    Markers are found as libjpeg finds them: any number of bytes before a marker are skipped.
    """
    position = data.find(b"\xff", 2)
    while position >= 0 and position + 9 <= len(data):
        marker = data[position + 1]
        if marker == END_OF_IMAGE:
            return
        # 0xFF: padding before the marker. 0x00: not a marker.
        if marker == 0xFF:
            position += 1
            continue
        length = 0
        if marker and marker not in BARE:
            yield marker, position + 2
            if marker == START_OF_SCAN:
                return
            length = struct.unpack_from(">H", data, position + 2)[0]
        position = data.find(b"\xff", position + 2 + length)


def _largest_frame(data: bytes | bytearray, segments: list[tuple[int, int]]) -> tuple[int, int] | None:
    """Return (width, height) of the largest frame header; None if there is none."""
    sizes = [
        struct.unpack_from(">HH", data, start + 3)[::-1] for marker, start in segments if marker in FRAMES
    ]
    return max(sizes, key=lambda size: size[0] * size[1], default=None)


def _is_upright(data: bytes | bytearray, start: int) -> bool:
    """Return whether a segment APP1 surely turns no image: it has no orientation, or says upright."""
    length = struct.unpack_from(">H", data, start)[0]
    tiff = data[start + 8 : start + length]
    if data[start + 2 : start + 6] != b"Exif":
        return True
    order = {b"II": "<", b"MM": ">"}.get(bytes(tiff[:2]))
    if order is None:
        return False
    try:
        (first,) = struct.unpack_from(f"{order}4xI", tiff)
        (count,) = struct.unpack_from(f"{order}H", tiff, first)
        entries = [struct.unpack_from(f"{order}HHIH", tiff, first + 2 + 12 * n) for n in range(count)]
    except struct.error:
        return False
    return all(entry[1:] in ((SHORT, 1, 0), (SHORT, 1, 1)) for entry in entries if entry[0] == ORIENTATION)


def _webp_size(data: bytes | bytearray) -> tuple[int, int] | None:
    """Return (width, height) in the first chunk of a WebP: Pillow allocates these pixels when it opens it."""
    if len(data) < 30:
        return None
    kind = data[12:16]
    if kind == b"VP8X":
        return 1 + int.from_bytes(data[24:27], "little"), 1 + int.from_bytes(data[27:30], "little")
    if kind == b"VP8 ":
        width, height = struct.unpack_from("<HH", data, 26)
        return width & 0x3FFF, height & 0x3FFF
    if kind == b"VP8L":
        bits = int.from_bytes(data[21:25], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    return None
