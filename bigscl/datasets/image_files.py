"""Image files for shards: their original bytes, or resized."""

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from PIL import Image

from bigscl.common.user_error import UserError
from bigscl.data.headers import check_header, check_pixels
from bigscl.store import ObjectReader

# Formats that training reads from shards, by the first bytes of the file. The name does not tell: one of
# ImageNet's .JPEG files is a PNG.
SIGNATURES = {b"\xff\xd8\xff": "jpg", b"\x89PNG\r\n\x1a\n": "png"}
# torchvision's list of what an image folder may hold.
SUFFIXES = {".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp"}
# Only these: Pillow runs Ghostscript for some other formats.
FORMATS = ("JPEG", "PNG", "PPM", "BMP", "TIFF", "WEBP", "GIF")
QUALITY = 95


def key_of(path: Path) -> str:
    """Return the key of an image in its shard: its path without slashes and dots, which would end the key."""
    stem = path.with_suffix("") if path.suffix.lower() in SUFFIXES else path
    return "_".join(stem.parts).replace(".", "_")


@dataclass(frozen=True, slots=True, kw_only=True)
class Resize:
    """Resizes an image: `square` squashes it to size x size, `short` keeps its aspect ratio."""

    size: int
    mode: Literal["square", "short"]

    def __post_init__(self) -> None:
        if self.size < 1:
            raise UserError(f"resize: {self.size}, expected at least 1 pixel")

    def target(self, width: int, height: int) -> tuple[int, int]:
        """Return the new (width, height); `short` never enlarges."""
        if self.mode == "square":
            return self.size, self.size
        scale = min(1.0, self.size / min(width, height))
        return round(width * scale), round(height * scale)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFile:
    """A file, read when its shard is written."""

    path: str
    resize: Resize | None = None

    def encoded(self) -> tuple[str, bytes]:
        """Return (extension by content, bytes): the file's own bytes unless they have to change.

        A file that cannot be decoded stays as it is, so that the shards have every sample of the source:
        training skips, counts and names it.
        """
        return encoded_image(Path(self.path).read_bytes(), self.resize)


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteImage:
    """An image behind a URL (https, s3, gs, az), read when its shard is written."""

    url: str
    resize: Resize | None = None

    def encoded(self) -> tuple[str, bytes]:
        """Return (extension by content, bytes), as `ImageFile`; a URL that cannot be read is an error."""
        with ObjectReader(self.url) as reader:
            return encoded_image(reader.read(), self.resize)


def encoded_image(content: bytes, resize: Resize | None) -> tuple[str, bytes]:
    """Return (extension by content, bytes) of an image file: unchanged if its format and size fit."""
    extension = _extension(content)
    if extension is not None and resize is None:
        return extension, content
    try:
        return _reencoded(content, extension, resize)
    except Exception:  # A broken file can make Pillow's plugins raise anything.
        return extension or "jpg", content


def _extension(content: bytes) -> str | None:
    if content[:4] == b"RIFF" and content[8:12] == b"WEBP":
        return "webp"
    return next((name for start, name in SIGNATURES.items() if content.startswith(start)), None)


def _reencoded(content: bytes, extension: str | None, resize: Resize | None) -> tuple[str, bytes]:
    """Return a resized JPEG, a PNG if shards do not hold this format, or the file itself if its size fits."""
    buffer = io.BytesIO()
    check_header(content)
    with Image.open(io.BytesIO(content), formats=FORMATS) as image:
        check_pixels(image.width, image.height)
        if resize is None:
            image.convert("RGB").save(buffer, format="PNG")
            return "png", buffer.getvalue()
        # The orientation tag stays: the reader applies it, as for unchanged files.
        exif = image.info.get("exif", b"")
        target = resize.target(image.width, image.height)
        if extension is not None and target == image.size:
            return extension, content
        small = image.convert("RGB").resize(target, Image.Resampling.BICUBIC, reducing_gap=3.0)
        small.save(buffer, format="JPEG", quality=QUALITY, subsampling=0, exif=exif)
    return "jpg", buffer.getvalue()
