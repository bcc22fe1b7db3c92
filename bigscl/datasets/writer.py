"""Write tar shards from lists of samples: the same bytes every time; an interrupted command is resumed."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from bigscl.common.files import BadFile, atomic_write, parse_errors, write_text
from bigscl.common.process_pool import map_in_processes
from bigscl.common.text import first_few
from bigscl.common.user_error import UserError

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
        """Return (extension, content) of the tar members of this sample."""
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
        """Return the file names of the shards of a part."""
        count = -(-len(self.parts[part]) // self.samples_per_shard)
        return [f"{part}-{shard:06d}.tar" for shard in range(count)]

    def chunk(self, part: str, shard: int) -> Sequence[Sample]:
        """Return the samples of one shard."""
        first = shard * self.samples_per_shard
        return self.parts[part][first : first + self.samples_per_shard]


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A finished shard."""

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
    found = _read_manifest(path) if path.exists() else None
    if found is None and any(out.glob("*.tar")):
        raise UserError(f"{out}: has tar files but no {MANIFEST}. Use an empty folder.")
    if found is not None:
        if differences := _differences(found, wanted):
            raise UserError(
                f"{path}: these shards were written with other settings: {'; '.join(differences)}. "
                f"Use another folder, or delete this one and rerun the command."
            )
        wanted["parts"] |= found["parts"]
    write_text(out / CLASSES, "".join(f"{name}\n" for name in shards.classes))
    write_text(path, json.dumps(wanted, indent=2, sort_keys=True) + "\n")


def _read_manifest(path: Path) -> dict[str, Any]:
    with parse_errors(path, "a manifest of bigscl shards", "Use another folder, or delete this one."):
        found: dict[str, Any] = json.loads(path.read_text())
        if not all(isinstance(found[name], dict) for name in ("settings", "parts")):
            raise UserError("settings or parts are no objects")
    return found


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
