"""The contract of the store, the same on a file system, in memory and on an S3-compatible server."""

import json
from dataclasses import replace

import numpy as np
import pytest
import zarr

from bigscl.store import Annotations, HeatmapStore, Ragged, seal, update
from bigscl.store.errors import (
    AlreadyExists,
    CommitConflict,
    IndexMismatch,
    NoFreeSlot,
    NotAStore,
    OtherFormat,
    ReadOnly,
    SnapshotMissing,
    StoreError,
)
from bigscl.store.format.spec import GroupSpec
from bigscl.store.snapshots import SnapshotLog, by_version, snapshot_bytes, version_of
from tests.test_store.conftest import all_ids, assert_same_rows, make_annotations, random_update

LAYOUTS = [
    {"layout": "dense", "spatial_score": True},
    {"layout": "topk", "top": 3, "codec": "blosc"},
    {"layout": "scores", "codec": "zstd"},
    {"layout": "topk", "top": 7, "checksum": False},
]


def make(place, annotations, heatmap_size=4, history_samples=4, **layout):
    url, options = place
    HeatmapStore.create(
        url,
        annotations,
        heatmap_size=heatmap_size,
        group=GroupSpec(**layout),
        history_samples=history_samples,
        options=options,
    )


def open_for_writing(place, annotations, **settings):
    url, options = place
    return HeatmapStore.open(url, annotations=annotations, mode="w", run="test", options=options, **settings)


@pytest.mark.parametrize("settings", LAYOUTS, ids=str)
def test_updates_come_back_bit_for_bit_after_a_commit(place, annotations, settings):
    make(place, annotations, **settings)
    ids = all_ids(annotations)
    with open_for_writing(place, annotations) as store:
        before = store.read(ids)
        values = random_update(store, len(ids), seed=1)
        update(store, 0, ids[::2], values.take(slice(0, None, 2)))
        store.commit(epoch=0, step=7, attributes={"cut": [1, 2]})
    url, options = place
    store = HeatmapStore.open(url, annotations=annotations, options=options)
    assert (store.snapshot.epoch, store.snapshot.step, store.snapshot.attributes) == (0, 7, {"cut": [1, 2]})
    after = store.read(ids)
    for name, array in values.items():
        np.testing.assert_array_equal(after[name][::2], array[::2])
        np.testing.assert_array_equal(after[name][1::2], before[name][1::2])
    assert after["last_epoch"].tolist() == [0, -1] * (len(ids) // 2)
    np.testing.assert_array_equal(store.last_epochs()[ids], after["last_epoch"])


def test_rows_never_visited_start_at_the_annotations_and_cost_no_disk(place, annotations):
    make(place, annotations)
    with open_for_writing(place, annotations) as store:
        rows = store.read(all_ids(annotations))
        for place_in_batch, n in enumerate(all_ids(annotations)):
            positives = annotations.given[n]
            expected = np.isin(np.arange(annotations.num_classes), positives)
            np.testing.assert_array_equal(rows.scores[place_in_batch], expected)
            assert (rows.heatmaps[place_in_batch] == expected[:, None, None]).all()
        assert sum(store.sizes().values()) < 10_000


def test_dropped_snapshots_free_their_slots(place, annotations):
    make(place, annotations, slots=2)
    ids = all_ids(annotations)
    with open_for_writing(place, annotations) as store:
        sizes = []
        for epoch in range(4):
            update(store, epoch, ids, random_update(store, len(ids), seed=epoch))
            store.commit(epoch=epoch)
            store.drop_snapshots()
            sizes.append(sum(size for name, size in store.sizes().items() if name.startswith("arrays")))
        assert sizes[1] == sizes[2] == sizes[3]
        assert [kept.id for kept in store.snapshots()] == [5]
    url, options = place
    with pytest.raises(SnapshotMissing, match=r"no snapshot 2; retained are \[5\]"):
        HeatmapStore.open(url, snapshot=2, options=options)


def test_a_shard_without_a_free_slot_says_what_to_do(place, annotations):
    make(place, annotations, slots=2)
    ids = all_ids(annotations)
    with open_for_writing(place, annotations) as store:
        for epoch in range(2):
            update(store, epoch, ids, random_update(store, len(ids), seed=epoch))
            store.commit(epoch=epoch)
        with pytest.raises(NoFreeSlot, match="Drop a snapshot"):
            update(store, 2, ids, random_update(store, len(ids), seed=2))


def test_reader_notices_that_its_snapshot_was_dropped(place, annotations):
    make(place, annotations)
    ids = all_ids(annotations)
    url, options = place
    with open_for_writing(place, annotations) as store:
        update(store, 0, ids, random_update(store, len(ids), seed=0))
        store.commit(epoch=0)
        reader = HeatmapStore.open(url, options=options)
        update(store, 1, ids, random_update(store, len(ids), seed=1))
        store.commit(epoch=1)
        reader.read(ids)
        store.drop_snapshots()
        with pytest.raises(SnapshotMissing):
            reader.read(ids)


@pytest.mark.parametrize("moment", ["newest", "read"])
def test_opening_while_a_writer_drops_gets_the_newest_snapshot(place, annotations, monkeypatch, moment):
    make(place, annotations)
    url, options = place
    ask, tops = getattr(SnapshotLog, moment), [3, 4]

    def ask_before_a_drop(log, *number):
        found = ask(log, *number)
        if log is not store._log and tops:
            store.compact(tops.pop())
            store.drop_snapshots()
        return found

    with open_for_writing(place, annotations) as store:
        monkeypatch.setattr(SnapshotLog, moment, ask_before_a_drop)
        reader = HeatmapStore.open(url, options=options)
        assert not tops
        assert reader.snapshot.id == store.snapshot.id


def test_compaction_refuses_a_top_that_would_lose_given_labels(place, annotations):
    make(place, annotations)
    with open_for_writing(place, annotations) as store:
        with pytest.raises(ValueError, match=r"would lose given labels: sample \d+ has 3"):
            store.compact(2)
        with pytest.raises(ValueError, match="expected 1 to 7"):
            store.compact(8)


def test_history_shows_how_tracked_samples_moved(place, annotations):
    make(place, annotations, history_samples=[0, 6])
    ids = all_ids(annotations)
    with open_for_writing(place, annotations) as store:
        seen = []
        for epoch in range(2):
            update(store, epoch, ids, random_update(store, len(ids), seed=epoch))
            store.commit(epoch=epoch)
            store.drop_snapshots()
            store.record_history(epoch)
            seen.append(store.read([6]))
        history = store.history(6)
        assert sorted(history) == [0, 1]
        for epoch, rows in history.items():
            np.testing.assert_array_equal(rows.scores, seen[epoch].scores)
            np.testing.assert_array_equal(rows.heatmaps, seen[epoch].heatmaps)
        store.compact(3)
        store.record_history(2)
        maps = store.history(6)[2]
        kept = store.read([6])
        for c in range(7):
            held = kept.classes[0].tolist()
            expected = kept.heatmaps[0, held.index(c)] if c in held else 0
            assert (maps.heatmaps[0, maps.classes[0].tolist().index(c)] == expected).all()
        assert store.history(1) == {}


def test_a_second_committer_fails_loudly(place, annotations):
    make(place, annotations)
    with open_for_writing(place, annotations) as store:
        store.commit(epoch=0)
        rival = SnapshotLog(store.backend)
        with pytest.raises(CommitConflict, match="Two runs write one store"):
            rival.create(replace(store.snapshot, run="rival"))


def test_reading_asks_for_annotations_only_where_nothing_was_written(place, annotations):
    make(place, annotations)
    ids = all_ids(annotations)
    url, options = place
    with open_for_writing(place, annotations) as store:
        update(store, 0, ids[:2], random_update(store, 2, seed=0))
        store.commit(epoch=0)
    reader = HeatmapStore.open(url, options=options)
    assert len(reader.read(ids[:5])) == 5
    with pytest.raises(StoreError, match="Pass the index"):
        reader.read(ids[-1:])
    with pytest.raises(ValueError, match="no sample 8"):
        reader.read([8])
    with pytest.raises(ReadOnly):
        reader.commit(epoch=1)
    assert len(HeatmapStore.open(url, annotations=annotations, options=options).read([])) == 0


def test_opening_something_else_says_what_was_found(place, annotations):
    url, options = place
    with pytest.raises(NotAStore, match="nothing there"):
        HeatmapStore.open(url, options=options)
    make(place, annotations)
    with pytest.raises(IndexMismatch, match=r"made for data data-1, these shards are data-2"):
        HeatmapStore.open(url, annotations=make_annotations(fingerprint="data-2"), options=options)
    with pytest.raises(AlreadyExists, match="there is a store already"):
        make(place, annotations)
    with pytest.raises(StoreError, match="no stores behind 'gopher'"):
        HeatmapStore.open("gopher://hole")


def test_foreign_and_newer_hierarchies_are_refused(tmp_path, annotations):
    foreign = tmp_path / "foreign"
    zarr.create_group(str(foreign)).create_array("x", shape=(1,), dtype="u1")
    with pytest.raises(NotAStore, match="a Zarr hierarchy, but not a heatmap store"):
        HeatmapStore.open(foreign)
    with pytest.raises(AlreadyExists, match="not empty"):
        HeatmapStore.create(foreign, annotations, heatmap_size=4)
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "thesis.tex").write_text("")
    with pytest.raises(NotAStore, match=r"found thesis\.tex"):
        HeatmapStore.open(folder)
    HeatmapStore.create(tmp_path / "new", annotations, heatmap_size=4)
    root = tmp_path / "new" / "zarr.json"
    described = json.loads(root.read_text())
    for version, remedy in ((99, "Upgrade"), (1, "another place")):
        described["attributes"]["bigscl"]["format"] = version
        root.write_text(json.dumps(described))
        with pytest.raises(OtherFormat, match=f"format {version}, this version reads format 2. .*{remedy}"):
            HeatmapStore.open(tmp_path / "new")


@pytest.mark.parametrize(
    ("features", "complaint"),
    [
        (None, "a revision before version 0.2.0"),
        ({}, "a revision before version 0.2.0"),
        ({"packed": ["last_epoch"]}, "uses packed, .*Upgrade"),
        ({"packed": ["sample_visits", "last_epoch"], "sparse_scores": "64"}, "uses sparse_scores, .*Upgrade"),
        ({"packed": ["sample_visits", "last_epoch"], "something": 64}, "uses something, .*Upgrade"),
    ],
)
def test_a_store_with_features_that_are_not_known_here_is_refused(tmp_path, annotations, features, complaint):
    HeatmapStore.create(tmp_path / "new", annotations, heatmap_size=4)
    root = tmp_path / "new" / "zarr.json"
    described = json.loads(root.read_text())
    values = described["attributes"]["bigscl"]
    del values["features"], values["crc32"]
    described["attributes"]["bigscl"] = seal(values if features is None else {**values, "features": features})
    root.write_text(json.dumps(described))
    with pytest.raises(OtherFormat, match=complaint):
        HeatmapStore.open(tmp_path / "new")


def test_half_created_store_is_recognised_and_created_again(tmp_path, annotations):
    path = tmp_path / "store"
    HeatmapStore.create(path, annotations, heatmap_size=4)
    for snapshot in (path / "snapshots").iterdir():
        snapshot.unlink()
    with pytest.raises(NotAStore, match=r"interrupted\. Create it again"):
        HeatmapStore.open(path)
    HeatmapStore.create(path, annotations, heatmap_size=5)
    assert HeatmapStore.open(path).spec.heatmap_size == 5


def test_a_store_for_imagenet_is_created_small(tmp_path):
    shards = 1281
    annotations = Annotations(
        fingerprint="imagenet",
        num_classes=1000,
        rows_per_shard=1000,
        shard_sizes=np.full(shards, 1000),
        given=Ragged(np.arange(shards * 1000 + 1), np.zeros(shards * 1000, np.int64)),
    )
    HeatmapStore.create(
        tmp_path / "store", annotations, heatmap_size=14, group=GroupSpec(layout="topk", top=10)
    )
    assert sum(HeatmapStore.open(tmp_path / "store").sizes().values()) < 1_000_000


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"layout": "wide"}, "layout: 'wide', expected one of dense, topk, scores"),
        ({"codec": "zip"}, "codec: 'zip'"),
        ({"layout": "topk"}, "top: None with layout 'topk'"),
        ({"layout": "topk", "top": 2}, "would lose given labels"),
        ({"slots": 1}, "slots: 1, expected at least 2"),
        ({"heatmap_size": 0}, "heatmap_size: 0"),
    ],
)
def test_impossible_settings_are_refused(tmp_path, annotations, settings, complaint):
    with pytest.raises(ValueError, match=complaint):
        make((tmp_path / "store", None), annotations, **settings)


def test_deleting_what_is_free_leaves_every_retained_snapshot_as_it_was(store, annotations):
    kept = {}
    for epoch in range(3):
        update(store, epoch, all_ids(annotations), random_update(store, annotations.num_samples, epoch))
        kept[store.commit(epoch=epoch).id] = store.read(all_ids(annotations))
    store.drop_snapshots(keep=[3])
    versions = by_version(store.backend.sizes(""))
    freed = store.delete_free()
    # Three versions of every shard were there, and two are named.
    assert freed == versions.total() // 3
    assert by_version(store.backend.sizes("")).total() == versions.total() - freed
    for number in (3, 4):
        with HeatmapStore.open(store.backend.url, snapshot=number, annotations=annotations) as reader:
            assert_same_rows(reader.read(all_ids(annotations)), kept[number])
    assert store.delete_free() == 0


def test_deleting_what_is_free_waits_for_the_commit(store, annotations):
    store.save_shard(0, store.load_shard(0))
    with pytest.raises(StoreError, match="commit first"):
        store.delete_free()


def test_files_belong_to_the_version_in_their_name(store, annotations):
    update(store, 0, all_ids(annotations), random_update(store, annotations.num_samples, 0))
    store.commit(epoch=0)
    for shard, slot in enumerate(store.snapshot.slots):
        for key in store.arrays.keys(shard, slot):
            assert version_of(key) == ("arrays-000", slot, shard)
    others = [key for key, _ in store.backend.sizes("") if version_of(key) is None]
    assert all(
        key.endswith("zarr.json") or key.startswith("snapshots/") for key in others if "lease" not in key
    )


def test_snapshots_share_the_bytes_of_shards_that_did_not_change(store, annotations):
    update(store, 0, all_ids(annotations), random_update(store, annotations.num_samples, 0))
    first = store.commit(epoch=0)
    update(store, 1, np.array([0]), random_update(store, 1, 1))
    second = store.commit(epoch=1)
    versions = by_version(store.backend.sizes(""))
    shard = versions["arrays-000", first.slots[0], 0]
    found = snapshot_bytes(store.snapshots(), versions)
    assert (found[0].all, found[0].only_here) == (0, 0)
    for snapshot in (first, second):
        assert (found[snapshot.id].all, found[snapshot.id].only_here) == (versions.total() - shard, shard)
