"""Committed states of the store: small immutable files with growing numbers."""

import json
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

from bigscl.store.backends.backend import Backend
from bigscl.store.errors import AlreadyExists, CommitConflict, NotAStore, SnapshotMissing, StoreError
from bigscl.store.format.fields import Fields, seal

FOLDER = "snapshots"
NO_DIGEST = -1
Check = Callable[[], None]
"""Raises if the writer has lost its lease."""
REMEDY = "Restore the file from a copy, or remove it: a run then resumes from an older checkpoint."


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """For each shard the slot of its version (-1: initial values), and the attributes of the trainer."""

    id: int
    parent: int | None
    time: float
    run: str
    epoch: int
    step: int
    group: str
    slots: tuple[int, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    generation: int = 0
    """Of the writer that made it: one more for each opening for writing."""
    digests: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """By array, for each shard, the digest of its version; -1: unknown."""

    def digests_of(self, shard: int) -> dict[str, int]:
        """Return the digests of a shard's version, by array."""
        found = {name: values[shard] for name, values in self.digests.items()}
        return {name: digest for name, digest in found.items() if digest != NO_DIGEST}

    def to_bytes(self) -> bytes:
        """The file's content."""
        return json.dumps(seal(asdict(self)), separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, data: bytes, place: str = "snapshot") -> Self:
        """The snapshot in a file, checked; fields of later versions are ignored."""
        fields = Fields.parse(data, place, REMEDY).sealed()
        slots = fields.integers("slots", -1, 2**31)
        group = fields.text("group")
        if not re.fullmatch(r"arrays-\d{3,9}", group):
            raise fields.bad(f"group: found {group!r:.40}, expected arrays- and a number")
        digests = fields.inside("digests")
        return cls(
            id=fields.integer("id", 0),
            parent=None if fields.is_null("parent") else fields.integer("parent", 0),
            time=fields.number("time"),
            run=fields.text("run"),
            epoch=fields.integer("epoch", -1, 2**31),
            step=fields.integer("step", 0),
            group=group,
            slots=slots,
            attributes=fields.mapping("attributes"),
            generation=fields.integer("generation", 0),
            digests={name: digests.integers(name, -1, 2**32, len(slots)) for name in digests},
        )


def pack(snapshots: Iterable[Snapshot]) -> bytes:
    """Snapshots as one message from rank 0 to the others, which need not list the files themselves.

    A listing can be old on a shared file system, and a slot that a snapshot names would look free.
    """
    return b"\n".join(snapshot.to_bytes() for snapshot in snapshots)


def unpack(message: bytes) -> dict[int, Snapshot]:
    """The snapshots of a message by number, in its order."""
    found = map(Snapshot.from_bytes, message.split(b"\n"))
    return {snapshot.id: snapshot for snapshot in found}


class SnapshotLog:
    """The snapshot files of one store."""

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
        """Whether a snapshot is (still) retained."""
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
            what = f"id: found {snapshot.id}, expected {number}, as its name says"
            raise Fields({}, place, REMEDY).bad(what)
        return snapshot

    def newest(self) -> int:
        """The number of the current state."""
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
        """Remove a snapshot; its slots are free from now on."""
        self._backend.delete(self._key(number))


@dataclass(frozen=True, slots=True)
class Written:
    """A version of a shard that a rank wrote: where it is, and the digests of its arrays."""

    slot: int
    digests: Mapping[str, int]


def report(written: Mapping[int, Written], failure: Exception | None) -> bytes:
    """The message of a rank to rank 0 at a commit."""
    shards = {shard: [version.slot, version.digests] for shard, version in written.items()}
    return json.dumps({"shards": shards, "error": None if failure is None else str(failure)}).encode()


def merge_reports(reports: list[bytes]) -> dict[int, Written]:
    """All ranks' versions by shard; an error if any rank failed, or two wrote one shard."""
    written: dict[int, Written] = {}
    for rank, values in enumerate(map(json.loads, reports)):
        if values["error"] is not None:
            raise StoreError(f"rank {rank} failed, nothing was committed: {values['error']}")
        for shard, (slot, digests) in values["shards"].items():
            if int(shard) in written:
                raise StoreError(f"shard {shard} was written by two ranks; the second is rank {rank}")
            written[int(shard)] = Written(slot, digests)
    return written


def with_versions(snapshot: Snapshot, written: Mapping[int, Written]) -> Snapshot:
    """The snapshot with these versions in place of its own."""
    slots = list(snapshot.slots)
    unknown = [NO_DIGEST] * len(slots)
    names = {*snapshot.digests, *(name for version in written.values() for name in version.digests)}
    digests = {name: list(snapshot.digests.get(name, unknown)) for name in sorted(names)}
    for shard, version in written.items():
        slots[shard] = version.slot
        for name, values in digests.items():
            values[shard] = version.digests.get(name, NO_DIGEST)
    return replace(
        snapshot, slots=tuple(slots), digests={name: tuple(values) for name, values in digests.items()}
    )
