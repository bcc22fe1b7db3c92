"""Scan the shards once: build their index, and list everything that is wrong with them."""

import json
import reprlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from multiprocessing import get_context
from typing import Any, TypeVar

import numpy as np

from bigscl.common.text import printable
from bigscl.common.url_secrets import environment, public, receive
from bigscl.common.user_error import UserError
from bigscl.data.index import UNKNOWN_BYTES, Index, sample_ids, with_fingerprint
from bigscl.data.open_tar import Shard, Unreadable, open_shard
from bigscl.data.read_samples import LARGEST_CLASS, are_boxes
from bigscl.data.tar import LARGEST_IMAGE_BYTES, LARGEST_LABEL_BYTES, Member, expand, members
from bigscl.store import Ragged

IMAGES = ("jpg", "jpeg", "png", "webp")
LABELS = ("cls", "json")
# Names of each list of labels in a json; the last that is there counts.
FIELDS = {"full": ("labels", "full"), "given": ("observed", "given"), "negatives": ("negatives",)}
LONGEST_NUMBER = 20
# Shortens labels in messages.
SHORT = reprlib.Repr()
SHORT.maxstring = SHORT.maxother = 60


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem in a shard; `key` is empty if it concerns the whole shard."""

    shard: str
    key: str
    what: str

    def __str__(self) -> str:
        return printable(f"{self.shard}: {self.key + ': ' if self.key else ''}{self.what}")


class NoSamples(UserError):
    """No shard has a sample with an image and a label."""

    def __init__(self, urls: Sequence[str], problems: list[Problem]) -> None:
        super().__init__(
            f"{', '.join(urls[:3])}: no sample with an image and a label in {len(urls)} shards. "
            f"`bigscl index --unlabelled` keeps images whose labels are in a file (data.labels_file)."
        )
        self.problems = problems


@dataclass(slots=True)
class _Sample:
    """The members of one key."""

    key: str
    members: dict[str, Member] = field(default_factory=dict)
    contents: dict[str, bytes] = field(default_factory=dict)
    source: str = ""
    wrong: list[str] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class ShardScan:
    """The content of one shard in flat arrays, which are cheap to send between processes."""

    stored_bytes: int
    keys: Ragged
    images: np.ndarray[Any, np.dtype[np.int64]]
    """[samples, 2]: offset and length of each image."""
    given: Ragged
    negatives: Ragged
    full: Ragged | None
    sources: Ragged
    """Empty where the shard does not say."""
    problems: list[Problem]


def scan(
    shards: str | Sequence[str],
    *,
    class_names: Sequence[str] | None = None,
    num_classes: int | None = None,
    jobs: int = 1,
    allow_pipe: bool = False,
    unlabelled: bool = False,
    on_shard: Callable[[str], None] = lambda url: None,
) -> tuple[Index, list[Problem]]:
    """Return (index of all good samples, problems of the others), the same for any number of `jobs`.

    Without class names or their number, the largest label found is the last class. With `unlabelled`, samples
    without labels are good, too: a file may have them.
    """
    urls = expand(shards)
    if class_names is not None:
        num_classes = len(class_names)
    work = partial(scan_shard, num_classes=num_classes, allow_pipe=allow_pipe, unlabelled=unlabelled)
    by_url: dict[str, ShardScan] = {}
    for url, shard_scan in map_in_processes(work, urls, jobs if jobs > 1 else 0):
        by_url[url] = shard_scan
        on_shard(url)
    scans = [by_url[url] for url in urls]
    problems = [problem for shard_scan in scans for problem in shard_scan.problems]
    if not any(len(shard_scan.keys) for shard_scan in scans):
        raise NoSamples(urls, problems)
    problems += _repeated_keys(urls, scans)
    names = class_names or [str(number) for number in range(num_classes or _largest_label(scans) + 1)]
    return _index(urls, scans, tuple(names)), problems


def scan_shard(url: str, *, num_classes: int | None, allow_pipe: bool, unlabelled: bool = False) -> ShardScan:
    """Return the content of one shard. What is wrong with it is listed as a problem, never raised."""
    problems: list[Problem] = []
    rows: list[tuple[_Sample, Member, dict[str, list[int]]]] = []
    keys: set[str] = set()
    stored_bytes = UNKNOWN_BYTES
    try:
        shard = open_shard(url, allow_pipe=allow_pipe)
    except Unreadable as error:
        problems.append(Problem(url, "", str(error)))
        return _packed(rows, stored_bytes, problems)
    with closing(shard):
        stored_bytes = UNKNOWN_BYTES if shard.stored_bytes is None else shard.stored_bytes
        for sample in _samples(shard, url, problems):
            labels = _labels(sample, num_classes, unlabelled)
            if sample.key in keys:
                sample.wrong.append("duplicate key: it occurs before in this shard; this sample is skipped")
            keys.add(sample.key)
            image = next((sample.members[kind] for kind in IMAGES if kind in sample.members), None)
            if image is None:
                sample.wrong.append(f"no image: expected one of {', '.join(IMAGES)}")
            elif image.size > LARGEST_IMAGE_BYTES:
                sample.wrong.append(f"an image of {image.size} bytes, expected at most {LARGEST_IMAGE_BYTES}")
            elif not sample.wrong:
                rows.append((sample, image, labels))
                sample.wrong += _oddities(sample, image)
            problems += [Problem(url, sample.key, what) for what in sample.wrong]
    if not rows and not problems:
        problems.append(Problem(url, "", "empty: no samples"))
    return _packed(rows, stored_bytes, problems)


def _oddities(sample: _Sample, image: Member) -> Iterator[str]:
    boxes = json.loads(sample.contents.get("json", b"{}")).get("boxes", [])
    if not are_boxes(boxes):
        expected = "a list of [class, x0, y0, x1, y1]"
        yield f"boxes: {SHORT.repr(boxes)}, expected {expected}; the sample is kept without them"
    if any(0xDC80 <= ord(letter) <= 0xDCFF for letter in sample.key):
        yield "the key is not UTF-8; the sample is kept, other bytes written as \\x.."
    if image.size == 0:
        yield "an image of 0 bytes; the sample is kept, and skipped in training"


def _samples(shard: Shard, url: str, problems: list[Problem]) -> Iterator[_Sample]:
    """Yield groups of consecutive members with the same key, as WebDataset does; read their labels."""
    sample: _Sample | None = None

    def note(reason: str) -> None:
        problems.append(Problem(url, sample.key if sample else "", f"damaged or cut off: {reason}"))
        if sample and shard.end is not None:
            whole = {kind: m for kind, m in sample.members.items() if m.offset + m.size <= shard.end}
            sample.members = whole

    for member in members(shard, note, hollow=True):
        if (named := member.key_and_extension()) is None:
            continue
        key, extension = named
        if sample is None or key != sample.key:
            if sample is not None:
                yield sample
            sample = _Sample(key)
        if extension in sample.members:
            sample.wrong.append(f"duplicate key: it has two members {extension}")
        _add(sample, extension, member, shard)
    if sample is not None:
        yield sample


def _add(sample: _Sample, extension: str, member: Member, shard: Shard) -> None:
    """Add a member to a sample, and read it if it is a label."""
    if member.hollow:
        if extension in (*IMAGES, *LABELS):
            sample.wrong.append(f"{extension}: a link or a sparse file, expected a file with its content")
        return
    sample.members[extension] = member
    if extension not in LABELS:
        return
    if member.size > LARGEST_LABEL_BYTES:
        sample.wrong.append(f"{extension}: {member.size} bytes, expected at most {LARGEST_LABEL_BYTES}")
        return
    try:
        sample.contents[extension] = bytes(shard.read_at(member.offset, member.size))
    except Unreadable as error:
        sample.wrong.append(f"{extension}: cannot be read: {error}")


def _labels(sample: _Sample, num_classes: int | None, unlabelled: bool) -> dict[str, list[int]]:
    """Return the lists `given`, `negatives` and `full` of a sample; add problems to `sample.wrong`."""
    try:
        found = json.loads(sample.contents.get("json", b"{}"))
        fields: dict[str, Any] = {
            name: found[key] for name, keys in FIELDS.items() for key in keys if key in found
        }
        source = found.get("source")
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        sample.wrong.append(f"json: cannot be read: {error}")
        return {}
    sample.source = public(source) if isinstance(source, str) else ""
    if not fields.keys() & {"full", "given"}:
        if "cls" not in sample.contents and "label" in found:
            fields["given"] = [found["label"]] if type(found["label"]) is int else found["label"]
        elif "cls" not in sample.contents and unlabelled and not sample.wrong:
            fields["given"] = []
        elif "cls" not in sample.contents:
            if not sample.wrong:
                sample.wrong.append("no label: expected `cls`, or `json` with `given`, `full` or `label`")
            return {}
        else:
            text = sample.contents["cls"].decode(errors="replace").strip()
            number = text.isdecimal() and text.isascii() and len(text) <= LONGEST_NUMBER
            fields["given"] = [int(text)] if number else text
    for name, value in fields.items():
        if wrong := _wrong_classes(value, num_classes):
            sample.wrong.append(f"{name}: {wrong}")
    if sample.wrong:
        return {}
    if both := set(fields.get("given", fields.get("full", ()))) & set(fields.get("negatives", ())):
        sample.wrong.append(f"negatives: {sorted(both)} are positives as well")
    fields.setdefault("given", fields.get("full"))
    return {name: sorted(set(value)) for name, value in fields.items()}


def _wrong_classes(value: Any, num_classes: int | None) -> str | None:
    if not isinstance(value, list) or not all(type(number) is int for number in value):
        return f"{SHORT.repr(value)}, expected class numbers"
    last = LARGEST_CLASS if num_classes is None else num_classes - 1
    if beyond := [number for number in value if not 0 <= number <= last]:
        return f"{SHORT.repr(beyond[0])} is out of range, expected 0 to {last}"
    return None


def _packed(
    rows: list[tuple[_Sample, Member, dict[str, list[int]]]], stored_bytes: int, problems: list[Problem]
) -> ShardScan:
    full = [row["full"] for _, _, row in rows if "full" in row]
    return ShardScan(
        stored_bytes=stored_bytes,
        keys=Ragged.of_bytes([each.key.encode(errors="surrogateescape") for each, _, _ in rows]),
        images=np.array([(image.offset, image.size) for _, image, _ in rows], np.int64).reshape(-1, 2),
        given=Ragged.of([row["given"] for _, _, row in rows]),
        negatives=Ragged.of([row.get("negatives", []) for _, _, row in rows]),
        full=Ragged.of(full) if len(full) == len(rows) else None,
        sources=Ragged.of_bytes([each.source.encode(errors="replace") for each, _, _ in rows]),
        problems=problems,
    )


def _repeated_keys(urls: list[str], scans: list[ShardScan]) -> list[Problem]:
    """Return keys that occur in more than one shard; the samples are kept, as their ids differ."""
    first: dict[bytes, int] = {}
    problems = []
    for number, shard_scan in enumerate(scans):
        content, ends = shard_scan.keys.values.tobytes(), shard_scan.keys.offsets.tolist()
        for key in (content[start:end] for start, end in pairwise(ends)):
            if (other := first.setdefault(key, number)) != number:
                what = f"duplicate key: it occurs in {urls[other]} too; both samples are kept"
                problems.append(Problem(urls[number], key.decode(errors="replace"), what))
    return problems


def _largest_label(scans: list[ShardScan]) -> int:
    labels = [rows.values for scan in scans for rows in (scan.given, scan.negatives, scan.full) if rows]
    return int(max((values.max() for values in labels if len(values)), default=0))


def _index(urls: list[str], scans: list[ShardScan], class_names: tuple[str, ...]) -> Index:
    sizes = np.array([len(shard_scan.keys) for shard_scan in scans], np.int64)
    ids, num_rows = sample_ids(sizes), len(sizes) * int(sizes.max())
    images = np.zeros((num_rows, 2), np.int64)
    images[ids] = np.concatenate([shard_scan.images for shard_scan in scans])

    def spread(parts: list[Ragged], dtype: type[np.generic]) -> Ragged:
        return Ragged.concatenate(parts, dtype).spread(ids, num_rows)

    full = [shard_scan.full for shard_scan in scans if shard_scan.full is not None]
    have_sources = any(len(shard_scan.sources.values) for shard_scan in scans)
    index = Index(
        urls=tuple(urls),
        shard_bytes=np.array([shard_scan.stored_bytes for shard_scan in scans], np.int64),
        shard_sizes=sizes,
        class_names=class_names,
        keys=spread([shard_scan.keys for shard_scan in scans], np.uint8),
        image_offsets=images[:, 0].copy(),
        image_bytes=images[:, 1].copy(),
        given=spread([shard_scan.given for shard_scan in scans], np.uint32),
        negatives=spread([shard_scan.negatives for shard_scan in scans], np.uint32),
        full=spread(full, np.uint32) if len(full) == len(scans) else None,
        sources=spread([shard_scan.sources for shard_scan in scans], np.uint8) if have_sources else None,
        fingerprint="",
    )
    return with_fingerprint(index)


# Work on many items in processes of their own. Imports no torch

T = TypeVar("T")
R = TypeVar("R")


def map_in_processes(work: Callable[[T], R], items: Sequence[T], processes: int) -> Iterator[tuple[T, R]]:
    """Yield (item, work(item)) when each is finished; with 0 processes in this process, in order."""
    if processes == 0 or not items:
        yield from ((item, work(item)) for item in items)
        return
    # Not forked: the caller may have threads (a progress bar has).
    context, secrets = get_context("spawn"), (environment(),)
    with ProcessPoolExecutor(
        min(processes, len(items)), context, initializer=receive, initargs=secrets
    ) as pool:
        try:
            waiting = {pool.submit(work, item): item for item in items}
            for future in as_completed(waiting):
                yield waiting[future], future.result()
        finally:
            pool.shutdown(cancel_futures=True)
