"""Damage, full disks, read-only places: a clear error, and the last commit as it was."""

import os
import resource
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import pytest

from bigscl.store import GroupSpec, HeatmapStore, ShardCache, StoreError, update, verify
from bigscl.store.errors import ChunkCorrupt
from tests.test_store.conftest import all_ids, assert_same_rows, make_annotations, random_update


@pytest.fixture
def committed(store, annotations):
    """A store with one commit, and what it holds."""
    ids = all_ids(annotations)
    update(store, 0, ids, random_update(store, len(ids), seed=0))
    store.commit(epoch=0)
    return store, store.read(ids)


def chunk(store, array, shard):
    """The file of the first chunk of a shard."""
    slot = store.snapshot.slots[shard]
    keys = [key for key in store.arrays.keys(shard, slot) if f"/{array}/" in key]
    return Path(store.backend.url, keys[0])


@pytest.mark.parametrize("array", ["scores", "heatmaps", "samples"])
def test_a_flipped_bit_is_found_and_its_samples_named(committed, array):
    store, _ = committed
    path = chunk(store, array, 1)
    data = bytearray(path.read_bytes())
    data[3] ^= 4
    path.write_bytes(data)
    with pytest.raises(ChunkCorrupt, match=rf"{array}: shard 1, slot 3 \(samples 5 to 7\).*bigscl repair"):
        store.read([5])
    with ShardCache(store, 1) as cache, pytest.raises(ChunkCorrupt):
        cache.gather(np.array([6]))
    problems = [problem for _, found in verify(store) for problem in found]
    assert [(p.shard, p.array, p.samples) for p in problems] == [(1, array, (5, 6, 7))]


def test_a_missing_and_a_truncated_chunk_are_found(committed):
    store, _ = committed
    chunk(store, "scores", 0).unlink()
    truncated = chunk(store, "heatmaps", 2)
    truncated.write_bytes(truncated.read_bytes()[:-9])
    with pytest.raises(ChunkCorrupt, match="a chunk file is missing"):
        store.read([0])
    with pytest.raises(ChunkCorrupt):
        store.read([10])
    found = [(p.shard, p.array) for _, problems in verify(store) for p in problems]
    assert found == [(0, "scores"), (2, "heatmaps")]


def test_a_full_disk_is_a_clear_error_and_the_last_commit_stays(committed, annotations):
    store, before = committed
    ids = all_ids(annotations)
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(
            StoreError, match=r"could not be written: .*Free some space.*last commit is intact"
        ):
            update(store, 1, ids, random_update(store, len(ids), seed=1))
        with pytest.raises(StoreError, match="could not be written"):
            store.commit(epoch=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert_same_rows(HeatmapStore.open(store.backend.url).read(ids), before)
    store.rollback(store.snapshot.id)
    update(store, 1, ids, random_update(store, len(ids), seed=1))
    assert store.commit(epoch=1).epoch == 1


def test_a_disk_too_full_for_the_snapshot_keeps_the_last_commit(committed, annotations):
    store, before = committed
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    try:
        with pytest.raises(StoreError, match="could not commit"):
            store.commit(epoch=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    ids = all_ids(annotations)
    assert_same_rows(HeatmapStore.open(store.backend.url).read(ids), before)
    assert store.commit(epoch=1).id == 3


def test_a_really_full_file_system(annotations, tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(small)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting a small tmpfs is not allowed here")
    try:
        annotations = make_annotations((64, 64), 30)
        HeatmapStore.create(
            small / "store", annotations, heatmap_size=8, group=GroupSpec(layout="topk", top=20)
        )
        with HeatmapStore.open(small / "store", annotations=annotations, mode="w") as store:
            ids = np.arange(8)
            values = random_update(store, 8, seed=0)
            update(store, 0, ids, values)
            kept = store.commit(epoch=0)
            with pytest.raises(StoreError, match=r"No space left on device.*Free some space"):
                update(store, 1, ids, values)
        reader = HeatmapStore.open(small / "store")
        assert reader.snapshot == kept
        np.testing.assert_array_equal(reader.read(ids).heatmaps, values.heatmaps)
    finally:
        subprocess.run(["umount", str(small)], check=True)


@pytest.fixture
def unprivileged():
    """File access as an ordinary user, for whom read-only folders are read-only."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_read_only_folder_can_be_read_and_says_so_when_written(annotations, request):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "store")
        HeatmapStore.create(path, annotations, heatmap_size=2)
        with HeatmapStore.open(path, annotations=annotations, mode="w") as store:
            update(store, 0, np.arange(5), random_update(store, 5, seed=0))
            store.commit(epoch=0)
        folders = [Path(folder), path, *(p for p in path.rglob("*") if p.is_dir())]
        for each in folders:
            each.chmod(0o555)
        try:
            request.getfixturevalue("unprivileged")
            assert len(HeatmapStore.open(path).read(np.arange(5))) == 5
            with pytest.raises(StoreError, match="cannot be written to"):
                HeatmapStore.open(path, annotations=annotations, mode="w")
            with pytest.raises(StoreError, match="cannot be written to"):
                HeatmapStore.create(path / "other", annotations, heatmap_size=2)
        finally:
            if os.getuid() == 0:
                os.seteuid(0)
            for each in folders:
                each.chmod(0o755)
