"""Labels from files beside the shards: the same from every format, and mistakes named."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from bigscl.data.build_index import scan
from bigscl.data.index import true_labels
from bigscl.data.labels.label_files import with_evaluation_labels, with_training_labels
from bigscl.store import HeatmapStore, IndexMismatch
from bigscl.training.run_folder import open_data
from tests.builders import config_of, jpeg, labelled, write_tar

REAL = Path(__file__).parents[3] / "shared" / "data" / "real.json"
NAMES = ["cat", "dog", "wild, big cat", "7"]


@pytest.fixture
def shards(tmp_path):
    """Two shards with images a, b, c and a, d: without labels, but for c, which is a dog."""
    first = [("a.jpg", jpeg(0)), ("b.jpg", jpeg(1)), *labelled("c", 2, given=[1])]
    write_tar(tmp_path / "x-0.tar", first)
    write_tar(tmp_path / "x-1.tar", [("a.jpg", jpeg(3)), ("d.jpg", jpeg(4))])
    return str(tmp_path / "x-*.tar")


@pytest.fixture
def index(shards):
    return scan(shards, class_names=NAMES, unlabelled=True)[0]


ROWS = [
    {"key": "b", "positives": ["cat", "wild, big cat"], "negatives": ["dog"]},
    {"key": "x-1.tar/a", "positives": ["7"], "negatives": []},
    {"key": "d", "positives": [], "negatives": [0, 3]},
]


def write(path, rows):
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0].keys())
            writer.writeheader()
            for row in rows:
                cells = {
                    name: ";".join(map(str, cell)) for name, cell in row.items() if isinstance(cell, list)
                }
                writer.writerow({**row, **cells})
    else:
        import pyarrow
        from pyarrow import parquet

        text = [{**row, **{name: list(map(str, row[name])) for name in row if name != "key"}} for row in rows]
        parquet.write_table(pyarrow.Table.from_pylist(text), path)
    return path


def test_images_without_labels_are_kept_only_on_request(shards):
    index, problems = scan(shards, class_names=NAMES)
    assert index.num_samples == 1
    assert "no label" in str(problems[0])
    everything, _ = scan(shards, class_names=NAMES, unlabelled=True)
    assert everything.num_samples == 5
    assert (everything.labels_of(everything.ids()) == 1).sum() == 1


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_each_format_gives_positives_negatives_and_unknowns(index, tmp_path, suffix):
    found = with_training_labels(index, write(tmp_path / f"labels{suffix}", ROWS))
    expected = [
        [-1, -1, -1, -1],  # x-0.tar/a: nobody knows
        [1, 0, 1, -1],
        [-1, 1, -1, -1],  # c keeps the label of its shard
        [-1, -1, -1, 1],
        [0, -1, -1, 0],
    ]
    assert found.labels_of(found.ids()).tolist() == expected
    assert found.full is None


def test_a_store_opens_with_the_labels_it_was_made_for_alone(index, tmp_path):
    one = with_training_labels(index, write(tmp_path / "one.jsonl", ROWS))
    same = with_training_labels(index, write(tmp_path / "same.csv", ROWS))
    other = with_training_labels(index, write(tmp_path / "other.jsonl", ROWS[1:]))
    only_negatives = [{**ROWS[0], "negatives": []}, *ROWS[1:]]
    fewer = with_training_labels(index, write(tmp_path / "fewer.jsonl", only_negatives))
    HeatmapStore.create(str(tmp_path / "store"), one.annotations(), heatmap_size=4)
    HeatmapStore.open(str(tmp_path / "store"), annotations=same.annotations())
    for wrong in (index, other, fewer):
        with pytest.raises(IndexMismatch):
            HeatmapStore.open(str(tmp_path / "store"), annotations=wrong.annotations())


def test_all_others_absent_makes_full_labels(index, tmp_path):
    rows = [
        {"key": key, "positives": [0], "negatives": "*"} for key in ("x-0.tar/a", "x-1.tar/a", "b", "c", "d")
    ]
    full = with_training_labels(index, write(tmp_path / "full.jsonl", rows))
    assert full.labels_of(full.ids(), "full").tolist() == [[1, 0, 0, 0]] * 5
    assert full.labels_of(full.ids()).tolist() == [[1, -1, -1, -1]] * 5
    assert with_training_labels(index, write(tmp_path / "most.jsonl", rows[1:])).full is None


def test_images_that_evaluation_labels_lack_count_in_no_metric(index, tmp_path):
    rows = [{"key": "b", "positives": ["cat"]}, {"key": "d", "positives": []}]
    found = with_evaluation_labels(index, write(tmp_path / "labels.csv", rows))
    labels, which = true_labels(found, found.ids())
    assert which == "full"
    unknown = [-1, -1, -1, -1]
    assert labels.tolist() == [unknown, [1, 0, 0, 0], unknown, unknown, [0, 0, 0, 0]]
    with pytest.raises(ValueError, match=r"1 images have negatives, as x-0.tar/b"):
        with_evaluation_labels(index, write(tmp_path / "partial.jsonl", ROWS[:1]))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("key,positives\na,cat\n", "key 'a' is in several shards. Write `shard/key`, as x-0.tar/a"),
        ("key,positives\nb,cat\nb,dog\n", "key 'b' occurs twice"),
        ("key,positives\nb,cat\nx-0.tar/b,dog\n", "key 'x-0.tar/b' occurs twice"),
        (
            "key,positives\nb,cat\nz,cat\ny,dog\n",
            "2 of 3 keys are not in the shards: z, y. Keys there look like",
        ),
        (
            "key,positives\nb,cow\n",
            "key 'b': positives: unknown class 'cow', expected one of 4 names, as 'cat'",
        ),
        ("key,positives\nb,4\n", "unknown class '4'.*a number of 0 to 3"),
        ("key,positives\nb,-1\n", "unknown class '-1'"),
        ("key,positives,negatives\nb,cat;dog,0\n", "class 'cat' is positive and negative"),
        ("key,positives,negatives\nb,cat,*;dog\n", r"negatives: unknown class '\*'"),
        ("key,positive\nb,cat\n", "no 'positives' in .*expected key, positives, negatives"),
        ("key,positives,negativs\nb,cat,dog\n", "an unknown 'negativs'"),
        ("key,positives\nb,wild, big cat\n", "line 2 has another number of columns than the first"),
        ("key,positives,negatives\nb,cat\n", "line 2 has another number of columns than the first"),
        ("key,positives\n", "no lines with labels"),
        ("", "no 'key'"),
    ],
)
def test_mistakes_in_a_file_are_named(index, tmp_path, content, message):
    path = tmp_path / "labels.csv"
    path.write_text(content)
    with pytest.raises(ValueError, match=message) as raised:
        with_training_labels(index, path)
    assert str(path) in str(raised.value)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"key": "b", "positives": [1.5]}', "unknown class 1.5"),
        ('{"key": "b", "positives": [true]}', "unknown class True"),
        ('{"key": "b", "positives": {"cat": 1}}', "positives is {'cat': 1}, expected class names or numbers"),
        ('["b", "cat"]', "line 1: no object"),
        ('{"key": "b"', "line 1"),
        ('{"key": "b"}', "line 1: found no 'positives'"),
    ],
)
def test_mistakes_in_json_lines_are_named(index, tmp_path, line, message):
    path = tmp_path / "labels.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(ValueError, match=message):
        with_training_labels(index, path)


def test_other_files_are_refused(index, tmp_path):
    with pytest.raises(FileNotFoundError, match="no such file of labels"):
        with_training_labels(index, tmp_path / "none.csv")
    (tmp_path / "labels.doc").write_text("b cat")
    with pytest.raises(
        ValueError, match=r"read from \.csv, \.jsonl, \.parquet, \.txt, \.tsv, \.json \(ReaL\)"
    ):
        with_training_labels(index, tmp_path / "labels.doc")


# MultiLabel-ImageNet


@pytest.fixture
def wnids(tmp_path):
    """Shards whose keys are, as usual, a file's name, or a folder and a file's name."""
    write_tar(tmp_path / "i-0.tar", [("n01440764_26.JPEG", jpeg(0)), ("n01443537_7.JPEG", jpeg(1))])
    write_tar(tmp_path / "i-1.tar", [("n01440764/n01440764_9.JPEG", jpeg(2))])
    return scan(str(tmp_path / "i-*.tar"), class_names=NAMES, unlabelled=True)[0]


LINES = [
    "n01440764/n01440764_26.JPEG\t0\t0,3\t0.2654,1.0000",
    "n01440764/n01440764_9.JPEG\t0\t2\t0.9000",
    "n01443537/n01443537_7.JPEG\t1\t\t",
]


@pytest.mark.parametrize("suffix", [".txt", ".tsv"])
def test_lines_of_multilabel_imagenet_give_all_labels_of_each_image(wnids, tmp_path, suffix):
    path = tmp_path / f"labels{suffix}"
    path.write_text("\n".join(LINES) + "\n")
    found = with_training_labels(wnids, path)
    rows = {wnids.key(int(n)): found.labels_of(np.array([n]), "full")[0].tolist() for n in wnids.ids()}
    assert rows == {
        "n01440764_26": [1, 0, 0, 1],
        "n01440764/n01440764_9": [0, 0, 1, 0],
        "n01443537_7": [0, 0, 0, 0],
    }
    # In training with given labels, what is not named stays unknown.
    assert set(found.labels_of(wnids.ids(), "given").ravel().tolist()) == {-1, 1}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("n01440764/n01440764_26.JPEG 0 0 1.0", "line 1 has 1 fields between tabs, expected 4"),
        ("n01440764/n01440764_26.JPEG\t0\t0,3\t1.0", "line 1 has 2 classes and another number of scores"),
        ("n01440764/n01440764_26.JPEG\t0\tcat\t1.0", "not labels of images .*'cat'.*Expected lines of path"),
        ("n01440764/n01440764_26.JPEG\t0\t9\t1.0", "unknown class 9"),
        ("n01440764/n01440764_1.JPEG\t0\t0\t1.0", "1 of 1 keys are not in the shards: n01440764/n01440764_1"),
        (f"{LINES[0]}\n{LINES[0]}", "occurs twice"),
    ],
)
def test_mistakes_in_lines_of_multilabel_imagenet_are_named(wnids, tmp_path, line, message):
    path = tmp_path / "labels.txt"
    path.write_text(line + "\n")
    with pytest.raises(ValueError, match=message):
        with_training_labels(wnids, path)


@pytest.mark.skipif(not REAL.exists(), reason="no real data beside the project")
def test_real_labels_train_and_evaluate(tmp_path):
    lists = json.loads(REAL.read_text())
    numbers = sorted({1, 2, 3, next(n for n, own in enumerate(lists, 1) if not own)})
    members = [(f"ILSVRC2012_val_{number:08d}.jpg", jpeg(number)) for number in numbers]
    write_tar(tmp_path / "v-0.tar", members)
    index, _ = scan(str(tmp_path / "v-0.tar"), num_classes=1000, unlabelled=True)
    trained, evaluated = with_training_labels(index, REAL), with_evaluation_labels(index, REAL)
    for row, number in enumerate(numbers):
        assert trained.given[row].tolist() == sorted(lists[number - 1])
        expected = np.zeros(1000, int) - (not lists[number - 1])
        expected[lists[number - 1]] = 1
        assert evaluated.labels_of(evaluated.ids(), "full")[row].tolist() == expected.tolist()


def config(shards, **data):
    return config_of(data={"train": shards, "val": shards, **data}, selection={"K": "auto"})


def test_a_run_takes_its_labels_from_files(index, shards, tmp_path):
    index.save(tmp_path / "bigscl-index-x.npz")
    labels = write(tmp_path / "labels.jsonl", ROWS)
    full = write(
        tmp_path / "full.csv", [{"key": "b", "positives": ["cat", "dog", "7"]}, {"key": "c", "positives": []}]
    )
    data = open_data(config(shards, labels_file=str(labels), val_labels_file=str(full)))
    assert data.annotations.given.values.tolist() == [0, 2, 1, 3]
    assert data.positives_per_image == 1.5, "over the images whose labels are known"


def test_a_run_on_images_without_any_label_is_refused(tmp_path):
    write_tar(tmp_path / "x-0.tar", [("a.jpg", jpeg(0))])
    index, _ = scan(str(tmp_path / "x-0.tar"), num_classes=3, unlabelled=True)
    index.save(tmp_path / "bigscl-index-x.npz")
    with pytest.raises(ValueError, match=r"no image has a positive label\. Give data\.labels_file"):
        open_data(config(str(tmp_path / "x-0.tar")))
