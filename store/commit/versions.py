"""Which files of a store belong to which version of a shard, and so to which snapshot."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bigscl.store.commit.snapshots import Snapshot

CHUNK = re.compile(r"(arrays-\d+)/\w+/c\.(\d{1,9})\.(\d{1,9})\b")
Version = tuple[str, int, int]
"""(array group, slot, shard)"""


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
    """The versions a snapshot names."""
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
