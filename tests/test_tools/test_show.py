import subprocess
import sys
import time

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from bigscl.common.digests import write_sealed
from bigscl.config import to_yaml
from bigscl.data.labels.training_labels import draw_given
from bigscl.store import Annotations, GroupSpec, HeatmapStore, Ragged, Rows, update
from bigscl.tools.shared.shard_passes import expected_at
from bigscl.tools.verbs.show import histogram
from tests.builders import config_of, make_store
from tests.test_tools.conftest import bigscl


def test_what_a_store_is_can_be_seen_at_a_glance(runs, index):
    answer = bigscl("show", runs / "dense")
    assert answer.code == 0
    assert "30 samples in 4 shards of up to 8, 10 classes" in answer.out
    assert "heatmaps 12 x 12 of all classes, 3 slots, checksums" in answer.out
    assert "lease     free" in answer.out
    assert "30 in epoch 3 (at snapshot 4)" in answer.out
    assert index.annotations().fingerprint[:12] in answer.out


def test_json_has_sizes_by_array_and_by_snapshot(runs):
    facts = bigscl("show", runs / "dense" / "store", "--json").json()
    files = [file for file in (runs / "dense" / "store").rglob("*") if file.is_file()]
    assert sum(facts["bytes"].values()) == sum(file.stat().st_size for file in files)
    scores = [file for file in files if file.parent.name == "scores" and "arrays-000" in str(file)]
    assert facts["bytes"]["arrays-000/scores"] == sum(file.stat().st_size for file in scores)
    assert [one["id"] for one in facts["snapshots"]] == [3, 4]
    for one in facts["snapshots"]:
        # Every epoch rewrote every shard: nothing is shared.
        assert one["bytes"] == one["bytes_only_here"] > 0
        assert (one["shards_written"], one["selection"]) == (4, True)
    assert facts["visited"] == {"2": 30}


def test_an_older_snapshot_is_shown_as_it_was(runs):
    facts = bigscl("show", runs / "topk", "--snapshot", 4, "--json").json()
    assert (facts["snapshot"], facts["layout"]["layout"], facts["visited"]) == (4, "topk", {"1": 30})


def test_samples_never_visited_are_counted(tmp_path, index):
    annotations = index.annotations()
    HeatmapStore.create(tmp_path / "store", annotations, heatmap_size=4, group=GroupSpec(layout="scores"))
    with HeatmapStore.open(tmp_path / "store", annotations=annotations, mode="w") as store:
        scores = np.zeros((3, 10), np.float16)
        update(store, 5, np.array([0, 1, 24]), Rows(scores=scores, sample_visits=np.ones(3, np.uint8)))
        store.commit(epoch=5)
    assert bigscl("show", tmp_path / "store", "--json").json()["visited"] == {"never": 27, "5": 3}


def test_checkpoints_tag_the_snapshots_they_name(run):
    (run / "checkpoints" / "step-00000030").mkdir(parents=True)
    write_sealed(run / "checkpoints" / "step-00000030" / "progress.json", {"snapshot": 4})
    facts = bigscl("show", run, "--json").json()
    assert [one["checkpoints"] for one in facts["snapshots"]] == [[], ["step-00000030"]]


def test_a_held_lease_names_its_holder(run, index):
    with HeatmapStore.open(run / "store", annotations=index.annotations(), mode="w", run="busy"):
        lease = bigscl("show", run, "--json").json()["lease"]
        assert (lease["run"], lease["alive"]) == ("busy", True)
        assert "held by run busy" in bigscl("show", run).out


def test_a_sample_is_found_by_key_by_shard_and_key_and_by_id(runs, index):
    for name in (index.key(9), index.name(9), "9"):
        (sample,) = bigscl("show", runs / "dense", "--sample", name, "--json").json()["samples"]
        assert (sample["id"], sample["name"], sample["visited"]) == (9, index.name(9), 2)


def test_a_sample_shows_its_scores_labels_and_expected_classes(runs, index):
    (sample,) = bigscl("show", runs / "dense", "--sample", 9, "--json").json()["samples"]
    store = HeatmapStore.open(runs / "dense" / "store")
    rows, ids = store.read([9]), np.array([9])
    expected = expected_at(store).expected(rows.scores, ids)[0]
    annotated, present = index.labels_of(ids)[0] == 1, index.labels_of(ids, "full")[0] == 1
    assert sorted(one["class"] for one in sample["classes"]) == list(range(10))
    assert annotated[sample["classes"][0]["class"]]
    for one in sample["classes"]:
        number = one["class"]
        assert one["score"] == float(rows.scores[0, number])
        assert one["peak"] == float(rows.heatmaps[0, number].max())
        assert (one["annotated"], one["present"]) == (annotated[number], present[number])
        assert one["expected"] == expected[number]


def test_tracked_samples_show_how_they_moved(runs):
    store = HeatmapStore.open(runs / "dense" / "store")
    history_samples = store.spec.history_samples[1]
    (sample,) = bigscl("show", runs / "dense", "--sample", history_samples, "--json").json()["samples"]
    first = sample["classes"][0]["class"]
    assert {int(epoch) for epoch in sample["history"]} == {0, 1, 2}
    for epoch, rows in store.history(history_samples).items():
        assert sample["history"][str(epoch)][0] == float(rows.scores[0, first])
    assert "e3" in bigscl("show", runs / "dense", "--sample", history_samples).out


def test_histograms_count_every_value_of_visited_samples(runs):
    histograms = bigscl("show", runs / "topk", "--histograms", "--json").json()["histograms"]
    rows = HeatmapStore.open(runs / "topk" / "store").read(range(24))
    assert sum(histograms["scores"]) == 30 * 10
    assert sum(histograms["heatmaps"]) == 30 * rows.heatmaps[0].size
    assert "0.9 - 1.0" in bigscl("show", runs / "topk", "--histograms").out


def test_histograms_have_the_bins_of_numpy_for_every_possible_value():
    values = np.arange(np.float16(1).view(np.uint16) + 1, dtype=np.uint16).view(np.float16)
    assert_array_equal(histogram(values), np.histogram(values, bins=10, range=(0, 1))[0])
    assert histogram(values[:0]).tolist() == [0] * 10


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{folder}"], "nothing there"),
        (["{runs}/dense", "--snapshot", "99"], "no snapshot 99; retained are [3, 4]"),
        (["{runs}/dense", "--sample", "nobody"], "there is no such key"),
        (["{runs}/dense", "--sample", "31"], "no such id. There are 30 samples"),
        (["{bare}", "--sample", "train_000003"], "Add --shards PATTERN"),
        (["{runs}/dense", "--sample", "3", "--shards", "{other}"], "created for data"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_2(tmp_path, runs, bare, other_shards, arguments, message):
    places = {"folder": tmp_path / "empty", "runs": runs, "bare": bare, "other": other_shards}
    answer = bigscl("show", *(argument.format(**places) for argument in arguments))
    assert answer.code == 2
    assert message in answer.err
    assert len(answer.err.strip().splitlines()) == 1


def test_shards_may_be_told_instead_of_a_config(bare, index):
    (sample,) = bigscl(
        *("show", bare, "--sample", index.key(3), "--json"),
        *("--shards", index.urls[0].replace("000000", "*")),
    ).json()["samples"]
    assert sample["id"] == 3


def test_labels_drawn_anew_by_the_run_are_found_through_its_config(tmp_path, index):
    make_store(tmp_path / "run" / "store", draw_given(index, seed=7), epochs=1)
    train = index.urls[0].replace("000000", "*")
    config = f"data:\n  train: {train}\n  given: {{seed: 7, positives: 1, negatives: 0}}\n"
    (tmp_path / "run" / "config.yaml").write_text(config)
    assert bigscl("show", tmp_path / "run", "--sample", index.key(3)).code == 0
    (tmp_path / "run" / "config.yaml").write_text(config.replace("seed: 7", "seed: 8"))
    assert "created for data" in bigscl("show", tmp_path / "run", "--sample", index.key(3)).err


@pytest.mark.parametrize(
    ("arguments", "left_out"),
    [
        ([], ["torch", "matplotlib", "PIL", "bigscl.data.index"]),
        (["--sample", "train_000003"], ["torch", "matplotlib"]),
    ],
)
def test_show_imports_only_what_it_needs(runs, arguments, left_out):
    code = (
        "import sys; from bigscl.tools.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit as end: assert not end.code\n"
        f"sys.exit(', '.join(name for name in {left_out} if name in sys.modules) or 0)"
    )
    command = [sys.executable, "-c", code, "show", str(runs / "dense"), *arguments]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr.strip()) == (0, "")


def test_a_sparse_store_of_a_million_rows_is_shown_at_once(tmp_path):
    rows = 1281 * 1000
    annotations = Annotations(
        fingerprint="x" * 64,
        num_classes=1000,
        rows_per_shard=1000,
        shard_sizes=np.full(1281, 1000, np.int64),
        given=Ragged(np.arange(rows + 1), np.zeros(rows, np.int64)),
    )
    HeatmapStore.create(
        tmp_path / "store", annotations, heatmap_size=14, group=GroupSpec(layout="topk", top=10)
    )
    with HeatmapStore.open(tmp_path / "store", annotations=annotations, mode="w") as store:
        store.save_shard(7, store.load_shard(7))
        store.commit(epoch=0)
    started = time.process_time()
    facts = bigscl("show", tmp_path / "store", "--json").json()
    # Processor time: the machine may be busy with other tests.
    assert time.process_time() - started < 1.0
    assert (facts["samples"], facts["snapshots"][-1]["shards_written"]) == (rows, 1)


@pytest.mark.parametrize(("kind", "why"), [("none", "needs none"), ("ram", "in RAM")])
@pytest.mark.parametrize("verb", ["show", "verify"])
def test_a_run_without_memory_says_so(tmp_path, verb, kind, why):
    objective = {"base": "an", "consistency": "none"}
    (tmp_path / "config.yaml").write_text(
        to_yaml(config_of(run=str(tmp_path), store={"kind": kind}, objective=objective))
    )
    answer = bigscl(verb, tmp_path)
    assert answer.code == 2
    assert "this run keeps no memory on disk" in answer.err
    assert why in answer.err


def test_the_store_of_a_run_is_found_where_its_config_has_it(tmp_path, bare):
    (tmp_path / "config.yaml").write_text(to_yaml(config_of(run=str(tmp_path), store={"url": str(bare)})))
    assert bigscl("show", tmp_path, "--json").json()["url"] == str(bare)
