"""Committed states of the store: small immutable files with growing numbers."""

import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from bigscl.store.backends.backend import Backend
from bigscl.store.errors import AlreadyExists, BadFile, CommitConflict, NotAStore, SnapshotMissing, StoreError
from bigscl.store.format.fields import (
    Number,
    Table,
    Whole,
    as_table,
    from_table,
    numbers_of,
    read_object,
    sealed_text,
    to_dataclass,
    to_table,
)

FOLDER = "snapshots"
NO_DIGEST = -1
OrNone = Annotated[int, Field(strict=True, ge=-1, le=2**31)]
"""An epoch or a slot; -1: none."""
Check = Callable[[], None]
"""Raises if the writer has lost its lease."""
CHUNK = re.compile(r"(arrays-\d+)/\w+/c\.(\d{1,9})\.(\d{1,9})\b")
Version = tuple[str, int, int]
"""(array group, slot, shard)"""
REMEDY = "Restore the file from a copy, or remove it: a run then resumes from an older checkpoint."


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """For each shard the slot of its version (-1: initial values), and the attributes of the trainer."""

    id: Whole
    parent: Whole | None
    time: Number
    run: str
    epoch: OrNone
    step: Whole
    group: Annotated[str, Field(pattern=r"^arrays-[0-9]{3,9}$")]
    slots: tuple[OrNone, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    generation: Whole = 0
    """Of the writer that made it: one more for each opening for writing."""
    digests: Mapping[str, Table] = field(default_factory=dict)
    """By array, for each shard, the digest of its version as int64, little-endian; -1: unknown."""

    def digests_of(self, shard: int) -> dict[str, int]:
        place = slice(8 * shard, 8 * shard + 8)
        found = {
            name: int.from_bytes(table[place], "little", signed=True) for name, table in self.digests.items()
        }
        return {name: digest for name, digest in found.items() if digest != NO_DIGEST}

    def to_bytes(self) -> bytes:
        # Not asdict, which copies every number of large tables.
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        values["attributes"] = json.loads(json.dumps(self.attributes))
        values["digests"] = {name: to_table(table) for name, table in self.digests.items()}
        return sealed_text(values)

    @classmethod
    def from_bytes(cls, data: bytes, place: str = "snapshot") -> Self:
        """The snapshot in a file, checked; fields of later versions are ignored."""
        snapshot = to_dataclass(cls, read_object(data, place, REMEDY), place, REMEDY)
        for name, table in snapshot.digests.items():
            numbers = (
                numbers_of(table) if len(table) == 8 * len(snapshot.slots) else np.array([NO_DIGEST - 1])
            )
            if ((numbers < NO_DIGEST) | (numbers > 2**32)).any():
                many = f"{len(snapshot.slots)} whole numbers (int64) from {NO_DIGEST} to 2**32"
                raise BadFile(f"{place}: digests: {name}: expected base64 of {many}. {REMEDY}")
        return snapshot


def pack(snapshots: Iterable[Snapshot]) -> bytes:
    """Snapshots as one message from rank 0 to the others, which need not list the files themselves.

    A listing can be old on a shared file system, and a slot that a snapshot names would look free.
    """
    return b"\n".join(snapshot.to_bytes() for snapshot in snapshots)


def unpack(message: bytes) -> dict[int, Snapshot]:
    found = map(Snapshot.from_bytes, message.split(b"\n"))
    return {snapshot.id: snapshot for snapshot in found}


class SnapshotLog:
    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    @staticmethod
    def _key(number: int) -> str:
        return f"{FOLDER}/{number:08d}.json"

    def ids(self) -> list[int]:
        """Numbers of the retained snapshots, oldest first."""
        names = (name.removesuffix(".json") for name in self._backend.names(FOLDER) if name.endswith(".json"))
        return sorted(int(name) for name in names if name.isdigit())

    def exists(self, number: int) -> bool:
        return self._backend.read(self._key(number)) is not None

    def read(self, number: int) -> Snapshot:
        """One snapshot, or SnapshotMissing with those there are."""
        data = self._backend.read(self._key(number))
        if data is None:
            raise SnapshotMissing(
                f"{self._backend.url}: no snapshot {number}; retained are {self.ids() or 'none'}. "
                f"Choose one of those, or the checkpoint that names one."
            )
        return self._parse(number, data)

    def _parse(self, number: int, data: bytes) -> Snapshot:
        place = f"{self._backend.url}/{self._key(number)}"
        snapshot = Snapshot.from_bytes(data, place)
        if snapshot.id != number:
            raise BadFile(f"{place}: id: found {snapshot.id}, expected {number}, as its name says. {REMEDY}")
        return snapshot

    def newest(self) -> int:
        numbers = self.ids()
        if not numbers:
            raise NotAStore(f"{self._backend.url}: has no snapshot. Create a store first, or check the path.")
        return numbers[-1]

    def read_all(self) -> dict[int, Snapshot]:
        """All retained snapshots by number; one that is dropped meanwhile is left out."""
        found = {}
        for number in self.ids():
            data = self._backend.read(self._key(number))
            if data is not None:
                found[number] = self._parse(number, data)
        return found

    def create(self, snapshot: Snapshot) -> None:
        """Make it the newest state, or raise CommitConflict if its number is taken."""
        try:
            self._backend.create(self._key(snapshot.id), snapshot.to_bytes())
        except AlreadyExists:
            raise self._conflict(f"snapshot {snapshot.id}") from None

    def publish(self, snapshot: Snapshot, check: Check) -> None:
        """Make it the newest state, or nothing, for a writer whose `check` raises once its lease is lost."""
        check()
        self.create(snapshot)
        try:
            check()
            # A writer that was frozen before it committed may find its number free again.
            if self.newest() != snapshot.id:
                raise self._conflict(f"a later snapshot than {snapshot.id}")
        except StoreError:
            self.drop(snapshot.id)
            raise

    def _conflict(self, what: str) -> CommitConflict:
        return CommitConflict(
            f"{self._backend.url}: {what} was committed by another process. "
            f"Two runs write one store: stop one of them, then resume the other."
        )

    def claim(self, number: int, run: str, check: Check, generation: int | None = None) -> Snapshot:
        """Make a retained snapshot the newest, under a new number, as the first of a new writer.

        Another writer that was about to commit finds the number taken, and slots of its own.
        """
        wanted, newest = self.read(number), self.read(self.newest())
        if generation is None:
            generation = newest.generation + 1
        claimed = replace(
            wanted, id=newest.id + 1, parent=number, time=time.time(), run=run, generation=generation
        )
        self.publish(claimed, check)
        return claimed

    def drop_after(self, number: int, current: int, check: Check) -> None:
        """Remove the snapshots between a state that was returned to and the one that now has its content."""
        for later in self.ids():
            if number < later < current:
                check()
                self.drop(later)

    def drop(self, number: int) -> None:
        self._backend.delete(self._key(number))


@dataclass(frozen=True, slots=True)
class Written:
    """A version of a shard that a rank wrote: where it is, and the digests of its arrays."""

    slot: int
    digests: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardVersions:
    """Versions of some shards as columns: a commit may have 300,000."""

    shards: NDArray[np.int64]
    slots: NDArray[np.int64]
    digests: Mapping[str, NDArray[np.int64]]


def report(written: Mapping[int, Written], failure: Exception | None) -> bytes:
    """Return the message of a rank to rank 0 at a commit."""
    versions = list(written.values())
    names = sorted({name for version in versions for name in version.digests})
    columns: dict[str, list[int]] = {"shards": list(written), "slots": [version.slot for version in versions]}
    for name in names:
        columns[f"digest {name}"] = [version.digests.get(name, NO_DIGEST) for version in versions]
    tables = {name: to_table(as_table(numbers)) for name, numbers in columns.items()}
    return json.dumps({"tables": tables, "error": None if failure is None else str(failure)}).encode()


def merge_reports(reports: list[bytes]) -> ShardVersions:
    """Return all ranks' versions; raise StoreError if a rank failed, or two wrote one shard."""
    parts: list[dict[str, NDArray[np.int64]]] = []
    for rank, message in enumerate(map(json.loads, reports)):
        if message["error"] is not None:
            raise StoreError(f"rank {rank} failed, nothing was committed: {message['error']}")
        parts.append({name: numbers_of(from_table(table)) for name, table in message["tables"].items()})
    _check_disjoint([part["shards"] for part in parts])

    def column(name: str) -> NDArray[np.int64]:
        unknown = (np.full(len(part["shards"]), NO_DIGEST) for part in parts)
        return np.concatenate([part.get(name, rest) for part, rest in zip(parts, unknown, strict=True)])

    names = sorted({name.removeprefix("digest ") for part in parts for name in part} - {"shards", "slots"})
    digests = {name: column(f"digest {name}") for name in names}
    return ShardVersions(shards=column("shards"), slots=column("slots"), digests=digests)


def _check_disjoint(shards: list[NDArray[np.int64]]) -> None:
    """Raise StoreError if a shard is among those of two ranks."""
    written, ranks = np.concatenate(shards), np.repeat(np.arange(len(shards)), [len(own) for own in shards])
    order = np.lexsort((ranks, written))
    written, ranks = written[order], ranks[order]
    if len(twice := np.flatnonzero(written[1:] == written[:-1])):
        shard, rank = written[twice[0]], ranks[twice[0] + 1]
        raise StoreError(f"shard {shard} was written by two ranks; the second is rank {rank}")


def with_versions(snapshot: Snapshot, versions: ShardVersions) -> Snapshot:
    """Return the snapshot with these versions in place of its own."""
    unknown = as_table(np.full(len(snapshot.slots), NO_DIGEST))

    def replaced(numbers: Any, values: NDArray[np.int64] | int) -> NDArray[np.int64]:
        table = np.array(numbers, np.int64)
        table[versions.shards] = values
        return table

    digests = {
        name: as_table(
            replaced(numbers_of(snapshot.digests.get(name, unknown)), versions.digests.get(name, NO_DIGEST))
        )
        for name in sorted({*snapshot.digests, *versions.digests})
    }
    slots = replaced(snapshot.slots, versions.slots)
    return replace(snapshot, slots=tuple(slots.tolist()), digests=digests)


# Files by version


@dataclass(frozen=True, slots=True, kw_only=True)
class Bytes:
    """How much a snapshot names, and how much no other retained snapshot names."""

    all: int
    only_here: int


def version_of(key: str) -> Version | None:
    """The version that a file belongs to, by its key `arrays-000/scores/c.<slot>.<shard>...`."""
    match = CHUNK.match(key)
    return None if match is None else (match[1], int(match[2]), int(match[3]))


def by_version(listing: Iterable[tuple[str, int]]) -> Counter[Version]:
    """Bytes of each version that is on the storage, named by a snapshot or not."""
    totals: Counter[Version] = Counter()
    for key, num_bytes in listing:
        if (version := version_of(key)) is not None:
            totals[version] += num_bytes
    return totals


def versions_of(snapshot: Snapshot) -> set[Version]:
    return {(snapshot.group, slot, shard) for shard, slot in enumerate(snapshot.slots) if slot >= 0}


def snapshot_bytes(snapshots: Sequence[Snapshot], versions: Counter[Version]) -> dict[int, Bytes]:
    """By snapshot, the bytes of what it names."""
    named = {snapshot.id: versions_of(snapshot) for snapshot in snapshots}
    times = Counter(version for found in named.values() for version in found)
    return {
        number: Bytes(
            all=sum(versions[version] for version in found),
            only_here=sum(versions[version] for version in found if times[version] == 1),
        )
        for number, found in named.items()
    }
