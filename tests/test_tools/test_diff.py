import numpy as np
import pytest

from bigscl.store import HeatmapStore, Rows, update
from bigscl.tools.shared.shard_passes import expected_at
from tests.builders import make_store, scene_index
from tests.test_tools.conftest import bigscl


def test_a_store_does_not_differ_from_itself(runs):
    answer = bigscl("diff", runs / "dense", runs / "dense", "--json")
    assert answer.code == 0
    assert answer.json()["shards_compared"] == 0


def test_equal_rows_in_other_layouts_do_not_differ(runs):
    answer = bigscl("diff", runs / "dense", runs / "topk", "--json")
    assert answer.code == 0
    facts = answer.json()
    assert (facts["shards_compared"], facts["rows_differing"]) == (4, 0)
    assert facts["expected"]["both"] > 30


def test_a_single_changed_row_is_found(run, index):
    before = HeatmapStore.open(run / "store").read([17])
    scores = before.scores.copy()
    scores[0, 4] = 1
    with HeatmapStore.open(run / "store", annotations=index.annotations(), mode="w") as store:
        changed = Rows(
            scores=scores,
            heatmaps=before.heatmaps,
            cell_visits=before["cell_visits"],
            sample_visits=before["sample_visits"],
        )
        update(store, 3, np.array([17]), changed)
        store.commit(epoch=3, attributes={**store.snapshot.attributes, "next_epoch": 4})
    answer = bigscl("diff", f"{run}@4", run, "--json")
    assert answer.code == 1
    facts = answer.json()
    assert facts["rows_differing_by_array"] == {"scores": 1, "last_epoch": 1, "heatmaps": 0}
    assert (facts["shards_compared"], facts["rows_differing"]) == (1, 1)
    change = float(1 - before.scores[0, 4].astype(np.float32))
    assert facts["largest_score_change"] == pytest.approx(change)
    assert facts["mean_score_change"] == pytest.approx(change / 300)
    assert [one["id"] for one in facts["most_changed"]] == [17]
    assert facts["expected"]["only_b"] == 1
    assert [one["class"] for one in facts["expected"]["classes"]] == [4]


def test_changes_of_the_selection_alone_are_found(run, index):
    with HeatmapStore.open(run / "store", annotations=index.annotations(), mode="w") as store:
        before = store.snapshot.attributes
        cuts = {**before["selection"], "score": [1.0] * 10, "tie_id": [-1] * 10}
        store.commit(epoch=2, attributes={**before, "selection": cuts})
    answer = bigscl("diff", f"{run}@4", run, "--json")
    assert answer.code == 1
    facts = answer.json()
    assert facts["rows_differing"] == 0
    assert (facts["expected"]["only_b"], facts["expected"]["both"]) == (0, 0)
    assert facts["expected"]["only_a"] > 30


def test_different_classes_and_heatmaps_of_compacted_stores_are_found(topk, index):
    store = HeatmapStore.open(topk / "store")
    rows = store.load_shard(0)
    rows.heatmaps[2, 1] = 0
    free = sorted(set(range(10)) - set(rows.classes[5].tolist()))[0]
    rows.classes[5] = np.sort([*rows.classes[5][:3], free])
    with HeatmapStore.open(topk / "store", annotations=index.annotations(), mode="w") as writer:
        writer.save_shard(0, rows)
        writer.commit(epoch=2, attributes=writer.snapshot.attributes)
    facts = bigscl("diff", f"{topk}@5", topk, "--json").json()
    assert facts["rows_differing_by_array"]["classes"] == 1
    assert facts["rows_differing_by_array"]["heatmaps"] in (1, 2)
    assert facts["rows_differing"] == 2


def test_two_runs_are_told_apart_in_words(runs):
    answer = bigscl("diff", runs / "dense", runs / "weak", "--count", 2)
    assert answer.code == 1
    assert "rows that differ: 30 of 30" in answer.out
    assert "of A only" in answer.out


def test_stores_of_other_data_are_not_compared(runs, tmp_path):
    make_store(tmp_path / "other", scene_index(tmp_path / "data", train=4), epochs=1)
    answer = bigscl("diff", runs / "dense", tmp_path / "other")
    assert answer.code == 2
    assert "of different images" in answer.err


def test_initial_rows_are_compared_when_the_data_is_told(runs, tmp_path, index):
    HeatmapStore.create(tmp_path / "fresh", index.annotations(), heatmap_size=12)
    answer = bigscl("diff", runs / "dense", tmp_path / "fresh", "--json")
    assert answer.json()["rows_differing"] == 30


def test_mined_labels_are_compared_with_a_file_of_labels(run, index, tmp_path):
    file = tmp_path / "theirs.csv"
    store = HeatmapStore.open(run / "store", annotations=index.annotations())
    ids = index.ids()
    mined = expected_at(store).expected(store.read(ids).ranked_by(), ids)
    given, full = (index.labels_of(ids, labels) == 1 for labels in ("given", "full"))
    listed = np.arange(len(ids)) % 3 > 0
    lines = [
        f"{index.key(int(number))},{';'.join(map(str, np.flatnonzero(own)))}"
        for number, own in zip(ids[listed], full[listed], strict=True)
    ]
    file.write_text("\n".join(["key,positives", *lines]) + "\n")

    answer = bigscl("diff", run, file, "--json")
    ours, theirs = (pairs[listed] & ~given[listed] for pairs in (mined, full))
    facts = answer.json()
    assert answer.code == 1
    assert facts["images"] == listed.sum()
    assert (facts["both"], facts["only_a"], facts["only_b"]) == (
        (ours & theirs).sum(),
        (ours & ~theirs).sum(),
        (theirs & ~ours).sum(),
    )
    assert facts["both"] > 0
    by_class = {row["class"]: row["only_a"] + row["only_b"] for row in facts["classes"]}
    differing = (ours != theirs).sum(axis=0)
    assert by_class == {number: differing[number] for number in np.flatnonzero(differing)}
    assert f"B has {facts['both']:,} (" in bigscl("diff", run, file).out


def test_a_file_of_labels_that_is_missing_is_one_line(run):
    answer = bigscl("diff", run, "nosuch.csv")
    assert answer.code == 2
    assert "nosuch.csv: no such file of labels" in answer.err
