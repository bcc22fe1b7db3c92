"""A writer that was frozen, and thawed after another took its place: nothing that was committed changes."""

import errno
from functools import partial

import pytest

from bigscl.store import GroupSpec, HeatmapStore, StoreError, update, verify
from bigscl.store.errors import ChunkCorrupt, CommitConflict, LeaseHeld, StorageFailed
from bigscl.store.format.layout import initial_shard
from bigscl.store.format.zarr_group import STALE_SECONDS, WatchedStore
from bigscl.store.lease import Lease, break_lease
from bigscl.store.snapshots import version_of
from tests.test_store.conftest import all_ids, assert_same_rows, random_update


def make(place, annotations, **layout):
    url, options = place
    HeatmapStore.create(url, annotations, heatmap_size=3, group=GroupSpec(**layout), options=options)


def open_writer(place, annotations, run="run", **more):
    url, options = place
    return HeatmapStore.open(url, annotations=annotations, mode="w", run=run, options=options, **more)


def commit_epoch(store, annotations, epoch):
    ids = all_ids(annotations)
    update(store, epoch, ids, random_update(store, len(ids), seed=epoch))
    return store.commit(epoch=epoch)


def assert_whole(place, snapshots, annotations):
    """Every snapshot verifies and reads as it did."""
    url, options = place
    for number, rows in snapshots.items():
        store = HeatmapStore.open(url, annotations=annotations, snapshot=number, options=options)
        assert not [problem for _, found in verify(store) for problem in found]
        assert_same_rows(store.read(all_ids(annotations)), rows)


def write_every_shard(store, annotations):
    """What threads of a thawed writer still do."""
    for shard in range(len(annotations.shard_sizes)):
        store.save_shard(shard, initial_shard(store.spec, store.group, annotations, shard))


@pytest.fixture
def frozen_and_successor(place, annotations):
    """A writer with work that it has not committed, and one that took the lease from it and committed."""
    make(place, annotations)
    frozen = open_writer(place, annotations, "frozen")
    commit_epoch(frozen, annotations, 0)
    ids = all_ids(annotations)
    update(frozen, 1, ids[:4], random_update(frozen, 4, seed=7))
    break_lease(frozen.backend)
    successor = open_writer(place, annotations, "successor")
    kept = {successor.snapshot.id: successor.read(ids)}
    for epoch in (1, 2):
        committed = commit_epoch(successor, annotations, epoch)
        kept[committed.id] = successor.read(ids)
    yield frozen, successor, kept
    successor.close()


def test_a_thawed_writer_cannot_overwrite_what_its_successor_committed(
    place, annotations, frozen_and_successor
):
    frozen, _, kept = frozen_and_successor
    write_every_shard(frozen, annotations)
    assert_whole(place, kept, annotations)
    with pytest.raises(LeaseHeld):
        frozen.commit(epoch=1)
    with pytest.raises(LeaseHeld):
        frozen.drop_snapshots()
    with pytest.raises(LeaseHeld):
        frozen.rollback(0)
    assert_whole(place, kept, annotations)


def test_a_writer_thawed_between_its_check_and_its_commit_leaves_no_snapshot(
    place, annotations, frozen_and_successor, monkeypatch
):
    """Also when the number it wants was free again, because its successor dropped old snapshots."""
    frozen, successor, kept = frozen_and_successor
    newest = max(kept)
    successor.drop_snapshots()
    # It made its first check before it was frozen.
    monkeypatch.setattr(frozen, "check_lease", lambda: None)
    monkeypatch.setattr(frozen.backend, "sync", lambda keys: None)
    with pytest.raises((LeaseHeld, CommitConflict)):
        frozen.commit(epoch=1)
    assert [each.id for each in successor.snapshots()] == [newest]
    assert_whole(place, {newest: kept[newest]}, annotations)


def test_a_thawed_writer_stops_after_its_next_heartbeat(tmp_path, annotations, monkeypatch):
    beating = partial(Lease.acquire, beat_seconds=0.01)
    monkeypatch.setattr("bigscl.store.heatmap_store.Lease.acquire", beating)
    place = str(tmp_path / "store"), None
    make(place, annotations)
    with open_writer(place, annotations, "frozen") as frozen:
        break_lease(frozen.backend)
        frozen._lease._thread.join(10)
        with pytest.raises(LeaseHeld, match="was broken"):
            write_every_shard(frozen, annotations)


def test_what_a_thawed_writer_left_behind_is_removed_by_the_next_one(
    place, annotations, frozen_and_successor
):
    frozen, successor, kept = frozen_and_successor
    write_every_shard(frozen, annotations)
    successor.close()
    with open_writer(place, annotations, "next") as store:
        named = {(each.group, slot, n) for each in store.snapshots() for n, slot in enumerate(each.slots)}
        found = {version_of(key) for key, _ in store.backend.sizes("")} - {None}
        assert found <= named
    assert_whole(place, kept, annotations)


def test_disk_use_stays_constant_over_many_writers(place, annotations):
    make(place, annotations, slots=2)
    sizes = []
    for epoch in range(4):
        with open_writer(place, annotations) as store:
            commit_epoch(store, annotations, epoch)
            store.drop_snapshots()
            sizes.append(sum(size for name, size in store.sizes().items() if name.startswith("arrays")))
    assert len(set(sizes[1:])) == 1


def test_each_writer_has_slots_of_its_own_and_enough_of_them(place, annotations):
    """Kills that leave every slot of earlier writers named are no dead end."""
    make(place, annotations, slots=2)
    seen = []
    for epoch in range(5):
        with open_writer(place, annotations) as store:
            snapshot = commit_epoch(store, annotations, epoch)
            assert set(snapshot.slots) <= set(store.group.slots_of(snapshot.generation))
            seen.append(snapshot.generation)
    assert seen == [1, 2, 3, 4, 5]


def test_generations_start_over_without_touching_what_is_named(place, annotations):
    make(place, annotations)
    with open_writer(place, annotations) as store:
        first = commit_epoch(store, annotations, 0)
        rows = store.read(all_ids(annotations))
        # As many openings later, the same slots are this writer's again.
        far = first.generation + store.group.generations
        object.__setattr__(store._snapshot, "generation", far)
        second = commit_epoch(store, annotations, 1)
    assert set(second.slots).isdisjoint(first.slots)
    assert_whole(place, {first.id: rows}, annotations)


@pytest.mark.parametrize("layout", ["dense", "topk"])
def test_a_stale_and_a_swapped_chunk_are_found_on_load_and_by_verify(tmp_path, annotations, layout, clock):
    """Whole chunks with a right checksum of their own, but not those that the snapshot names."""
    place = str(tmp_path / "store"), None
    make(place, annotations, layout=layout, top=4 if layout == "topk" else None)
    with open_writer(place, annotations) as store:
        older, newer = (commit_epoch(store, annotations, epoch) for epoch in (0, 1))
        for array, shard, source in (
            ("scores", 0, (older.slots[0], 0)),
            ("heatmaps", 1, (newer.slots[2], 2)),
            ("samples", 2, (older.slots[2], 2)),
        ):
            tail = ".0" * {"scores": 2, "heatmaps": 4, "samples": 2}[array]
            folder = tmp_path / "store" / "arrays-000" / array
            stale = (folder / f"c.{source[0]}.{source[1]}{tail}").read_bytes()
            (folder / f"c.{newer.slots[shard]}.{shard}{tail}").write_bytes(stale)
            with pytest.raises(ChunkCorrupt, match=f"{array}: shard {shard}.*not the version"):
                store.load_shard(shard)
        problems = [problem for _, found in verify(store) for problem in found]
        assert [(p.shard, p.array) for p in problems] == [(0, "scores"), (1, "heatmaps"), (2, "samples")]
        assert problems[1].samples == (5, 6, 7)
        with pytest.raises(ChunkCorrupt):
            store.last_epochs()
        with pytest.raises(ChunkCorrupt):
            list(store.scores_by_shard([0]))
        # Only the first of them was waited for: damage everywhere would take hours.
        assert clock.seconds == pytest.approx(STALE_SECONDS)


@pytest.fixture
def stale_chunk(tmp_path, annotations):
    """A store, a chunk's file that shows an older version, its right bytes, and the rows of its shard."""
    place = str(tmp_path / "store"), None
    make(place, annotations)
    with open_writer(place, annotations) as store:
        older, newer = (commit_epoch(store, annotations, epoch) for epoch in (0, 1))
        folder = tmp_path / "store" / "arrays-000" / "scores"
        file, before = (folder / f"c.{snapshot.slots[0]}.0.0.0" for snapshot in (newer, older))
        newest, expected = file.read_bytes(), store.load_shard(0)
        file.write_bytes(before.read_bytes())
        yield store, file, newest, expected


def test_a_chunk_that_a_cache_shows_in_an_older_version_is_read_again(stale_chunk, clock, caplog):
    store, file, newest, expected = stale_chunk
    clock.after_pause = lambda: file.write_bytes(newest) if clock.seconds > 40 else None
    assert_same_rows(store.load_shard(0), expected)
    assert 40 < clock.seconds < 50
    assert "shard 0, slot" in caplog.text
    assert "of another version; reading it again" in caplog.text


def test_a_file_handle_that_went_stale_is_read_again(stale_chunk, clock, monkeypatch):
    """NFS: another node renamed over the file between opening and reading it."""
    store, file, newest, expected = stale_chunk
    file.write_bytes(newest)
    whole = WatchedStore.get

    async def stale_for_a_while(self, key, *arguments, **options):
        if "/scores/c." in key and clock.seconds < 5:
            raise OSError(errno.ESTALE, "Stale file handle")
        return await whole(self, key, *arguments, **options)

    monkeypatch.setattr(WatchedStore, "get", stale_for_a_while)
    assert_same_rows(store.load_shard(0), expected)
    assert clock.seconds >= 5


def test_waiting_for_a_stale_chunk_ends_when_the_run_does(stale_chunk, clock):
    store, *_ = stale_chunk

    def stop():
        raise StoreError("stopped")

    with pytest.raises(StoreError, match="stopped"):
        store.load_shard(0, stop)
    assert clock.seconds == 0


def test_snapshots_have_no_digests_without_checksums(place, annotations):
    make(place, annotations, checksum=False)
    with open_writer(place, annotations) as store:
        assert commit_epoch(store, annotations, 0).digests == {}
        store.read(all_ids(annotations))


def test_an_error_after_the_snapshot_got_its_name_ends_all_writing(tmp_path, annotations, monkeypatch):
    place = str(tmp_path / "store"), None
    make(place, annotations)
    with open_writer(place, annotations) as store:
        commit_epoch(store, annotations, 0)
        store.save_shard(0, store.load_shard(0))
        real = store.backend.create

        def create_then_fail(key, data):
            real(key, data)
            raise StorageFailed("Input/output error")

        monkeypatch.setattr(store.backend, "create", create_then_fail)
        with pytest.raises(StoreError, match="could not commit"):
            store.commit(epoch=1)
        with pytest.raises(StoreError, match="opened for reading"):
            store.save_shard(0, store.load_shard(0))


def test_a_writer_frozen_at_the_end_of_its_rollback_keeps_its_own_slots(place, annotations, monkeypatch):
    """Its successor's snapshot is the newest by then; to stand on it would be to write into its slots."""
    make(place, annotations)
    frozen = open_writer(place, annotations, "frozen")
    for epoch in range(2):
        committed = commit_epoch(frozen, annotations, epoch)
    drop, kept, successors = frozen._log.drop, {}, []

    def freeze(number):
        if not successors:
            break_lease(frozen.backend)
            successors.append(open_writer(place, annotations, "successor"))
            newest = commit_epoch(successors[0], annotations, 2)
            kept[newest.id] = successors[0].read(all_ids(annotations))
        drop(number)

    monkeypatch.setattr(frozen._log, "drop", freeze)
    frozen.rollback(committed.parent)
    write_every_shard(frozen, annotations)
    assert_whole(place, kept, annotations)
    assert frozen.snapshot.run == "frozen"
    successors[0].close()
