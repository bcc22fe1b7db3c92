import shutil

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from bigscl.config import load_config, make_config
from bigscl.config.schedule import plan_epoch
from bigscl.data.answers import Answer, AnswersFile
from bigscl.data.build_index import scan
from bigscl.data.epoch_plan import training_plan
from bigscl.preflight import forecast
from bigscl.preflight.forecast import summary
from bigscl.preflight.storage_speed import measure
from bigscl.selection.k import Expectation
from bigscl.store import GroupSpec, StorageOptions, StoreSpec
from bigscl.training.run_folder import open_data
from tests.builders import jpeg, make_store, write_shards, write_tar
from tests.test_tools.conftest import bigscl

# 1000 samples of 20 classes, 100 to a shard; small_resnet gives 6 x 6 maps for 48 pixels.
DATA = ("--samples", 1000, "--classes", 20, "--per-shard", 100)
ROW_SCORES = 20 * 2 + 4 + 1
# 6 MB for each sample.
MUCH = ["--samples", 20_000, "--classes", 20_000, "--per-shard", 1000]


def config(**sections):
    values = {
        "run": "run",
        "data": {"train": "nowhere/*.tar", "size": 48, "batch_size": 10, "workers": 2, "shuffle_buffer": 50},
        "model": {"backbone": "bigscl.models.smallnet:small_resnet"},
        "selection": {"K": 2.0},
        "schedule": {
            "warmup": {"epochs": 2, "learning_rate": 0.001},
            "main": {"epochs": 3, "learning_rate": 0.001},
        },
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    return values


@pytest.fixture
def write(tmp_path):
    """Writes a config to a file."""

    def write(**sections):
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump({**config(**sections), "run": str(tmp_path / "run")}))
        return path

    return write


def test_bytes_follow_from_rows_classes_and_cells(write):
    facts = bigscl("plan", write(store={"top": 4}), *DATA, "--json").json()
    dense, top = facts["phases"]
    assert facts["heatmap_size"] == 12
    assert (dense["layout"], dense["first_epoch"], dense["last_epoch"]) == ("dense", 0, 1)
    assert (top["layout"], top["first_epoch"], top["last_epoch"]) == ("topk", 2, 4)
    # Heatmaps, the looks at each cell, and the kept classes.
    dense_row, top_row = ROW_SCORES + 20 * 144 * 2 + 144, ROW_SCORES + 4 * 144 * 2 + 144 + 4 * 2
    assert (dense["slot_bytes"], dense["versions"], dense["disk_bytes"]) == (
        1000 * dense_row,
        2,
        2000 * dense_row,
    )
    assert (top["slot_bytes"], top["versions"], top["disk_bytes"]) == (1000 * top_row, 3, 3000 * top_row)
    # The dense arrays stay until both kept checkpoints are of the top classes.
    assert facts["disk_bytes"] == pytest.approx(2000 * dense_row + 2000 * top_row, rel=0.05)
    assert dense["bytes_per_second"] == pytest.approx(2 * 400 * dense_row)


def test_rounded_heatmaps_take_a_byte_on_disk_and_two_in_ram(write):
    path = write()
    (plain,), (compact,) = (
        bigscl("plan", path, *DATA, "--store.codec", codec, "--json").json()["phases"]
        for codec in ("none", "uint8")
    )
    assert plain["slot_bytes"] - compact["slot_bytes"] == 1000 * 20 * 144
    assert compact["resident_bytes"] == plain["resident_bytes"]
    assert compact["bytes_per_second"] < plain["bytes_per_second"]


def test_the_foretold_bytes_are_those_of_a_real_store(tmp_path, index, write):
    make_store(tmp_path / "store", index, epochs=3)
    path = write(data={"train": index.urls[0].replace("000000", "*")})
    (phase,) = bigscl("plan", path, "--json").json()["phases"]
    found = bigscl("show", tmp_path / "store", "--json").json()["snapshots"][-1]["bytes"]
    # Each chunk ends in a checksum of 4 bytes.
    assert found == phase["slot_bytes"] + 16 * 4
    assert phase["slot_files"] == 16


def test_load_grows_with_processes_and_their_speed(write):
    path = write(store={"top": 4})
    one = bigscl("plan", path, *DATA, "--json").json()
    many = bigscl("plan", path, *DATA, "--processes", 4, "--images-per-second", 800, "--json").json()
    for slow, fast in zip(one["phases"], many["phases"], strict=True):
        assert fast["bytes_per_second"] == pytest.approx(8 * slow["bytes_per_second"])
        assert fast["creates_per_second"] == pytest.approx(8 * slow["creates_per_second"])
        assert slow["creates_per_second"] == pytest.approx(slow["slot_files"] * 400 / 1000)
    assert (one["global_batch"], many["global_batch"]) == (10, 40)
    assert (many["steps_per_epoch"], many["busy_share"]) == (25, 1)


def test_overrides_are_those_of_training(write):
    facts = bigscl("plan", write(), *DATA, "--data.batch_size", 50, "--store.slots=2", "--json").json()
    assert facts["global_batch"] == 50
    assert facts["phases"][0]["disk_bytes"] == 2 * facts["phases"][0]["slot_bytes"]


@pytest.mark.parametrize(
    ("sections", "arguments", "warning"),
    [
        ({}, ["--processes", 6, "--data.batch_size", 300], "6 loader workers get no batch"),
        ({"store": {"resident_gb": 0.0001}}, [], "read and written more than once per epoch"),
        ({}, MUCH, "consider store.top: 10"),
        ({"store": {"top": 4}}, MUCH, "consider store.warmup_heatmaps: scores"),
        ({"data": {"shorter": 256}}, [], "central 48 of 256 pixels"),
        ({}, [*MUCH, "--store.slots", 200], "are free at its place"),
    ],
)
def test_trouble_ahead_is_a_warning_and_exit_1(write, sections, arguments, warning):
    answer = bigscl("plan", write(**sections), *DATA, *arguments)
    assert answer.code == 1
    assert warning in answer.out


def test_the_scores_of_all_epochs_are_counted(write):
    facts = bigscl("plan", write(), *DATA, "--json").json()
    assert facts["score_log_bytes"] == 5 * 1000 * 10 * 4
    assert "scores of all epochs: 200 KB in" in bigscl("plan", write(), *DATA).out
    assert "scores of all" not in bigscl("plan", write(log={"score_classes": 0}), *DATA).out


def test_an_objective_without_memory_needs_no_store(write):
    path = write(objective={"base": "an", "consistency": "none"}, store={"kind": "none"})
    answer = bigscl("plan", path, *DATA)
    assert answer.code == 0
    assert "store: none" in answer.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no shards there"),
        (["--samples", "5"], "--samples, --classes: give both"),
        ([*DATA, "--store.tip", "3"], "store.tip: no such setting"),
        ([*DATA, "--frobnicate"], "--frobnicate: expected a value"),
        (["--probe", "x", *DATA, "--store.kind", "none", "--objective.base", "an"], "store.kind: none, but"),
    ],
)
def test_wrong_usage_is_exit_2(write, arguments, message):
    answer = bigscl("plan", write(), *arguments)
    assert answer.code == 2
    assert message in answer.err


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    batch=st.integers(1, 5),
    workers=st.integers(0, 3),
    ahead=st.integers(0, 3),
    behind=st.integers(0, 3),
)
def test_open_shards_are_those_seen_batch_by_batch(sizes, batch, workers, ahead, behind):
    plan = training_plan(
        *(np.array(sizes), max(sizes)), seed=1, epoch=0, batch_size=batch, workers=workers, shuffle_buffer=4
    )
    batches = [set((ids // max(sizes)).tolist()) for ids in plan.batches(0)]
    last = {shard: n for n, found in enumerate(batches) for shard in found}
    most = 0
    for now in range(len(batches) + ahead + behind):
        # At the moment `now` the prefetcher has come to batch `now`; what it opened stays until written.
        opened = {shard for found in batches[: now + 1] for shard in found}
        most = max(most, sum(now <= last[shard] + ahead + behind for shard in opened))
    assert forecast.open_shards(plan, 0, max(sizes), ahead, behind) == most


def test_a_limit_of_residents_bounds_the_ram(write):
    (phase,) = bigscl("plan", write(store={"resident_gb": 0.0001}), *DATA, "--json").json()["phases"]
    assert phase["resident_bytes"] == int(0.0001 * 2**30)


def test_a_probe_measures_a_place_and_leaves_nothing_behind(write, tmp_path):
    answer = bigscl("plan", write(store={"top": 4}), *DATA, "--probe", tmp_path / "disk", "--json")
    probe = answer.json()["probe"]
    assert answer.code == 0
    assert probe["keeps_up"]
    assert probe["sustained_bytes_per_second"] < min(
        probe["read_bytes_per_second"], probe["write_bytes_per_second"]
    )
    shutil.rmtree(tmp_path / "disk")  # empty but for itself
    slow = bigscl("plan", write(), *DATA, "--probe", tmp_path / "disk", "--images-per-second", 1e9)
    assert slow.code == 1
    assert "is too slow" in slow.out
    assert list((tmp_path / "disk").iterdir()) == []


@pytest.mark.parametrize("layout", ["dense", "topk", "scores"])
def test_every_layout_can_be_probed(tmp_path, layout):
    spec = StoreSpec(fingerprint="", num_classes=5, heatmap_size=4, rows_per_shard=20, shard_sizes=(20,) * 3)
    group = GroupSpec(name="", layout=layout, top=2 if layout == "topk" else None)
    speed = measure(str(tmp_path), spec, group, 2, StorageOptions())
    assert speed.both == pytest.approx(1 / (1 / speed.read + 1 / speed.write))
    assert speed.num_bytes == 32 * 20 * sum(
        {"dense": (10, 160, 16, 4, 1), "topk": (10, 64, 16, 4, 4, 1), "scores": (10, 4, 1)}[layout]
    )


def test_a_memory_in_ram_needs_no_disk(write):
    facts = bigscl("plan", write(store={"kind": "ram"}), *DATA, "--json").json()
    assert (facts["store_url"], facts["free_bytes"]) == (None, None)


def test_phases_after_the_last_epoch_are_left_out():
    made = make_config(config(store={"top": 4, "compact_after": 5}))
    spec = StoreSpec(
        fingerprint="", num_classes=20, heatmap_size=12, rows_per_shard=100, shard_sizes=(100,) * 10
    )
    plan = plan_epoch(made, np.full(10, 100), 100, epoch=0, world_size=1)
    assert [phase.group.layout for phase in forecast.forecast(made, spec, plan).phases] == ["dense"]


def test_the_expected_positives_are_told(write, index):
    facts = bigscl("plan", write(), *DATA, "--json").json()["expected"]
    assert (facts["annotated"], facts["total"]) == (1000, 2000)
    train = {"train": index.urls[0].replace("000000", "*")}
    counts = index.annotations().counts()
    answer = bigscl("plan", write(data=train))
    assert f"K = 2: {2 * counts.sum()} positives expected, 2.00 per image" in answer.out
    assert f"{counts.sum()} are to be found" in answer.out


def test_expected_positives_count_the_labels_file_and_answers_as_a_run_does(write, tmp_path):
    shards = [("a.jpg", jpeg(0)), ("b.jpg", jpeg(1)), ("c.jpg", jpeg(2)), ("d.jpg", jpeg(3))]
    write_tar(tmp_path / "train-0.tar", shards)
    index, _ = scan(str(tmp_path / "train-0.tar"), num_classes=3, unlabelled=True)
    index.save(tmp_path / "bigscl-index-train.npz")
    given = {"train": str(tmp_path / "train-*.tar")}
    answer = bigscl("plan", write(data=given))
    assert answer.code == 2
    assert "no image has a positive label. Give data.labels_file" in answer.err
    labels = tmp_path / "labels.csv"
    labels.write_text("key,positives\na,0\nb,0\nc,1\n")
    given["labels_file"] = str(labels)
    facts = bigscl("plan", write(data=given), "--json").json()["expected"]
    assert (facts["annotated"], facts["total"]) == (3, 6)
    said = [("a", "0", True), ("d", "0", True), ("d", "2", True), ("c", "1", False)]
    AnswersFile(tmp_path / "answers.jsonl").append(
        [Answer(*one, "ann", "2025-01-31T12:00:00Z") for one in said]
    )
    given["answers"] = str(tmp_path / "answers.jsonl")
    facts = bigscl("plan", write(data=given), "--json").json()["expected"]
    # K counts labels: 2 x 2 of class 0; that of class 1 is refuted; class 2 was found once, by an answer.
    assert (facts["annotated"], facts["total"]) == (4, 5)
    settings = load_config(write(data=given))
    lines = summary(settings, open_data(settings), 1, 12, torch.device("cpu"))
    assert str(Expectation(**facts)) in lines


def test_k_is_planned_from_the_labels_file_of_validation(write, tmp_path):
    one_label, _ = scan(write_shards(tmp_path, [6]))
    one_label.save(tmp_path / "bigscl-index-train.npz")
    place = str(tmp_path / "train-*.tar")
    (tmp_path / "full.csv").write_text("key,positives\nk0000,0;1\nk0001,1;2;3\n")
    given = {"train": place, "val": place, "val_labels_file": str(tmp_path / "full.csv")}
    facts = bigscl("plan", write(data=given, selection={"K": "auto"}), "--json").json()["expected"]
    assert facts["positives_per_image"] == 2.5


def test_epochs_are_counted_from_one_as_in_the_log(write):
    out = bigscl("plan", write(store={"top": 4}), *DATA).out
    assert "    1 - 2   dense" in out
    assert "    3 - 5   top 4" in out
