"""Expected positives come from scores and cuts that belong together, whenever a snapshot was made."""

import csv
from dataclasses import replace

import numpy as np
import pytest

from bigscl.data.index import with_fingerprint
from bigscl.selection.thresholds import Thresholds
from bigscl.store import HeatmapStore, Rows, update
from bigscl.tools.shared.shard_passes import expected_at
from tests.builders import SIDE, K, learn
from tests.test_tools.conftest import add_config, bigscl


def save_in_mid_epoch(run, index, *, keep_counts=True):
    """Epoch 3 has risen the scores of half of the samples, and was saved with the cuts of epoch 2."""
    annotations, ids = index.annotations(), index.ids()[::2]
    with HeatmapStore.open(run / "store", annotations=annotations, mode="w") as store:
        rows = store.read(ids)
        scores = (0.5 + rows.scores / 2).astype(np.float16)
        changed = Rows(
            scores=scores,
            heatmaps=rows.heatmaps,
            cell_visits=rows["cell_visits"],
            sample_visits=rows["sample_visits"],
        )
        update(store, 3, ids, changed)
        cuts = dict(store.snapshot.attributes["selection"])
        if not keep_counts:
            del cuts["num_expected"]
        store.commit(epoch=3, attributes={"selection": cuts, "next_epoch": 3, "skipped": []})
        return store.snapshot.id


def best(run, index):
    """(id, class) of the round(K * count) best samples of each class: sorted, ties to the lowest id."""
    ids, counts = index.ids(), index.annotations().counts()
    scores = HeatmapStore.open(run / "store", annotations=index.annotations()).read(ids).scores
    pairs = set()
    for number, count in enumerate(counts.tolist()):
        ranked = sorted(zip((-scores[:, number].astype(float)).tolist(), ids.tolist(), strict=True))
        pairs |= {(sample, number) for _, sample in ranked[: round(K * count)]}
    return pairs


def exported(run, tmp_path, *arguments):
    answer = bigscl("export", run, "labels", "-o", tmp_path / "x.csv", "--overwrite", *arguments)
    assert answer.code == 0, answer.err
    with (tmp_path / "x.csv").open() as file:
        return {(int(row["id"]), int(row["class"])) for row in csv.DictReader(file)}, answer


@pytest.mark.parametrize("made", ["run", "topk"])
def test_a_snapshot_in_mid_epoch_exports_the_best_of_its_own_scores(request, index, tmp_path, made):
    run = request.getfixturevalue(made)
    at = save_in_mid_epoch(run, index)
    found, answer = exported(run, tmp_path, "--which", "expected")
    assert found == best(run, index)
    assert f"snapshot {at} was saved in the middle of epoch 4" in answer.out
    facts = exported(run, tmp_path, "--json")[1].json()
    assert facts["selection"]["recomputed"]
    assert "middle of epoch 4" in facts["selection"]["note"]


def test_at_an_epochs_end_the_runs_own_cuts_count(run, index, tmp_path):
    found, answer = exported(run, tmp_path, "--which", "expected")
    assert found == best(run, index)
    assert "middle" not in answer.out
    facts = exported(run, tmp_path, "--json")[1].json()
    told = "expected positives as selected at the end of epoch 3"
    assert facts["selection"] == {"recomputed": False, "note": told}


def test_show_and_diff_expect_what_export_expects(run, index):
    at = save_in_mid_epoch(run, index)
    wanted = best(run, index)
    for sample in (0, 1, 2):
        facts = bigscl("show", run, "--sample", sample, "--json").json()
        (shown,) = facts["samples"]
        expected = {(sample, one["class"]) for one in shown["classes"] if one["expected"]}
        assert expected == {pair for pair in wanted if pair[0] == sample}
        assert facts["selection"]["recomputed"]
    assert "middle of epoch 4" in bigscl("show", run, "--sample", 0).out
    assert "mid-epoch" in bigscl("show", run).out
    facts = bigscl("diff", f"{run}@{at - 1}", run, "--json").json()
    counts = facts["expected"]
    # As many positives on both sides: what one side gains, the other loses.
    assert counts["only_a"] == counts["only_b"] > 0
    assert counts["both"] + counts["only_b"] == len(wanted)
    assert [facts[side]["selection"]["recomputed"] for side in "ab"] == [False, True]
    text = bigscl("diff", f"{run}@{at - 1}", run).out
    assert f"B: snapshot {at} was saved in the middle" in text


@pytest.fixture
def unlabelled(tmp_path, index):
    """(run, index) whose shards do not say what is there, so that pictures show what is expected."""
    bare = with_fingerprint(replace(index, full=None))
    bare.save(tmp_path / "bare.npz")
    HeatmapStore.create(tmp_path / "run" / "store", bare.annotations(), heatmap_size=SIDE, history_samples=2)
    with HeatmapStore.open(tmp_path / "run" / "store", annotations=bare.annotations(), mode="w") as store:
        for epoch in range(3):
            learn(store, index, epoch, (epoch + 1) / 3, np.random.default_rng(epoch))
            store.drop_snapshots()
            store.record_history(epoch)
    add_config(tmp_path / "run", index)
    return tmp_path / "run", bare


@pytest.mark.parametrize("epochs", [False, True])
def test_render_marks_what_export_expects(unlabelled, tmp_path, monkeypatch, epochs):
    run, bare = unlabelled
    save_in_mid_epoch(run, bare)
    samples = HeatmapStore.open(run / "store").spec.history_samples
    seen = []

    def classes_to_show(rows, kinds, count, reserve=True):
        seen.append(np.isin(kinds, ["annotated", "expected"]))
        assert "negative" not in kinds, "these shards do not say what is absent"
        return [0]

    monkeypatch.setattr("bigscl.evaluation.sample_plots.classes_to_show", classes_to_show)
    which = ["--epochs"] if epochs else ["--choose", "tracked"]
    files = ("--index", tmp_path / "bare.npz", "-o", tmp_path / "x.png")
    answer = bigscl("render", run, *which, *files, "--json")
    assert answer.code == 0, answer.err
    wanted = best(run, bare)
    for sample, there in zip(samples, seen, strict=True):
        assert {(sample, int(number)) for number in np.flatnonzero(there)} == {
            pair for pair in wanted if pair[0] == sample
        }
    assert answer.json()["selection"]["recomputed"]


def test_counts_that_nothing_tells_are_refused(run, index, tmp_path):
    save_in_mid_epoch(run, index, keep_counts=False)
    answer = bigscl("export", run, "labels", "-o", tmp_path / "x.csv")
    assert answer.code == 2
    assert "num_expected is missing" in answer.err
    assert len(answer.err.strip().splitlines()) == 1
    assert not (tmp_path / "x.csv").exists()


def test_mid_epoch_before_the_first_selection_expects_nothing(run, index):
    with HeatmapStore.open(run / "store", annotations=index.annotations(), mode="w") as store:
        none = Thresholds.none(10).to_json()
        store.commit(epoch=0, attributes={"selection": none, "next_epoch": 0, "skipped": []})
    store = HeatmapStore.open(run / "store")
    expected = expected_at(store)
    assert (expected.any, expected.recomputed) == (False, False)
    assert not expected.expected(store.read([0]).scores, np.array([0])).any()
