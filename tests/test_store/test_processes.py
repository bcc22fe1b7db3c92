"""Several real processes over one store."""

import hashlib
import threading

import numpy as np
import pytest

from bigscl.store import GroupSpec, HeatmapStore, Prefetcher, Rows, ShardCache, StoreError, Writeback
from bigscl.store.snapshots import SnapshotLog
from tests.test_store.conftest import all_ids, make_annotations, random_update
from tests.test_store.ranks import run_ranks

ANNOTATIONS = {"shard_sizes": (6, 4, 6, 5, 1, 6, 3), "num_classes": 5}


def train(transport, url):
    """Two epochs, a compaction, one more epoch: each rank its own shards, which change hands every epoch."""
    annotations = make_annotations(**ANNOTATIONS)
    store = HeatmapStore.open(url, annotations=annotations, mode="w", run="ranks", transport=transport)
    with store:
        for epoch in range(3):
            values = random_update(store, store.spec.num_rows, seed=epoch)
            mine = range((transport.rank + epoch) % transport.world_size, 7, transport.world_size)
            batches = [store.spec.sample_ids(shard) for shard in mine]
            with (
                ShardCache(store, epoch) as cache,
                Prefetcher(cache) as prefetcher,
                Writeback(cache) as writeback,
            ):
                for ids, rows in prefetcher.pair(batches, lambda ids: ids):
                    mixed = {name: (array[ids] / 2).astype(array.dtype) for name, array in values.items()}
                    mixed["scores"] += (rows.scores / 2).astype(np.float16)
                    writeback.put(ids, Rows(**mixed))
                writeback.drain()
            store.commit(epoch=epoch)
            if epoch == 1:
                store.compact(3)
            store.drop_snapshots()


def contents(path):
    """Every chunk file of the store by name, hashed."""
    files = sorted(p for p in path.rglob("*") if p.is_file() and p.name.startswith("c."))
    return {str(p.relative_to(path)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def test_any_number_of_processes_leave_the_same_bytes(tmp_path):
    left = []
    for world_size in (1, 2, 4):
        path = tmp_path / str(world_size)
        HeatmapStore.create(path, make_annotations(**ANNOTATIONS), heatmap_size=3)
        assert run_ranks(train, world_size, str(path)) == [0] * world_size
        left.append(contents(path))
    assert left[0]
    assert left[0] == left[1] == left[2]


def fail_on_rank_one(transport, url):
    annotations = make_annotations(**ANNOTATIONS)
    store = HeatmapStore.open(url, annotations=annotations, mode="w", run="ranks", transport=transport)
    with store:
        if transport.rank == 1:
            store._failure = OSError("no space left on rank 1")
        store.save_shard(transport.rank, store.load_shard(transport.rank))
        expected = OSError if transport.rank == 1 else StoreError
        with pytest.raises(expected, match="no space left on rank 1"):
            store.commit(epoch=0)


def test_one_failing_rank_fails_the_commit_on_all(tmp_path):
    HeatmapStore.create(tmp_path / "store", make_annotations(**ANNOTATIONS), heatmap_size=3)
    assert run_ranks(fail_on_rank_one, 3, str(tmp_path / "store")) == [0, 0, 0]
    # What opening for writing claimed, and no commit after it.
    assert HeatmapStore.open(tmp_path / "store").snapshot.id == 1


def write_the_same_shard(transport, url):
    annotations = make_annotations(**ANNOTATIONS)
    store = HeatmapStore.open(url, annotations=annotations, mode="w", run="ranks", transport=transport)
    with store:
        store.save_shard(2, store.load_shard(2))
        with pytest.raises(StoreError, match="shard 2 was written by two ranks"):
            store.commit(epoch=0)


def test_two_ranks_cannot_commit_one_shard(tmp_path):
    HeatmapStore.create(tmp_path / "store", make_annotations(**ANNOTATIONS), heatmap_size=3)
    assert run_ranks(write_the_same_shard, 2, str(tmp_path / "store")) == [0, 0]


def open_held_store(transport, url):
    annotations = make_annotations(**ANNOTATIONS)
    with pytest.raises(StoreError, match="in use by run 'holder'"):
        HeatmapStore.open(url, annotations=annotations, mode="w", run="late", transport=transport)


def test_every_rank_hears_why_the_store_does_not_open(tmp_path):
    annotations = make_annotations(**ANNOTATIONS)
    HeatmapStore.create(tmp_path / "store", annotations, heatmap_size=3)
    with HeatmapStore.open(tmp_path / "store", annotations=annotations, mode="w", run="holder") as store:
        assert run_ranks(open_held_store, 2, str(tmp_path / "store")) == [0, 0]
        assert len(store.read(all_ids(annotations))) == 31


def go_back_and_write(transport, url):
    """Rank 1 sees an old listing of the snapshots, as a node of a shared file system may."""
    annotations = make_annotations(**ANNOTATIONS)
    store = HeatmapStore.open(url, annotations=annotations, mode="w", run="ranks", transport=transport)
    with store:
        for epoch in range(2):
            if transport.rank == 1:
                store.save_shard(1, store.load_shard(1))
            store.commit(epoch=epoch)
        if transport.rank == 1:
            SnapshotLog.ids = lambda self: [0]
        store.rollback(store.snapshot.id - 1)
        if transport.rank == 1:
            changed = store.load_shard(1)
            changed.scores[:] = 0.25
            store.save_shard(1, changed)
        store.commit(epoch=2)


def test_rank_with_an_old_listing_writes_to_no_slot_that_a_snapshot_names(tmp_path):
    HeatmapStore.create(tmp_path / "store", make_annotations(**ANNOTATIONS), heatmap_size=3)
    assert run_ranks(go_back_and_write, 2, str(tmp_path / "store")) == [0, 0]
    store = HeatmapStore.open(tmp_path / "store", annotations=make_annotations(**ANNOTATIONS))
    named = [snapshot.slots[1] for snapshot in store.snapshots() if snapshot.epoch in (0, 2)]
    assert named[-1] not in named[:-1]
    for snapshot in store.snapshots():
        reader = HeatmapStore.open(
            tmp_path / "store", annotations=make_annotations(**ANNOTATIONS), snapshot=snapshot.id
        )
        assert (reader.load_shard(1).scores == 0.25).all() == (snapshot.epoch == 2)


def write_before_the_drop(transport, url):
    """All slots are named until rank 0 drops what was announced, half a second later, in a thread."""
    annotations = make_annotations(**ANNOTATIONS)
    store = HeatmapStore.open(url, annotations=annotations, mode="w", run="ranks", transport=transport)
    shard = transport.rank
    with store:
        for epoch in range(2):
            store.save_shard(shard, store.load_shard(shard))
            store.commit(epoch=epoch)
        store.announce_drop()
        dropped = threading.Timer(0.5, store.drop_announced)
        if transport.rank == 0:
            dropped.start()
        changed = store.load_shard(shard)
        changed.scores[:] = 0.25
        with pytest.raises(InterruptedError):
            store.save_shard(shard, changed, check=stop_waiting)
        store.save_shard(shard, changed)
        if transport.rank == 0:
            dropped.join()
        store.note_drop()
        store.commit(epoch=2)


def stop_waiting():
    raise InterruptedError


def test_ranks_wait_for_slots_that_an_announced_drop_frees(tmp_path):
    HeatmapStore.create(
        tmp_path / "store", make_annotations(**ANNOTATIONS), heatmap_size=3, group=GroupSpec(slots=2)
    )
    assert run_ranks(write_before_the_drop, 2, str(tmp_path / "store")) == [0, 0]
    annotations = make_annotations(**ANNOTATIONS)
    store = HeatmapStore.open(tmp_path / "store", annotations=annotations)
    for number, expected in ((store.snapshot.id, True), (store.snapshot.parent, False)):
        reader = HeatmapStore.open(tmp_path / "store", annotations=annotations, snapshot=number)
        for shard in range(2):
            assert (reader.load_shard(shard).scores == 0.25).all() == expected
