"""Committed states of the store: small immutable files with growing numbers."""

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

from store.backends import Backend
from store.errors import AlreadyExists, CommitConflict, SnapshotMissing, StoreError

FOLDER = "snapshots"


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """For each shard the slot of its version (-1: initial values), and what the trainer wants to remember."""

    id: int
    parent: int | None
    time: float
    run: str
    epoch: int
    step: int
    group: str
    slots: tuple[int, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """The file's content."""
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """The snapshot in a file; fields of later versions are ignored."""
        values = json.loads(data)
        known = {name: values[name] for name in cls.__slots__}
        known["slots"] = tuple(known["slots"])
        return cls(**known)


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
        return Snapshot.from_bytes(data)

    def read_all(self) -> dict[int, Snapshot]:
        """All retained snapshots by number; one dropped while we look is left out."""
        found = {}
        for number in self.ids():
            data = self._backend.read(self._key(number))
            if data is not None:
                found[number] = Snapshot.from_bytes(data)
        return found

    def create(self, snapshot: Snapshot) -> None:
        """Make it the newest state, or raise CommitConflict if its number is taken."""
        try:
            self._backend.create(self._key(snapshot.id), snapshot.to_bytes())
        except AlreadyExists:
            raise CommitConflict(
                f"{self._backend.url}: snapshot {snapshot.id} was committed by another process. "
                f"Two runs write one store: stop one of them, then resume the other."
            ) from None

    def roll_back(self, number: int) -> Snapshot:
        """Make a retained snapshot the newest, under a new number, and drop those that came after it."""
        wanted = self.read(number)
        newest = self.ids()[-1]
        if newest == number:
            return wanted
        current = replace(wanted, id=newest + 1, parent=number, time=time.time())
        self.create(current)
        for later in range(number + 1, newest + 1):
            self.drop(later)
        return current

    def drop(self, number: int) -> None:
        """Remove a snapshot; its slots are free from now on."""
        self._backend.delete(self._key(number))


def merge_reports(reports: list[dict[str, Any]]) -> dict[int, int]:
    """All ranks' (shard, slot) pairs; an error if any rank failed, or two wrote one shard."""
    written: dict[int, int] = {}
    for rank, report in enumerate(reports):
        if report["error"] is not None:
            raise StoreError(f"rank {rank} failed, nothing was committed: {report['error']}")
        for shard, slot in report["shards"].items():
            if int(shard) in written:
                raise StoreError(f"shard {shard} was written by two ranks; the second is rank {rank}")
            written[int(shard)] = slot
    return written
