"""Read the size in an image file's header without a decoder, to refuse decompression bombs unopened."""

import struct

from bigscl.data.sources import Unreadable

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
"""Formats of images, as Pillow names them."""
# Pillow's own limit, beyond which it warns of a decompression bomb.
MAX_PIXELS = 89_478_485
# Encoders write about ten scans; each further scan costs a pass over the whole image.
MAX_SCANS = 100
# Start of frame, except for the three markers in that range which are tables.
FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
START_OF_SCAN, END_OF_IMAGE = 0xDA, 0xD9
# TEM, RST0 to RST7 and SOI: markers without a length field.
BARE = frozenset({0x01, *range(0xD0, 0xD9)})


def check_header(data: bytes | bytearray) -> bool:
    """Return whether the header of a JPEG or WebP states its size; raise Unreadable if that is too large.

    For other formats, and for headers that cannot be read, the decoder must check the size.
    """
    if data[:2] == b"\xff\xd8":
        if (scans := data.count(b"\xff\xda")) > MAX_SCANS:
            raise Unreadable(f"{scans} scans, more than the {MAX_SCANS} that are decoded")
        size = _jpeg_size(data)
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


def _jpeg_size(data: bytes | bytearray) -> tuple[int, int] | None:
    """Return (width, height) of the largest frame header before the first scan; None if there is none.

    Markers are found as libjpeg finds them: any number of bytes before a marker are skipped.
    """
    sizes = []
    position = data.find(b"\xff", 2)
    while position >= 0 and position + 9 <= len(data):
        marker = data[position + 1]
        if marker in (START_OF_SCAN, END_OF_IMAGE):
            break
        if marker in FRAMES:
            height, width = struct.unpack_from(">HH", data, position + 5)
            sizes.append((width, height))
        # 0xFF: padding before the marker. 0x00: not a marker.
        if marker == 0xFF:
            position += 1
            continue
        length = 0 if marker == 0 or marker in BARE else struct.unpack_from(">H", data, position + 2)[0]
        position = data.find(b"\xff", position + 2 + length)
    return max(sizes, key=lambda size: size[0] * size[1], default=None)


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
