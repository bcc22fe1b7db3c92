import json

import numpy as np
import pytest

from bigscl.store import Answered, HeatmapStore, seal
from tests.builders import make_store
from tests.test_tools.conftest import bigscl


def chunk(run, array, shard, group="arrays-000"):
    """The first file of an array in the version of a shard that the newest snapshot names."""
    store = HeatmapStore.open(run / "store")
    slot = store.snapshot.slots[shard]
    return next((run / "store" / group / array).glob(f"c.{slot}.{shard}.0*"))


def flip_a_bit(file):
    data = bytearray(file.read_bytes())
    data[10] ^= 4
    file.write_bytes(bytes(data))


def test_a_good_store_is_well_and_says_what_was_read(runs):
    for name in ("dense", "topk"):
        answer = bigscl("verify", runs / name, "--all")
        assert answer.code == 0
        assert "all is well; read 8 shards of 2 snapshots" in answer.out


def test_a_flipped_bit_is_found_with_its_samples(run):
    flip_a_bit(chunk(run, "scores", 2))
    answer = bigscl("verify", run, "--json")
    assert answer.code == 1
    (problem,) = answer.json()["problems"]
    assert (problem["snapshot"], problem["where"]) == (4, "shard 2, scores")
    assert problem["samples"] == list(range(16, 24))
    assert bigscl("verify", run, "--snapshot", 3).code == 0
    assert "shard 2, scores (8 samples from 16 on)" in bigscl("verify", run).out


@pytest.mark.parametrize("name", ["zarr.json", "scores/zarr.json", "heatmaps/c.1.0.0.0.0"])
def test_damage_to_the_history_is_found(run, name):
    flip_a_bit(run / "store" / "history" / name)
    answer = bigscl("verify", run, "--json")
    assert answer.code == 1
    (problem,) = answer.json()["problems"]
    assert problem["where"] == f"history/{name}"


def test_a_missing_file_is_found(run):
    chunk(run, "heatmaps", 1).unlink()
    answer = bigscl("verify", run)
    assert answer.code == 1
    assert "a chunk file is missing" in answer.out


@pytest.mark.parametrize(
    ("array", "value", "reason"),
    [
        ("scores", 1.5, "expected values in [0, 1]"),
        ("last_epoch", 9, "expected epochs from -1 to 2"),
        ("classes", 77, "expected class ids ascending within 0..9"),
    ],
)
def test_values_that_cannot_be_are_found_behind_good_checksums(topk, index, array, value, reason):
    with HeatmapStore.open(topk / "store", annotations=index.annotations(), mode="w") as store:
        rows = store.load_shard(1)
        rows[array][3] = value
        store.save_shard(1, rows)
        store.commit(epoch=2, attributes=store.snapshot.attributes)
    answer = bigscl("verify", topk, "--json")
    assert answer.code == 1
    (problem,) = answer.json()["problems"]
    assert (problem["where"], problem["samples"]) == (f"shard 1, {array}", [11])
    assert reason in problem["reason"]


def test_what_snapshots_share_is_read_once(run, index):
    with HeatmapStore.open(run / "store", annotations=index.annotations(), mode="w") as store:
        store.save_shard(0, store.load_shard(0))
        store.commit(epoch=3)
    facts = bigscl("verify", run, "--all", "--json").json()
    assert (facts["snapshots"], facts["versions"]) == ([3, 4, 5, 6], 9)


def test_other_data_is_a_problem(runs, other_shards):
    answer = bigscl("verify", runs / "dense", "--shards", other_shards)
    assert answer.code == 1
    assert "index: " in answer.out


def test_lost_annotated_positives_are_a_problem(topk, index):
    rows = HeatmapStore.open(topk / "store").load_shard(0)
    given = index.labels_of(np.arange(8))[5] == 1
    others = np.flatnonzero(~given)[:4].astype(rows.classes.dtype)
    rows.classes[5] = others
    with HeatmapStore.open(topk / "store", annotations=index.annotations(), mode="w") as store:
        store.save_shard(0, rows)
        store.commit(epoch=2, attributes=store.snapshot.attributes)
    (problem,) = bigscl("verify", topk, "--json").json()["problems"]
    assert problem["samples"] == [5]
    assert "given labels" in problem["reason"]


def test_a_refuted_label_is_no_lost_positive_and_a_class_that_was_found_is_one(run, index):
    annotations = index.annotations()
    label = int(annotations.given.values[annotations.given.offsets[5]])
    own, absent = (
        np.flatnonzero((index.labels_of(np.array([6]))[0] == 1) == is_own) for is_own in (True, False)
    )
    found, others = int(absent[0]), absent[1:]
    answered = Answered.of([5, 6], [label, found], [0, 1], named=[True, False])
    with HeatmapStore.open(run / "store", annotations=annotations, mode="w") as store:
        store.answer(answered)
        store.compact(3)
        assert label not in store.read([5]).classes
        assert bigscl("verify", run, "--all").code == 0
        rows = store.load_shard(0)
        rows.classes[6] = sorted([*own, *others][:3])
        store.save_shard(0, rows)
        store.commit(epoch=2, attributes=store.snapshot.attributes)
    (problem,) = bigscl("verify", run, "--json").json()["problems"]
    assert problem["samples"] == [6]
    assert "given labels are not among the kept classes" in problem["reason"]


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("attributes", {"answers": {"rows": [1], "classes": [1], "says": []}}, "its answers cannot be read"),
        ("slots", [0, 0, 0], "expected base64 of 3 whole numbers"),
        ("slots", [0, 0, 0, 9999], "names slot 9999, the arrays have 3072"),
        ("group", "arrays-009", "arrays-009/zarr.json: is missing"),
        ("attributes", {"next_epoch": 3}, "has no attribute selection, skipped"),
        (
            "attributes",
            {"selection": {"score": [1.0], "tie_id": [-1]}, "next_epoch": 3, "skipped": []},
            "1 values of score, expected 10",
        ),
    ],
)
def test_impossible_snapshots_are_found(run, field, value, reason):
    file = run / "store" / "snapshots" / "00000003.json"
    file.write_text(json.dumps(seal({**json.loads(file.read_text()), field: value})))
    answer = bigscl("verify", run, "--all", "--json")
    assert answer.code == 1
    assert reason in " ".join(problem["reason"] for problem in answer.json()["problems"])


def test_a_store_without_checksums_says_so(tmp_path, index):
    make_store(tmp_path / "store", index, epochs=1, checksum=False)
    answer = bigscl("verify", tmp_path / "store")
    assert answer.code == 0
    assert "created without checksums" in answer.out
    assert "not compared with its data" in answer.out
