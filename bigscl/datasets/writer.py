"""Write tar shards from lists of samples: the same bytes every time; an interrupted command is resumed."""

import hashlib
import io
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from PIL import Image

from bigscl.common.files import BadFile, atomic_write, parse_errors, write_text
from bigscl.common.text import first_few
from bigscl.common.user_error import UserError
from bigscl.data.build_index import map_in_processes
from bigscl.data.headers import check_header, check_pixels
from bigscl.store import ObjectReader

MANIFEST = "shards.json"
CLASSES = "classes.txt"


class Picture(Protocol):
    """The source of an image; it is read or drawn only when its shard is written."""

    def encoded(self) -> tuple[str, bytes]:
        """Return (extension, file content)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiLabel:
    """All labels of an image, and those that training sees."""

    full: tuple[int, ...] | None
    """Every class in the image; None if nobody knows."""
    given: tuple[int, ...]
    """Positives that training sees."""
    negatives: tuple[int, ...] = ()
    """Known absent classes that training sees."""
    boxes: tuple[tuple[int, float, float, float, float], ...] = ()
    """(class, x0, y0, x1, y1), in 0..1 of the image."""

    def fields(self) -> dict[str, Any]:
        """Return the fields of the `json` member, without empty optional ones."""
        fields: dict[str, Any] = {} if self.full is None else {"full": self.full}
        fields["given"] = self.given
        if self.negatives:
            fields["negatives"] = self.negatives
        if self.boxes:
            fields["boxes"] = self.boxes
        return fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One image and its label: a class number (member `cls`) or several labels (in the member `json`)."""

    key: str
    image: Picture
    label: int | MultiLabel
    source: str | None = None
    """The path of the image in the dataset, or its URL; in the member `json`."""

    def members(self) -> list[tuple[str, bytes]]:
        return [self.image.encoded(), *self.label_members()]

    def label_members(self) -> list[tuple[str, bytes]]:
        """Return (extension, content) of the label and of what is known of the image."""
        number = [("cls", str(self.label).encode())] if isinstance(self.label, int) else []
        fields = {} if isinstance(self.label, int) else self.label.fields()
        if self.source is not None:
            fields["source"] = self.source
        as_json = json.dumps(fields, separators=(",", ":")).encode()
        return number + ([("json", as_json)] if fields else [])


@dataclass(frozen=True, slots=True, kw_only=True)
class Shards:
    """The samples of each part in writing order, and the settings that determine them."""

    kind: str
    classes: Sequence[str]
    parts: Mapping[str, Sequence[Sample]]
    """Samples by part (`train`, `val`, ...), in the order in which they go to the shards."""
    settings: dict[str, Any]
    """Settings that the samples depend on; a command with other settings does not resume this one."""
    samples_per_shard: int = 1000

    def __post_init__(self) -> None:
        if self.samples_per_shard < 1:
            raise UserError(f"samples_per_shard: {self.samples_per_shard}, expected at least 1")
        for part, samples in self.parts.items():
            _check_keys(part, samples)

    def names(self, part: str) -> list[str]:
        count = -(-len(self.parts[part]) // self.samples_per_shard)
        return [f"{part}-{shard:06d}.tar" for shard in range(count)]

    def chunk(self, part: str, shard: int) -> Sequence[Sample]:
        first = shard * self.samples_per_shard
        return self.parts[part][first : first + self.samples_per_shard]


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    name: str
    num_samples: int
    skipped: bool
    """It existed already, from an earlier command."""


def write(shards: Shards, out: Path, workers: int = 0) -> Iterator[Written]:
    """Write the shards that are missing in `out`, and yield every shard when it is finished.

    Existing shards are kept and yielded first: a shard gets its name only when it is complete. `workers`
    processes write different shards at the same time; the bytes do not depend on their number.
    """
    out.mkdir(parents=True, exist_ok=True)
    _claim(shards, out)
    todo: list[tuple[Path, Sequence[Sample]]] = []
    for part in shards.parts:
        for shard, name in enumerate(shards.names(part)):
            samples = shards.chunk(part, shard)
            if (out / name).exists():
                yield Written(name=name, num_samples=len(samples), skipped=True)
            else:
                todo.append((out / name, samples))
    yield from (written for _, written in map_in_processes(_write_tar, todo, workers))


def _write_tar(shard: tuple[Path, Sequence[Sample]]) -> Written:
    """Write one shard under a temporary name, sync it, and only then give it its own name."""
    path, samples = shard
    # Imported here: webdataset imports torch, which takes seconds, and only writing needs it.
    from webdataset import TarWriter

    with atomic_write(path) as partial, partial.open("wb") as file:
        # Fixed owner, mode and time: nothing of this machine or moment gets into the bytes.
        with TarWriter(file, encoder=False, user="", group="", mode=0o644, mtime=0) as tar:
            for sample in samples:
                # One call per member keeps the image first; in one call they are sorted by extension.
                for extension, content in sample.members():
                    tar.write({"__key__": sample.key, extension: content})
    return Written(name=path.name, num_samples=len(samples), skipped=False)


def _check_keys(part: str, samples: Sequence[Sample]) -> None:
    keys = [sample.key for sample in samples]
    if not keys:
        raise BadFile(f"{part}: no samples. Check the source folder and the split.")
    # WebDataset ends the key at the first dot of a member's name.
    if dotted := next((key for key in keys if "." in key), None):
        raise BadFile(f"{part}: key {dotted!r} has a dot, which separates key and extension in a shard.")
    if twice := [key for key, count in Counter(keys).items() if count > 1]:
        raise BadFile(
            f"{part}: {len(twice)} keys occur more than once, e.g. {first_few(twice, len(twice), most=3)}. "
            f"Keys come from file names: rename the files, or remove the copies."
        )


def _claim(shards: Shards, out: Path) -> None:
    """Record in `out` what is written there; refuse a folder with other shards."""
    path = out / MANIFEST
    wanted = _manifest(shards)
    manifest = _read_manifest(path) if path.exists() else None
    if manifest is None and any(out.glob("*.tar")):
        raise UserError(f"{out}: has tar files but no {MANIFEST}. Use an empty folder.")
    if manifest is not None:
        if differences := _differences(manifest, wanted):
            raise UserError(
                f"{path}: these shards were written with other settings: {'; '.join(differences)}. "
                f"Use another folder, or delete this one and rerun the command."
            )
        wanted["parts"] |= manifest["parts"]
    write_text(out / CLASSES, "".join(f"{name}\n" for name in shards.classes))
    write_text(path, json.dumps(wanted, indent=2, sort_keys=True) + "\n")


def _read_manifest(path: Path) -> dict[str, Any]:
    with parse_errors(path, "a manifest of bigscl shards", "Use another folder, or delete this one."):
        manifest: dict[str, Any] = json.loads(path.read_text())
        if not all(isinstance(manifest[name], dict) for name in ("settings", "parts")):
            raise UserError("settings or parts are no objects")
    return manifest


def _manifest(shards: Shards) -> dict[str, Any]:
    return {
        "kind": shards.kind,
        "samples_per_shard": shards.samples_per_shard,
        "settings": shards.settings,
        "classes": _digest(name.encode() for name in shards.classes),
        "parts": {
            part: {
                "samples": len(samples),
                "shards": len(shards.names(part)),
                "digest": _digest(
                    b"\0".join((sample.key.encode(), *(content for _, content in sample.label_members())))
                    for sample in samples
                ),
            }
            for part, samples in shards.parts.items()
        },
    }


def _digest(lines: Iterator[bytes]) -> str:
    digest = hashlib.sha256()
    for line in lines:
        digest.update(line + b"\n")
    return digest.hexdigest()[:16]


def _differences(found: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """Return `name was A, is B` for everything that differs; parts of only one side do not count."""
    general = [name for name in wanted if name not in ("settings", "parts")]
    pairs = [(name, found.get(name), wanted[name]) for name in general]
    before, now = found["settings"], wanted["settings"]
    pairs += [(name, before.get(name), now.get(name)) for name in sorted(before.keys() | now.keys())]
    if all(was == now_is for _, was, now_is in pairs):  # otherwise the samples differ anyway
        common = found["parts"].keys() & wanted["parts"].keys()
        pairs += [(f"part {part}", found["parts"][part], wanted["parts"][part]) for part in sorted(common)]
    return [f"{name} was {was}, is {now_is}" for name, was, now_is in pairs if was != now_is]


# Image files: their original bytes, or resized

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
