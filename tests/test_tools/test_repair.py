import json
from pathlib import Path

import numpy as np
import pytest

from bigscl.common.digests import write_sealed
from bigscl.memory.snapshot_state import SnapshotState
from bigscl.selection.thresholds import Thresholds
from bigscl.store import Answered, GroupSpec, HeatmapStore, seal, update
from bigscl.store.backends.backend import open_backend
from bigscl.store.lease import read_holder
from bigscl.tools.shared.terminal import ranges
from tests.builders import scene_index
from tests.test_store.conftest import assert_same_rows, random_update
from tests.test_tools.conftest import add_config, bigscl


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """40 scenes in one shard and 10 in another: their dense heatmaps lie in several chunks."""
    return scene_index(tmp_path_factory.mktemp("wide"), train=50, samples_per_shard=40)


@pytest.fixture
def wide_run(tmp_path, wide):
    """A run with two checkpoints, at snapshots 1 and 2; the second one is in mid-epoch."""
    folder = tmp_path / "run"
    url, annotations, ids = folder / "store", wide.annotations(), wide.ids()
    HeatmapStore.create(url, annotations, heatmap_size=4, history_samples=0)
    with HeatmapStore.open(url, annotations=annotations, mode="w", run="mine") as store:
        state = SnapshotState(selection=Thresholds.none(wide.num_classes), next_epoch=1, skipped=[])
        attributes = state.attributes()
        for epoch, seen in ((0, ids), (1, ids[::2])):
            update(store, epoch, seen, random_update(store, len(seen), seed=epoch))
            at = store.commit(epoch=epoch, step=10 * (epoch + 1), attributes=attributes)
            add_checkpoint(folder, at.step, at.id)
        store.drop_snapshots(keep=[store.snapshot.parent])
    add_config(folder, wide)
    return folder


def add_checkpoint(run, step, snapshot):
    folder = run / "checkpoints" / f"step-{step:08d}"
    folder.mkdir(parents=True)
    write_sealed(folder / "progress.json", {"step": step, "snapshot": snapshot, "best": 0.5})


def progress(run, step):
    return json.loads((run / "checkpoints" / f"step-{step:08d}" / "progress.json").read_text())


def chunks(run, snapshot, shard, array):
    """The files of an array's chunks."""
    store = HeatmapStore.open(run / "store", snapshot=snapshot)
    keys = store.arrays.keys(shard, store.snapshot.slots[shard])
    return [Path(store.backend.url, key) for key in keys if f"/{array}/" in key]


def corrupt(path):
    data = bytearray(path.read_bytes())
    data[5] ^= 1
    path.write_bytes(data)


def retained(run):
    return [one.id for one in HeatmapStore.open(run / "store").snapshots()]


def newest(run):
    return HeatmapStore.open(run / "store").snapshot


def rows_of(run, ids, annotations=None, **options):
    return HeatmapStore.open(run / "store", annotations=annotations, **options).read(ids)


def test_a_whole_store_needs_no_repair(wide_run):
    answer = bigscl("repair", wide_run)
    assert answer.code == 0
    assert "is intact; nothing to repair" in answer.out


def test_damage_is_named_and_nothing_changed_without_apply(wide_run):
    target = progress(wide_run, 20)["snapshot"]
    corrupt(chunks(wide_run, target, 0, "heatmaps")[1])
    before = {file: file.read_bytes() for file in wide_run.rglob("*") if file.is_file()}
    answer = bigscl("repair", wide_run)
    assert answer.code == 1
    assert f"snapshot {target} (checkpoint step-00000020) has 1 damaged shard of 2" in answer.out
    assert "shard 0, heatmaps, samples 16-31: " in answer.out
    assert "(checkpoint step-00000010) is intact: training can also resume from it" in answer.out
    assert "Add --apply" in answer.out
    assert {file: file.read_bytes() for file in wide_run.rglob("*") if file.is_file()} == before


@pytest.mark.parametrize("damage", ["flipped", "missing", "truncated"])
def test_only_rows_of_the_damaged_chunk_are_reset_and_the_checkpoint_names_the_result(wide_run, wide, damage):
    older, target = (progress(wide_run, step)["snapshot"] for step in (10, 20))
    ids = wide.ids()
    bad = (ids >= 16) & (ids < 32)
    then, before = rows_of(wide_run, ids, snapshot=older), rows_of(wide_run, ids, snapshot=target)
    path = chunks(wide_run, target, 0, "heatmaps")[1]
    if damage == "flipped":
        corrupt(path)
    elif damage == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-7])
    answer = bigscl("repair", wide_run, "--apply")
    assert answer.code == 0
    assert f"samples 16-31: reset to their values of snapshot {older}" in answer.out
    now = newest(wide_run)
    assert progress(wide_run, 20) == seal({"step": 20, "snapshot": now.id, "best": 0.5})
    assert progress(wide_run, 10)["snapshot"] == older
    assert retained(wide_run) == [older, now.id]
    assert (now.epoch, now.step, now.run) == (1, 20, "mine")
    assert now.attributes["repaired"] == {"of": target, "samples": list(range(16, 32))}
    after = rows_of(wide_run, ids)
    assert_same_rows(after.take(~bad), before.take(~bad))
    for name in ("scores", "heatmaps", "cell_visits"):
        np.testing.assert_array_equal(after[name][bad], then[name][bad])
    # A row that the epoch has visited is not visited again.
    np.testing.assert_array_equal(after["last_epoch"], before["last_epoch"])
    assert bigscl("verify", wide_run, "--all").code == 0
    assert bigscl("repair", wide_run).code == 0
    assert read_holder(open_backend(wide_run / "store")) is None


def test_rows_that_are_damaged_in_every_snapshot_get_their_initial_values(wide_run, wide):
    annotations, ids = wide.annotations(), wide.ids()
    initial = rows_of(wide_run, ids)
    for step in (10, 20):
        corrupt(chunks(wide_run, progress(wide_run, step)["snapshot"], 1, "scores")[0])
    facts = bigscl("repair", wide_run, "--apply", "--json").json()
    assert facts["reset"] == {"their initial values": list(range(40, 50))}
    after = rows_of(wide_run, ids, annotations)
    np.testing.assert_array_equal(after.scores[40:], wide.labels_of(ids)[40:] == 1)
    np.testing.assert_array_equal(after["last_epoch"], initial["last_epoch"])
    assert not after["cell_visits"][40:].any()
    assert bigscl("verify", wide_run).code == 0
    # The older checkpoint is damaged as before, and that is said.
    assert "is also damaged, in 1 shard; it is not changed" in bigscl("repair", wide_run).out


def test_lost_stamps_become_those_of_the_snapshot_and_values_stay(wide_run, wide):
    before = rows_of(wide_run, wide.ids())
    corrupt(chunks(wide_run, progress(wide_run, 20)["snapshot"], 0, "samples")[0])
    answer = bigscl("repair", wide_run, "--apply")
    assert "samples 0-39: reset to stamps of the snapshot's epoch" in answer.out
    after = rows_of(wide_run, wide.ids())
    np.testing.assert_array_equal(after.scores, before.scores)
    np.testing.assert_array_equal(after.heatmaps, before.heatmaps)
    assert (after["last_epoch"][:40] == 1).all()
    np.testing.assert_array_equal(after["last_epoch"][40:], before["last_epoch"][40:])
    assert (after["sample_visits"][:40] == 2).all()
    np.testing.assert_array_equal(after["sample_visits"][40:], before["sample_visits"][40:])


def test_a_topk_store_is_repaired_from_an_older_version(topk, index):
    add_checkpoint(topk, 30, newest(topk).id)
    ids = index.ids()
    older = rows_of(topk, ids, snapshot=retained(topk)[-2])
    corrupt(chunks(topk, None, 1, "classes")[0])
    assert bigscl("repair", topk, "--apply").code == 0
    after = rows_of(topk, ids)
    for name in ("scores", "heatmaps", "classes"):
        np.testing.assert_array_equal(after[name][8:16], older[name][8:16])
    assert bigscl("verify", topk).code == 0


def test_rounded_heatmaps_stay_as_they_are(topk, index):
    assert bigscl("compact", topk, "--codec", "uint8", "--apply").code == 0
    ids = index.ids()
    before = rows_of(topk, ids)
    corrupt(chunks(topk, None, 1, "samples")[0])
    assert bigscl("repair", topk, "--apply").code == 0
    after = rows_of(topk, ids)
    np.testing.assert_array_equal(after.heatmaps, before.heatmaps)
    np.testing.assert_array_equal(after.scores, before.scores)


def test_the_newest_checkpoint_counts_not_the_newest_snapshot(wide_run, wide):
    """A run that died between its commit and its checkpoint resumes from the checkpoint's snapshot."""
    target = progress(wide_run, 20)["snapshot"]
    with HeatmapStore.open(wide_run / "store", annotations=wide.annotations(), mode="w", run="mine") as store:
        store.save_shard(0, store.load_shard(0))
        store.commit(epoch=1, step=30)
    corrupt(chunks(wide_run, target, 1, "scores")[0])
    assert f"snapshot {target} (checkpoint step-00000020)" in bigscl("repair", wide_run, "--apply").out
    assert newest(wide_run).step == 20
    assert progress(wide_run, 20)["snapshot"] == newest(wide_run).id


LAYOUTS = {"dense": {}, "topk": {"layout": "topk", "top": 4}, "scores": {"layout": "scores"}}


def answers_about(index, ids):
    """A label that is refuted, one that is confirmed, a class that is found and one that is withdrawn."""
    rows, classes, says, named = [], [], [], []
    for place, sample in enumerate(ids.tolist()):
        known = index.labels_of(np.array([sample]))[0] == 1
        is_named = place % 4 in (0, 1)
        rows.append(sample)
        classes.append(int(np.flatnonzero(known == is_named)[-1]))
        says.append((0, 1, 1, -1)[place % 4])
        named.append(is_named)
    return Answered.of(rows, classes, says, named=named)


@pytest.fixture(params=LAYOUTS)
def answered_run(tmp_path, index, request):
    """A run with checkpoints before and after answers, and a twin with the answers in the first one."""
    annotations, ids = index.annotations(), index.ids()
    answered = answers_about(index, ids[4:20])
    for name in ("run", "twin"):
        url = tmp_path / name / "store"
        group = GroupSpec(**{"spatial_score": True, **LAYOUTS[request.param]})
        HeatmapStore.create(url, annotations, heatmap_size=4, group=group, history_samples=0)
        with HeatmapStore.open(url, annotations=annotations, mode="w", run="mine") as store:
            state = SnapshotState(
                selection=Thresholds.none(annotations.num_classes), next_epoch=1, skipped=[], momentum=0.8
            )
            attributes = state.attributes()
            update(store, 0, ids, random_update(store, len(ids), seed=0))
            first = store.commit(epoch=0, step=10, attributes=attributes)
            store.answer(answered)
            now = store.snapshot.attributes["answers"]
            if name == "run":
                update(store, 1, ids, random_update(store, len(ids), seed=1))
                last = store.commit(epoch=1, step=20, attributes={**attributes, "answers": now})
                for one in (first, last):
                    add_checkpoint(tmp_path / name, one.step, one.id)
                store.drop_snapshots(keep=[first.id])
    add_config(tmp_path / "run", index)
    return tmp_path / "run"


def test_rows_from_before_an_answer_get_the_answer(answered_run, index):
    ids, annotations = index.ids(), index.annotations()
    bad = (ids >= 8) & (ids < 16)
    corrupt(chunks(answered_run, None, 1, "scores")[0])
    answer = bigscl("repair", answered_run, "--apply", "--json")
    assert answer.code == 0, answer.err
    assert list(answer.json()["reset"].values()) == [list(range(8, 16))]
    after, twin = (
        HeatmapStore.open(run / "store", annotations=annotations)
        for run in (answered_run, answered_run.with_name("twin"))
    )
    for name, array in twin.read_without_initial_value(ids[bad]).items():
        if name != "last_epoch":
            np.testing.assert_array_equal(dict(after.read_without_initial_value(ids[bad]))[name], array)
    assert after.snapshot.attributes["answers"] == twin.snapshot.attributes["answers"]
    assert bigscl("verify", answered_run, "--all").code == 0


def test_rows_that_start_again_start_with_the_answers(answered_run, index):
    ids, annotations = index.ids()[8:16], index.annotations()
    for step in (10, 20):
        corrupt(chunks(answered_run, progress(answered_run, step)["snapshot"], 1, "scores")[0])
    facts = bigscl("repair", answered_run, "--apply", "--json").json()
    assert facts["reset"] == {"their initial values": ids.tolist()}
    store = HeatmapStore.open(answered_run / "store", annotations=annotations)
    answered = Answered.at(store.snapshot)
    is_own = np.isin(answered.rows, ids)
    assert not answered.late[is_own].any()
    assert answered.late[~is_own].any() == (store.group.layout != "scores")
    rows = store.read_without_initial_value(ids)
    says = np.where(answered.says >= 0, answered.says, answered.named)[is_own]
    np.testing.assert_array_equal(rows.scores[answered.rows[is_own] - 8, answered.classes[is_own]], says)
    if rows.heatmaps is not None:
        assert not rows.heatmaps.any(), "nothing was seen since they start again"


def test_a_store_without_a_run_is_repaired_at_its_newest_snapshot(wide_run, wide):
    store = (wide_run / "store").rename(wide_run.parent / "bare")
    (wide_run / "store").symlink_to(store)
    corrupt(chunks(wide_run, None, 0, "scores")[0])
    (wide_run / "store").unlink()
    shards = ("--shards", wide.urls[0].replace("000000", "*"))
    assert "Add --shards" in bigscl("repair", store, "--apply").err
    answer = bigscl("repair", store, "--run", wide_run, "--apply", *shards)
    assert answer.code == 0
    assert progress(wide_run, 20)["snapshot"] == HeatmapStore.open(store).snapshot.id
    assert bigscl("verify", store).code == 0


def test_a_store_in_use_is_not_repaired(wide_run, wide):
    corrupt(chunks(wide_run, None, 0, "scores")[0])
    with HeatmapStore.open(wide_run / "store", annotations=wide.annotations(), mode="w", run="busy"):
        assert "in use by run 'busy'" in bigscl("repair", wide_run).out
        answer = bigscl("repair", wide_run, "--apply")
    assert answer.code == 2
    assert "in use by run 'busy'" in answer.err


def test_a_checkpoint_without_its_snapshot_is_said(wide_run):
    add_checkpoint(wide_run, 99, 77)
    answer = bigscl("repair", wide_run)
    assert answer.code == 2
    assert "checkpoint step-00000099 needs snapshot 77" in answer.err


def test_spans_of_numbers_are_short():
    assert ranges([1, 2, 3, 7, 9, 10]) == "1-3, 7, 9-10"
    assert ranges(range(0, 20, 2), most=2) == "0, 2 and 8 more"
