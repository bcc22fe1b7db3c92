"""The index: the content of the shards, row by row, and a fingerprint of it."""

import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from bigscl.common.digests import ArrayFile, write_arrays
from bigscl.common.files import BadFile, atomic_write, parse_errors
from bigscl.common.text import first_few, printable
from bigscl.common.user_error import UserError
from bigscl.data import tar as tars
from bigscl.data.epoch_plan import ids_of_shards
from bigscl.data.open_tar import scheme
from bigscl.store import Annotations, Ragged

VERSION = 3
MAPPED_ROWS = 4_000_000
"""Indexes of that many rows are not compressed, so that all processes of a machine share their RAM: 64 bytes
a row. That of ImageNet-1k is compressed, and takes every process 0.1 GB."""
UNKNOWN_BYTES = -1
ROWS = ("keys", "given", "negatives", "full")
"""Fields with a row for each sample; the fingerprint is computed from them."""
STORED_ROWS = (*ROWS, "sources")
TEXTS = ("keys", "sources")
ARRAYS = ("shard_bytes", "shard_sizes", "image_offsets", "image_bytes")
SAMPLES_FILE, SAMPLES_FORMAT = "samples.json", 1
"""A list of a store's rows for readers without bigscl: docs/store-format.md describes it."""
WHAT, REMEDY = "an index of bigscl", "Delete it, or choose another path; create it again with `bigscl index`."
Labels = Literal["given", "full"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Index:
    """Every sample by its id: row n is sample `n % rows_per_shard` of shard `n // rows_per_shard`."""

    urls: tuple[str, ...]
    """Current addresses of the shards."""
    shard_bytes: NDArray[np.int64]
    """Length of each tar in storage; UNKNOWN_BYTES for a pipe."""
    shard_sizes: NDArray[np.int64]
    """Number of samples of each shard."""
    class_names: tuple[str, ...]
    keys: Ragged
    """UTF-8 key of each row; rows past a shard's size are empty, also below."""
    image_offsets: NDArray[np.int64]
    """Where the bytes of each row's image start in the (decompressed) tar."""
    image_bytes: NDArray[np.int64]
    given: Ragged
    """Positives that training sees: `given` in the json, else `full`, else `cls`."""
    negatives: Ragged
    """Classes known to be absent."""
    full: Ragged | None
    """All positives; None unless every sample of the shards has its full labels."""
    sources: Ragged | None = None
    """UTF-8 path of each image in the dataset that the shards were made from; None if they do not say."""
    unknown: NDArray[np.int64] | None = None
    """Samples without full labels: all their classes are unknown. Only with labels from a file."""
    hidden: Ragged | None = None
    """Given positives that training does not see (`data.canaries`); None if it sees all."""
    fingerprint: str
    """Digest of names, keys, image lengths and labels: other data has another fingerprint."""
    folder: str | None = None
    """Folder of the image files, whose paths in it are the keys; None if the images are in tars."""
    allow_pipe: bool = False
    """Whether the commands of `pipe:` shards may be run. Files of indexes do not say so."""

    @property
    def shard_names(self) -> tuple[str, ...]:
        return short_names(self.urls)

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    @property
    def num_samples(self) -> int:
        return int(self.shard_sizes.sum())

    @property
    def rows_per_shard(self) -> int:
        """The number of samples of the largest shard."""
        return len(self.keys) // len(self.urls)

    def ids(self) -> NDArray[np.int64]:
        return sample_ids(self.shard_sizes)

    def key(self, sample_id: int) -> str:
        """Return a sample's key in its shard."""
        # Bytes that are not UTF-8 become escapes, as everywhere.
        return bytes(self.keys[sample_id]).decode(errors="backslashreplace")

    def source(self, sample_id: int) -> str | None:
        """Return the path of an image in the dataset that the shards were made from; None if unknown."""
        path = b"" if self.sources is None else bytes(self.sources[sample_id])
        return path.decode(errors="backslashreplace") or None

    def name(self, sample_id: int) -> str:
        """Return a sample's shard and key for messages, without control characters; the path of a file."""
        shard = "" if self.folder is not None else f"{self.shard_names[sample_id // self.rows_per_shard]}/"
        return printable(shard + self.key(sample_id))

    def labels_of(
        self, ids: NDArray[np.int64], which: Labels = "given", classes: range | None = None
    ) -> NDArray[np.int8]:
        """Return `[n, L]`: 1 positive, 0 negative, -1 unknown (of full labels: a whole row).

        With `classes`, a range of consecutive ones, only their columns.
        """
        classes = range(self.num_classes) if classes is None else classes
        positives = self._positives(which)
        known = np.full((len(ids), len(classes)), -1 if which == "given" else 0, np.int8)
        if which == "given":
            known[_entries(self.negatives, ids, classes)] = 0
        known[_entries(positives, ids, classes)] = 1
        if which == "full" and self.unknown is not None:
            known[np.isin(ids, self.unknown)] = -1
        return known

    def annotations(self, labels: Labels = "given") -> Annotations:
        """Return the positives that a heatmap store is created for."""
        positives = self._positives(labels)
        return Annotations(
            fingerprint=hashlib.sha256(f"{self.fingerprint} {labels}".encode()).hexdigest(),
            num_classes=self.num_classes,
            rows_per_shard=self.rows_per_shard,
            shard_sizes=self.shard_sizes,
            given=Ragged(positives.offsets, positives.values.astype(np.int64)),
        )

    def _positives(self, which: Labels) -> Ragged:
        return self.given if which == "given" else self.full_labels()

    def full_labels(self) -> Ragged:
        """Return all positives; raise UserError if the shards do not have them."""
        if self.full is None:
            raise UserError(
                "data.labels: full, but these shards lack full labels (`full` in the json of every "
                "sample). Use `given`."
            )
        return self.full

    def save(self, path: Path) -> None:
        """Write the index as one file; an interrupted write leaves the old one in place."""
        head = {"version": VERSION, "fingerprint": self.fingerprint}
        head |= {"shard_names": self.shard_names, "class_names": self.class_names}
        arrays: dict[str, NDArray[Any]] = {"head": np.frombuffer(json.dumps(head).encode(), np.uint8)}
        arrays |= {name: getattr(self, name) for name in ("shard_bytes", "shard_sizes")}
        # As they are used, so that the processes of a machine can map them and share the RAM.
        arrays |= {name: getattr(self, name) for name in ("image_offsets", "image_bytes")}
        for name in STORED_ROWS:
            if (rows := getattr(self, name)) is not None:
                arrays |= {f"{name}.offsets": rows.offsets, f"{name}.values": rows.values}
        with atomic_write(path, suffix=str(os.getpid())) as partial, partial.open("wb") as file:
            write_arrays(file, arrays, mapped=len(self.keys) >= MAPPED_ROWS)


def _entries(
    rows: Ragged, ids: NDArray[np.int64], classes: range
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return (index into `ids`, index into `classes`) of the classes of some rows that are in the range."""
    indices, values = rows.entries(ids)
    chosen = (values >= classes.start) & (values < classes.stop)
    return indices[chosen], values[chosen].astype(np.int64) - classes.start


def load_index(shards: str | Sequence[str], path: Path | None = None, *, allow_pipe: bool = False) -> Index:
    """Load the index of these shards, from `path` or from their folder; refuse an index of other shards.

    Local shards must exist and have the length that they had when they were indexed.
    """
    urls = tars.expand(shards)
    path = path or default_path(urls)
    if not path.exists():
        raise UserError(f"{path}: no index of these {len(urls)} shards. Create it with `bigscl index`.")
    with _opened(path) as (head, file):
        _check_names(path, head["shard_names"], short_names(urls))
        with parse_errors(path, WHAT, REMEDY):
            arrays: dict[str, Any] = {
                name: _numbers(file, name).astype(np.int64, copy=False) for name in ARRAYS
            }
            rows: dict[str, Any] = {name: _read_rows(file, name) for name in STORED_ROWS}
    index = Index(
        urls=tuple(urls),
        class_names=tuple(head["class_names"]),
        fingerprint=head["fingerprint"],
        allow_pipe=allow_pipe,
        **arrays,
        **rows,
    )
    if fault := next(_faults(index), None):
        raise BadFile(f"{path}: not {WHAT} ({fault}). {REMEDY}")
    check_shards(index)
    return index


def _check_names(path: Path, made_for: list[str], names: tuple[str, ...]) -> None:
    if tuple(made_for) != names:
        other = sorted(set(names) ^ set(made_for)) or ["their order"]
        raise BadFile(
            f"{path}: made for {len(made_for)} shards, these are {len(names)}; "
            f"they differ in {first_few(other, len(other), most=3)}. Run `bigscl index` on these shards."
        )


def _faults(index: Index) -> Iterator[str]:
    """Yield what is inconsistent in an index that was read."""
    sizes, num_rows = index.shard_sizes, len(index.keys) if index.keys is not None else 0
    if len(sizes) != len(index.urls) or len(index.shard_bytes) != len(index.urls):
        yield f"{len(sizes)} sizes of {len(index.urls)} shards"
    elif sizes.min() < 0 or sizes.max() < 1 or num_rows != len(sizes) * int(sizes.max()):
        yield f"{num_rows} keys in {len(sizes)} shards of {sizes.min()} to {sizes.max()} samples"
    for name in ("image_offsets", "image_bytes", "given", "negatives", "full", "sources"):
        rows = getattr(index, name)
        if (rows is None and name not in ("full", "sources")) or (rows is not None and len(rows) != num_rows):
            yield f"{name} of {0 if rows is None else len(rows)} samples, but {num_rows} keys"
    for rows in (index.given, index.negatives, index.full):
        if rows is not None and len(rows.values) and not 0 <= rows.values.max() < index.num_classes:
            yield f"class {rows.values.max()}, but {index.num_classes} classes"


def stored_fingerprint(path: Path) -> str | None:
    """Return the fingerprint in an index file, also if its shards are gone; None if there is no file."""
    if not path.exists():
        return None
    with _opened(path) as (head, _):
        return str(head["fingerprint"])


@contextmanager
def _opened(path: Path) -> Iterator[tuple[dict[str, Any], ArrayFile]]:
    """Yield (head, arrays) of an index file."""
    with ExitStack() as stack:
        with parse_errors(path, WHAT, REMEDY):
            # Opened here: numpy does not close a file that is not an archive.
            content = stack.enter_context(path.open("rb"))
            file = ArrayFile(content)
            head = json.loads(file["head"].tobytes())
            _check_head(head)
        if head["version"] != VERSION:
            raise BadFile(f"{path}: index format {head['version']}, expected {VERSION}. {REMEDY}")
        yield head, file


def _check_head(head: Any) -> None:
    texts = {"shard_names": head["shard_names"], "class_names": head["class_names"]}
    for name, values in texts.items():
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            raise UserError(f"{name} is no list of names")
    if type(head["version"]) is not int or not isinstance(head["fingerprint"], str):
        raise UserError("version or fingerprint is of another type")


def _numbers(file: ArrayFile, name: str) -> NDArray[Any]:
    values = file[name]
    if values.ndim != 1 or not np.issubdtype(values.dtype, np.integer):
        raise UserError(f"{name} is {values.dtype} {list(values.shape)}, expected a list of numbers")
    return values


def _read_rows(file: ArrayFile, name: str) -> Ragged | None:
    if f"{name}.offsets" not in file:
        return None
    offsets = _numbers(file, f"{name}.offsets").astype(np.int64, copy=False)
    values = _numbers(file, f"{name}.values")
    rises = len(offsets) > 0 and offsets[0] == 0 and bool((offsets[1:] >= offsets[:-1]).all())
    if not rises or offsets[-1] != len(values):
        raise UserError(f"{name} has {len(values)} values, not as many as its offsets say")
    return Ragged(offsets, values.astype(np.uint8 if name in TEXTS else np.uint32, copy=False))


def check_shards(index: Index) -> None:
    """Raise an error that names the local shards that are missing or have changed length since indexing."""
    sizes_now = [tars.local_bytes(url) for url in index.urls]
    expected = index.shard_bytes.tolist()
    missing = [url for url, size in zip(index.urls, sizes_now, strict=True) if size == tars.MISSING]
    if missing:
        raise FileNotFoundError(f"{len(missing)} shards are missing: {first_few(missing, len(missing))}")
    changed = [
        f"{url} ({size} bytes, {before} when indexed)"
        for url, size, before in zip(index.urls, sizes_now, expected, strict=True)
        if size is not None and size != before
    ]
    if changed:
        raise BadFile(
            f"{len(changed)} shards have changed: {first_few(changed, len(changed))}. "
            f"Run `bigscl index` again."
        )


def default_path(urls: Sequence[str]) -> Path:
    """Return the default path of an index: in the folder of its shards, named after their common prefix."""
    if any(scheme(url) for url in urls):
        raise UserError(
            f"{urls[0]}: the index of remote shards needs a local path. Give `bigscl index` --output "
            f"FILE.npz, and a run that file as data.train_index or data.val_index."
        )
    letters = zip(*(os.path.basename(url) for url in urls), strict=False)
    common = "".join(letter[0] for letter in takewhile(_all_equal, letters))
    common = re.sub(r"([-_.]*\d*)?(\.(tar|tgz).*)?$", "", common)
    return Path(urls[0]).parent / (f"bigscl-index-{common}.npz" if common else "bigscl-index.npz")


def short_names(urls: Sequence[str]) -> tuple[str, ...]:
    """Return the urls without their common folder, so that shards may be moved together."""
    return _short_names(tuple(urls))


# 2 ms for 1,282 shards, and needed for the name of each sample.
@lru_cache(maxsize=16)
def _short_names(urls: tuple[str, ...]) -> tuple[str, ...]:
    # A pipe is a command, not a path.
    if any(scheme(url) == "pipe" for url in urls):
        return urls
    folders = zip(*(url.split("/")[:-1] for url in urls), strict=False)
    depth = sum(1 for _ in takewhile(_all_equal, folders))
    return tuple("/".join(url.split("/")[depth:]) for url in urls)


def _all_equal(values: Sequence[str]) -> bool:
    return len(set(values)) == 1


def sample_ids(shard_sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the ids of all samples of shards of these sizes, ascending."""
    return ids_of_shards(np.arange(len(shard_sizes)), shard_sizes, int(shard_sizes.max()))


def with_fingerprint(index: Index) -> Index:
    """Return the index with the fingerprint of its content."""
    head = [index.shard_names, index.class_names, index.shard_sizes.tolist()]
    digest = hashlib.sha256(json.dumps(head).encode())
    digest.update(index.image_bytes.astype("<i8").tobytes())
    for name in ROWS:
        digest.update(name.encode())
        if (rows := getattr(index, name)) is not None:
            digest.update(rows.offsets.astype("<i8").tobytes())
            digest.update(rows.values.astype("<u4").tobytes())
    return replace(index, fingerprint=digest.hexdigest())


def true_labels(
    index: Index, ids: NDArray[np.int64], classes: range | None = None
) -> tuple[NDArray[np.int8], Labels]:
    """Return (labels to evaluate against, their name): the full ones, else the given without unknowns.

    Shards with one class per image do not label the other classes: those count as absent, as in the usual
    top-1 accuracy. `classes` as in `labels_of`.
    """
    if index.full is not None:
        return index.labels_of(ids, "full", classes), "full"
    return index.labels_of(ids, "given", classes).clip(min=0), "given"


def most_positives(index: Index, ids: NDArray[np.int64]) -> int:
    """Return how many of the samples have the class that most of them have, by `true_labels`."""
    positives = index.given if index.full is None else index.full
    return int(np.bincount(positives.entries(ids)[1]).max(initial=0))


def write_sample_list(index: Index, path: Path) -> None:
    """Write the names of classes and shards and the keys of all samples, in the order of a store's rows."""
    head = {
        "format": SAMPLES_FORMAT,
        "fingerprint": index.fingerprint,
        "rows_per_shard": index.rows_per_shard,
        "class_names": list(index.class_names),
    }
    with atomic_write(path) as partial, partial.open("w") as file:
        # A line per shard: a million keys are never one string.
        file.write(json.dumps(head)[:-1] + ', "shards": [\n')
        for shard, name in enumerate(index.shard_names):
            first = shard * index.rows_per_shard
            rows = range(first, first + int(index.shard_sizes[shard]))
            listed: dict[str, Any] = {"name": name, "keys": [index.key(row) for row in rows]}
            if index.sources is not None:
                listed["sources"] = [index.source(row) for row in rows]
            end = "\n" if shard == len(index.urls) - 1 else ",\n"
            file.write(json.dumps(listed) + end)
        file.write("]}\n")


def is_list_of(index: Index, path: Path) -> bool:
    """Return whether the file lists the samples of this index. It is written whole, so its head is enough."""
    wanted = f'"fingerprint": "{index.fingerprint}"'
    try:
        with path.open() as file:
            return wanted in file.read(200)
    except (OSError, ValueError):
        return False
