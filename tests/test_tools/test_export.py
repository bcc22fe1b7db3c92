import contextlib
import csv
import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from bigscl.data.index import load_index
from bigscl.data.read_samples import read_metadata
from bigscl.selection.thresholds import Thresholds
from bigscl.store import HeatmapStore
from bigscl.store.snapshots import SnapshotLog
from bigscl.tools.shared import label_table
from tests.builders import make_store
from tests.test_tools.conftest import add_config, bigscl


def expected_pairs(run, index):
    """(id, class) of every expected positive, by the trainer's own code; and of every annotated one."""
    store, ids = HeatmapStore.open(run / "store"), index.ids()
    chosen = Thresholds.from_json(store.snapshot.attributes["selection"])
    expected = chosen.expected(store.read(ids).scores, ids)
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


def test_a_shard_without_any_kept_heatmap_of_a_mined_label_has_no_boxes(topk, index, tmp_path):
    annotated = index.labels_of(index.ids()) == 1
    with HeatmapStore.open(topk / "store", annotations=index.annotations(), mode="w") as store:
        rows = store.load_shard(0)
        for place, own in enumerate(annotated[: len(rows)]):
            # The strongest classes beside the annotated ones are kept of no sample of this shard.
            kept = np.flatnonzero(own)[:1]
            rest = np.setdiff1d(np.arange(10), [*kept, 9])
            rows.classes[place] = np.sort([*kept, *rest[: 4 - len(kept)]])
            rows.scores[place] = np.where(own, rows.scores[place], 0)
            rows.scores[place, 9] = 0.99 if not own[9] else rows.scores[place, 9]
        store.save_shard(0, rows)
        cuts = Thresholds.none(10)
        cuts.score[9], cuts.tie_id[9] = 0.9, 100
        cuts = replace(cuts, num_expected=np.ones(10, np.int64))
        store.commit(epoch=2, attributes={"selection": cuts.to_json(), "next_epoch": 3, "skipped": []})
    out = tmp_path / "mined.jsonl"
    assert bigscl("export", topk, "labels", "-o", out).code == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    first = [line for line in lines if line["id"] < 8]
    assert first
    assert all(line["class"] == 9 and line["x0"] is None for line in first)


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet", "npy"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_an_interrupted_export_leaves_no_file_and_the_old_one_in_place(
    runs, tmp_path, monkeypatch, suffix, error
):
    load = HeatmapStore._load

    def interrupted(store, shard, names=None, **options):
        if shard == 2:
            raise error
        return load(store, shard, names, **options)

    out = tmp_path / f"x.{suffix}"
    out.write_text("mine")
    monkeypatch.setattr(HeatmapStore, "_load", interrupted)
    what = "scores" if suffix == "npy" else "labels"
    with contextlib.suppress(KeyboardInterrupt):
        assert bigscl("export", runs / "dense", what, "-o", out, "--overwrite").code != 0
    assert [file.name for file in tmp_path.iterdir()] == [out.name]
    assert out.read_text() == "mine"


def test_parquet_has_few_large_row_groups(runs, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    assert bigscl("export", runs / "dense", "labels", "-o", tmp_path / "mined.parquet").code == 0
    assert parquet.ParquetFile(tmp_path / "mined.parquet").num_row_groups == 1


def test_parquet_row_groups_are_written_as_they_fill_up(tmp_path, monkeypatch):
    parquet = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr(label_table, "ROWS_PER_GROUP", 10)
    batches = [np.arange(first, first + 4) for first in range(0, 28, 4)]
    with label_table.table_writer(tmp_path / "x.parquet", {"n": int}) as write:
        for batch in batches:
            write({"n": batch})
    file = parquet.ParquetFile(tmp_path / "x.parquet")
    assert file.read().to_pydict() == {"n": list(range(28))}
    assert file.num_row_groups > 2


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak memory from /proc")
def test_scores_are_never_all_in_memory(tmp_path):
    """80 MB of scores pass through a process that grows by far less."""
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "import numpy as np\n"
        "from store import Annotations, GroupSpec, Ragged, HeatmapStore\n"
        "from bigscl.tools.verbs.export import write_scores\n"
        "shards, rows, classes = 40, 500, 2000\n"
        "annotations = Annotations(fingerprint='x' * 64, num_classes=classes, rows_per_shard=rows,\n"
        "    shard_sizes=np.full(shards, rows),\n"
        "    given=Ragged(np.arange(shards * rows + 1), np.arange(shards * rows) % classes))\n"
        "folder = Path(sys.argv[1])\n"
        "HeatmapStore.create(folder / 'store', annotations, heatmap_size=2,\n"
        "    group=GroupSpec(layout='scores'))\n"
        "with HeatmapStore.open(folder / 'store', annotations=annotations, mode='w') as store:\n"
        "    store.save_shard(0, store.load_shard(0))\n"
        "    store.commit(epoch=0)\n"
        "store = HeatmapStore.open(folder / 'store', annotations=annotations)\n"
        "def peak():\n"
        "    lines = Path('/proc/self/status').read_text().splitlines()\n"
        "    return next(int(line.split()[1]) for line in lines if line.startswith('VmHWM'))\n"
        "before = peak()\n"
        "write_scores(store, None, folder / 'x.npy')\n"
        "print(peak() - before)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], check=True, capture_output=True, text=True
    )
    assert (tmp_path / "x.npy").stat().st_size > 80e6
    assert int(done.stdout) * 1024 < 40e6


def test_what_was_dropped_while_it_was_read_is_not_exported(run, index, tmp_path, monkeypatch):
    load, newest = HeatmapStore._load, HeatmapStore.open(run / "store").snapshot.id

    def meanwhile(store, shard, names=None, **options):
        if shard == 3:
            SnapshotLog(store.backend).drop(store.snapshot.id)
        return load(store, shard, names, **options)

    monkeypatch.setattr(HeatmapStore, "_load", meanwhile)
    answer = bigscl("export", run, "labels", "-o", tmp_path / "x.csv")
    assert answer.code == 2
    assert f"no snapshot {newest}" in answer.err
    assert not (tmp_path / "x.csv").exists()


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


def test_scores_come_with_keys_and_ids(runs, index, tmp_path):
    scores = HeatmapStore.open(runs / "dense" / "store").read(index.ids()).scores
    assert bigscl("export", runs / "dense", "scores", "-o", tmp_path / "s.npz").code == 0
    found = np.load(tmp_path / "s.npz", allow_pickle=False)
    np.testing.assert_array_equal(found["scores"], scores)
    assert found["ids"].tolist() == index.ids().tolist()
    assert found["keys"].tolist() == [index.key(int(n)) for n in index.ids()]
    assert found["class_names"].tolist() == list(index.class_names)


def test_scores_in_parquet_are_the_same(runs, index, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    scores = HeatmapStore.open(runs / "dense" / "store").read(index.ids()).scores
    assert bigscl("export", runs / "dense", "scores", "-o", tmp_path / "s.parquet").code == 0
    table = parquet.read_table(tmp_path / "s.parquet")
    np.testing.assert_array_equal(np.array(table["scores"].to_pylist(), np.float16), scores)
    columns = (table[name].to_pylist() for name in ("shard", "key"))
    names = [f"{shard}/{key}" for shard, key in zip(*columns, strict=True)]
    assert names == [index.name(int(n)) for n in index.ids()]
    assert table["id"].to_pylist() == index.ids().tolist()
    assert json.loads(table.schema.metadata[b"class_names"]) == list(index.class_names)


def test_boxes_of_labels_are_fitted_where_the_shards_have_some(runs, tmp_path):
    """The patches of this memory are rounder and wider than the digits: half of the peak is too little."""
    found = {}
    for name, options in {
        "fitted": (),
        "half": ("--box-share", "0.5"),
        "wide": ("--box-share", "0.05"),
    }.items():
        answer = bigscl(
            "export", runs / "dense", "labels", "-o", tmp_path / f"{name}.csv", *options, "--json"
        )
        found[name] = answer.json()["region"]
    assert found["half"]["share"] == 0.5
    assert found["fitted"]["median_iou"] > found["wide"]["median_iou"] + 0.1
    assert found["fitted"]["median_iou"] >= found["half"]["median_iou"]
    assert found["fitted"]["num_labels"] > 10
    told = bigscl("export", runs / "dense", "labels", "-o", tmp_path / "x.csv").out
    assert f"median IoU {found['fitted']['median_iou']:.2f}" in told


def test_shards_without_boxes_say_that_boxes_are_not_checked(runs, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "bigscl.tools.shared.label_table.read_metadata", lambda index, ids: {int(n): {} for n in ids}
    )
    answer = bigscl("export", runs / "dense", "labels", "-o", tmp_path / "x.csv")
    assert "at least 0.5 of the peak; the shards have no boxes to check them" in answer.out


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
        (["{runs}/dense", "labels", "-o", "{out}/there.csv"], "already exists"),
        (["{runs}/dense", "scores", "-o", "{out}/x.csv"], "scores are written as .npz, .parquet, .npy"),
        (["{bare}", "scores", "-o", "{out}/x.npz"], "scores with keys: needs the images"),
        (
            ["{runs}/dense", "scores", "--box-share", "0.4", "-o", "{out}/x.npy"],
            "--box-share: has no effect on scores",
        ),
        (["{runs}/dense", "heatmaps", "-o", "{out}/x.npz"], "which samples?"),
        (["{runs}/dense", "heatmaps", "--sample", "3", "-o", "{out}/x.jpg"], "as .npz, or as PNGs"),
        (
            ["{runs}/dense", "labels", "--sample", "3", "-o", "{out}/x.csv"],
            "--sample: has no effect on labels",
        ),
        (["{bare}", "labels", "-o", "{out}/x.csv"], "labels: needs the images"),
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
        none = Thresholds.none(10).to_json()
        store.commit(epoch=0, attributes={"selection": none, "next_epoch": 1, "skipped": []})
    out = ("--shards", shards, "-o", tmp_path / "x.csv")
    answer = bigscl("export", tmp_path / "store", "labels", *out)
    assert answer.code == 2
    assert "no expected positives were selected" in answer.err
    assert (
        bigscl("export", tmp_path / "store", "labels", "--which", "all", *out, "--json").json()["rows"] == 30
    )


def test_malformed_boxes_of_samples_end_neither_export_nor_render(run, index, tmp_path):
    shutil.copytree(Path(index.urls[0]).parent, tmp_path / "data")
    for tar in sorted((tmp_path / "data").glob("train-*.tar")):
        # A number of the first box in every third json becomes a text of the same length.
        quoted = partial(re.sub, rb"0\.(\d+)", rb'"\1"', count=1)
        parts = tar.read_bytes().split(b'"boxes":[[')
        assert len(parts) > 2
        parts[1::3] = [quoted(part) for part in parts[1::3]]
        tar.write_bytes(b'"boxes":[['.join(parts))
    add_config(run, load_index(str(tmp_path / "data" / "train-*.tar")))
    answer = bigscl("export", run, "labels", "-o", tmp_path / "x.csv")
    assert answer.code == 0, answer.err
    assert "median IoU" in answer.out
    answer = bigscl("render", run, "--count", 4, "-o", tmp_path / "x.png")
    assert answer.code == 0, answer.err
