"""Several real processes over one store."""

import hashlib

import numpy as np
import pytest

from bigscl.store import HeatmapStore, Prefetcher, ShardCache, StoreError, Update, Writeback
from bigscl.store.testing import run_ranks
from tests.test_store.conftest import all_ids, make_annotations, random_update

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
                    mixed = {name: (array[ids] / 2).astype(array.dtype) for name, array in values.arrays()}
                    mixed["scores"] += (rows.scores / 2).astype(np.float16)
                    writeback.put(ids, Update(**mixed))
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
