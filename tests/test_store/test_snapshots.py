"""Snapshots and the reports of ranks, as columns of numbers."""

import json

import numpy as np
import pytest

from bigscl.store import Snapshot
from bigscl.store.errors import BadFile
from bigscl.store.format.fields import as_table, seal_fault
from bigscl.store.snapshots import Written, merge_reports, report, with_versions

NAMES = ("scores", "samples")


def snapshot(slots, digests):
    return Snapshot(
        id=1,
        parent=0,
        time=0.0,
        run="run",
        epoch=0,
        step=0,
        group="arrays-000",
        slots=tuple(slots),
        digests={name: as_table(values) for name, values in digests.items()},
    )


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_reports_of_ranks_replace_the_versions_of_their_shards_only(world_size):
    random = np.random.default_rng(world_size)
    old = snapshot(random.integers(-1, 9, 40), {"scores": random.integers(0, 2**32, 40)})
    written = {
        int(shard): Written(int(random.integers(9)), {name: int(random.integers(2**32)) for name in NAMES})
        for shard in random.permutation(40)[:25]
    }
    parts = [dict(list(written.items())[rank::world_size]) for rank in range(world_size)]
    new = with_versions(old, merge_reports([report(part, None) for part in parts] + [report({}, None)]))
    for shard in range(40):
        if shard in written:
            assert new.slots[shard] == written[shard].slot
            assert new.digests_of(shard) == written[shard].digests
        else:
            assert new.slots[shard] == old.slots[shard]
            assert new.digests_of(shard) == old.digests_of(shard)
    assert Snapshot.from_bytes(new.to_bytes()) == new


def test_a_snapshot_has_the_digest_of_its_values_and_any_changed_byte_is_found():
    content = snapshot(range(9), {"scores": range(9)}).to_bytes()
    assert seal_fault(json.loads(content)) is None
    assert Snapshot.from_bytes(json.dumps(json.loads(content), indent=1).encode()).slots == tuple(range(9))
    for place in range(len(content)):
        with pytest.raises(BadFile):
            Snapshot.from_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
