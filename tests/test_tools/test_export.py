import csv
import json
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from bigscl.data.reader import read_metadata
from bigscl.selection import Selection
from store import HeatmapStore
from tests.test_tools.conftest import bigscl
from tests.test_tools.quickstart import make_store


def expected_pairs(run, index):
    """(id, class) of every expected positive, by the trainer's own code; and of every annotated one."""
    store, ids = HeatmapStore.open(run / "store"), index.ids()
    chosen = Selection.from_json(store.snapshot.attributes["selection"])
    scores = torch.from_numpy(store.read(ids).scores)
    expected = chosen.expected(scores, torch.from_numpy(ids)).numpy()
    annotated = index.labels_of(ids) == 1
    return _pairs(ids, expected), _pairs(ids, annotated)


def _pairs(ids, mask):
    rows, classes = np.nonzero(mask)
    return set(zip(ids[rows].tolist(), classes.tolist(), strict=True))


def test_mined_labels_are_the_expected_ones_that_are_not_annotated(runs, index, tmp_path):
    assert bigscl("export", runs / "dense", "labels", "-o", tmp_path / "mined.csv").code == 0
    with (tmp_path / "mined.csv").open() as file:
        rows = list(csv.DictReader(file))
    expected, annotated = expected_pairs(runs / "dense", index)
    assert {(int(row["id"]), int(row["class"])) for row in rows} == expected - annotated
    assert len(rows) == len(expected - annotated) > 20
    store = HeatmapStore.open(runs / "dense" / "store")
    for row in rows:
        sample, number = int(row["id"]), int(row["class"])
        assert index.key(sample) == row["key"]
        assert index.name(sample) == f"{row['shard']}/{row['key']}"
        assert index.class_names[number] == row["name"]
        assert float(row["score"]) == pytest.approx(store.read([sample]).scores[0, number], abs=1e-4)


@pytest.mark.parametrize("which", ["expected", "all"])
def test_expected_and_all_labels_can_be_had_too(runs, index, tmp_path, which):
    output = tmp_path / "labels.jsonl"
    assert bigscl("export", runs / "topk", "labels", "--which", which, "-o", output).code == 0
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    expected, annotated = expected_pairs(runs / "topk", index)
    wanted = expected if which == "expected" else expected | annotated
    assert {(row["id"], row["class"]) for row in rows} == wanted
    assert all(row["annotated"] == ((row["id"], row["class"]) in annotated) for row in rows)
    assert all(row["expected"] == ((row["id"], row["class"]) in expected) for row in rows)


def test_the_box_lies_where_the_digit_is(runs, index, tmp_path):
    bigscl("export", runs / "dense", "labels", "-o", tmp_path / "mined.jsonl")
    boxes = read_metadata(index, index.ids())
    hits = total = 0
    for line in (tmp_path / "mined.jsonl").read_text().splitlines():
        row = json.loads(line)
        for number, x0, y0, x1, y1 in boxes[row["id"]]["boxes"]:
            if number == row["class"]:
                x, y = (row["x0"] + row["x1"]) / 2, (row["y0"] + row["y1"]) / 2
                hits += x0 <= x <= x1 and y0 <= y <= y1
                total += 1
    assert hits > 0.9 * total > 20


def test_classes_without_a_kept_heatmap_have_no_box(index, tmp_path):
    make_store(tmp_path / "store", index, epochs=1, layout="scores")
    shards = index.urls[0].replace("000000", "*")
    out = tmp_path / "mined.csv"
    assert bigscl("export", tmp_path / "store", "labels", "--shards", shards, "-o", out).code == 0
    with out.open() as file:
        rows = list(csv.DictReader(file))
    assert rows
    assert all(row["x0"] == "" for row in rows)


def test_parquet_holds_what_csv_holds(runs, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    for name in ("mined.parquet", "mined.jsonl"):
        assert bigscl("export", runs / "dense", "labels", "-o", tmp_path / name).code == 0
    lines = (tmp_path / "mined.jsonl").read_text().splitlines()
    assert parquet.read_table(tmp_path / "mined.parquet").to_pylist() == [json.loads(line) for line in lines]


def test_parquet_without_pyarrow_says_what_to_install(runs, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    answer = bigscl("export", runs / "dense", "labels", "-o", tmp_path / "x.parquet")
    assert answer.code == 2
    assert "pip install pyarrow" in answer.err
    assert list(tmp_path.iterdir()) == []


def test_scores_are_a_row_per_sample_in_the_order_of_their_ids(runs, index, tmp_path):
    assert bigscl("export", runs / "dense", "scores", "-o", tmp_path / "s.npy").code == 0
    found = np.load(tmp_path / "s.npy")
    np.testing.assert_array_equal(found, HeatmapStore.open(runs / "dense" / "store").read(index.ids()).scores)


def test_heatmaps_go_to_npz_with_what_explains_them(runs, index, tmp_path):
    arguments = ("--sample", index.key(3), "--sample", 11, "-o", tmp_path / "h.npz")
    assert bigscl("export", runs / "topk", "heatmaps", *arguments).code == 0
    found = np.load(tmp_path / "h.npz")
    rows = HeatmapStore.open(runs / "topk" / "store").read([3, 11])
    np.testing.assert_array_equal(found["heatmaps"], rows.heatmaps)
    np.testing.assert_array_equal(found["classes"], rows.classes)
    assert found["keys"].tolist() == [index.key(3), index.key(11)]
    assert found["class_names"].tolist() == list(index.class_names)


def test_heatmaps_go_to_pngs_cell_by_cell(runs, index, tmp_path):
    assert bigscl("export", runs / "topk", "heatmaps", "--sample", 3, "-o", tmp_path / "png").code == 0
    rows = HeatmapStore.open(runs / "topk" / "store").read([3])
    for place, number in enumerate(rows.classes[0].tolist()):
        with Image.open(tmp_path / "png" / f"{index.key(3)}_{number}_{number}.png") as picture:
            pixels = np.asarray(picture)
        expected = np.rint(rows.heatmaps[0, place].astype(np.float32) * 255)
        np.testing.assert_array_equal(pixels[8::16, 8::16], expected)
    assert len(list((tmp_path / "png").iterdir())) == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{runs}/dense", "labels", "-o", "{out}/x.txt"], "tables are written as .csv, .jsonl, .parquet"),
        (["{runs}/dense", "labels", "-o", "{out}/there.csv"], "exists already"),
        (["{runs}/dense", "scores", "-o", "{out}/x.csv"], "scores are written as .npy"),
        (["{runs}/dense", "heatmaps", "-o", "{out}/x.npz"], "which samples?"),
        (["{runs}/dense", "heatmaps", "--sample", "3", "-o", "{out}/x.jpg"], "as .npz, or as PNGs"),
        (
            ["{runs}/dense", "labels", "--sample", "3", "-o", "{out}/x.csv"],
            "--sample: has no effect on labels",
        ),
        (["{bare}", "labels", "-o", "{out}/x.csv"], "labels: the shards are needed"),
        (["{runs}/dense", "labels", "--snapshot", "7", "-o", "{out}/x.csv"], "no snapshot 7"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_2(runs, bare, tmp_path, arguments, message):
    (tmp_path / "there.csv").write_text("mine")
    places = {"runs": runs, "bare": bare, "out": tmp_path}
    answer = bigscl("export", *(one.format(**places) for one in arguments))
    assert answer.code == 2
    assert message in answer.err
    assert [file.name for file in tmp_path.iterdir()] == ["there.csv"]
    assert (tmp_path / "there.csv").read_text() == "mine"


def test_before_the_first_selection_there_is_nothing_to_mine(index, tmp_path):
    annotations, shards = index.annotations(), index.urls[0].replace("000000", "*")
    HeatmapStore.create(tmp_path / "store", annotations, heatmap_size=4)
    with HeatmapStore.open(tmp_path / "store", annotations=annotations, mode="w") as store:
        store.commit(epoch=0, attributes={"selection": Selection.none(10).to_json()})
    out = ("--shards", shards, "-o", tmp_path / "x.csv")
    answer = bigscl("export", tmp_path / "store", "labels", *out)
    assert answer.code == 2
    assert "no expected positives were chosen" in answer.err
    assert (
        bigscl("export", tmp_path / "store", "labels", "--which", "all", *out, "--json").json()["rows"] == 30
    )
