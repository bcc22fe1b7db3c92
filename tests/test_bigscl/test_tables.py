"""Tables of labelled images, and Hugging Face datasets, as shards."""

import csv
import json

import numpy as np
import pytest
from PIL import Image

from bigscl.common.files import BadFile
from bigscl.common.user_error import UserError
from bigscl.data.build_index import scan
from bigscl.datasets.table import TableOptions, hugging_face, table
from bigscl.datasets.writer import MultiLabel, write
from tests.builders import encoded, picture

NAMES = ("cat/1.jpg", "cat/2.jpg", "dog/1.jpg", "sofa/1.png")


@pytest.fixture
def images(tmp_path):
    for number, name in enumerate(NAMES):
        path = tmp_path / "photos" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded(picture(number), "PNG" if name.endswith("png") else "JPEG"))
    return tmp_path / "photos"


@pytest.fixture
def read(tmp_path, images):
    def read(rows, suffix=".csv", **options):
        path = tmp_path / f"table{suffix}"
        if suffix == ".jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        elif suffix == ".parquet":
            import pyarrow
            import pyarrow.parquet

            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        else:
            with path.open("w", newline="") as file:
                writer = csv.DictWriter(file, list(rows[0]), delimiter="\t" if suffix == ".tsv" else ",")
                writer.writeheader()
                writer.writerows(rows)
        return table(path, images, TableOptions(**options))

    return read


def labels(shards, part="train"):
    return {sample.source: sample.label for sample in shards.parts[part]}


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl", ".parquet"])
def test_one_label_per_row_becomes_a_class_number(read, suffix):
    shards = read([{"image": name, "label": name.split("/")[0]} for name in NAMES], suffix)
    assert list(shards.classes) == ["cat", "dog", "sofa"]
    assert labels(shards) == dict(zip(NAMES, [0, 0, 1, 2], strict=True))


def test_several_labels_are_joined_over_the_rows_of_an_image(read):
    shards = read(
        [
            {"path": NAMES[0], "labels": "cat; sofa"},
            {"path": NAMES[1], "labels": '["cat"]'},
            {"path": NAMES[0], "labels": "dog"},
        ]
    )
    assert labels(shards) == {
        NAMES[0]: MultiLabel(full=None, given=(0, 1, 2)),
        NAMES[1]: MultiLabel(full=None, given=(0,)),
    }


def test_numbers_are_classes_by_number(read):
    shards = read([{"file": NAMES[0], "target": 3}, {"file": NAMES[1], "target": 0}], ".jsonl")
    assert list(shards.classes) == ["0", "1", "2", "3"]
    assert labels(shards) == {NAMES[0]: 3, NAMES[1]: 0}
    named = read([{"file": NAMES[0], "target": "1"}], class_names=("a", "b"))
    assert (list(named.classes), labels(named)) == (["a", "b"], {NAMES[0]: 1})


def test_splits_are_parts_and_full_ones_say_so(read):
    rows = [
        {"image": NAMES[0], "label": "cat", "split": "train"},
        {"image": NAMES[2], "label": "cat;dog", "split": "validation"},
    ]
    shards = read(rows, full=("val",))
    assert list(shards.parts) == ["train", "val"]
    assert labels(shards) == {NAMES[0]: 0}
    assert labels(shards, "val") == {NAMES[2]: MultiLabel(full=(0, 1), given=(0, 1))}
    with pytest.raises(UserError, match="no split 'test', found train, val"):
        read(rows, full=("test",))


def test_boxes_are_columns_or_lists(read):
    rows = [{"image": NAMES[0], "label": "cat", "x0": 0.1, "y0": 0.2, "x1": 0.5, "y1": 1}]
    assert labels(read(rows))[NAMES[0]].boxes == ((0, 0.1, 0.2, 0.5, 1.0),)
    lists = [{"image": NAMES[0], "label": ["cat", "dog"], "boxes": [["dog", 0, 0, 0.5, 1]]}]
    assert labels(read(lists, ".jsonl"))[NAMES[0]].boxes == ((1, 0.0, 0.0, 0.5, 1.0),)


@pytest.mark.parametrize(
    ("row", "options", "reason"),
    [
        ({"picture": "a.jpg", "label": "cat"}, {}, "none of images: name it with --image-column"),
        ({"image": "a.jpg", "kind": "cat"}, {}, "none of labels: name it with --label-column"),
        ({"image": "a.jpg", "label": "cat"}, {"label": "kind"}, "--label-column kind: no such column"),
        ({"image": "", "label": "cat"}, {}, "row 1: .* expected a path or a URL"),
        ({"image": "a.jpg", "label": "cat"}, {}, "1 images are not there: .*a.jpg.* --images"),
        ({"image": NAMES[0], "label": ""}, {}, "no labels in any row"),
        ({"image": NAMES[0], "label": "cow"}, {"class_names": ("cat",)}, "cat/1.jpg: unknown class 'cow'"),
        ({"image": NAMES[0], "label": "cat", "split": "../x"}, {}, "split '../x', expected a word"),
        ({"image": NAMES[0], "label": "cat", "x0": 9, "y0": 0, "x1": 30, "y1": 30}, {}, "as fractions"),
        ({"image": NAMES[0], "label": "[1.5]"}, {}, "label 1.5, expected a name or a number"),
    ],
)
def test_what_does_not_fit_is_named(read, row, options, reason):
    with pytest.raises(UserError, match=reason):
        read([row], **options)


def test_other_files_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"read from .csv, .tsv, .jsonl, .parquet"):
        table(tmp_path / "x.xlsx", None, TableOptions())
    with pytest.raises(FileNotFoundError, match=r"x.csv: not there"):
        table(tmp_path / "x.csv", None, TableOptions())
    (tmp_path / "y.csv").write_text("image,label\n")
    with pytest.raises(BadFile, match="no rows"):
        table(tmp_path / "y.csv", None, TableOptions())


def test_shards_of_a_table_are_indexed_with_the_paths_of_the_images(read, tmp_path):
    shards = read([{"image": name, "label": name.split("/")[0]} for name in NAMES])
    list(write(shards, tmp_path / "out"))
    index, problems = scan(str(tmp_path / "out" / "train-*.tar"), class_names=shards.classes)
    assert not problems
    found = {index.source(sample): index.class_names[index.given[sample][0]] for sample in index.ids()}
    assert found == {name: name.split("/")[0] for name in NAMES}


# Hugging Face

datasets = pytest.importorskip("datasets")


def rows_of(**columns):
    return datasets.Dataset.from_dict(columns)


def test_a_saved_dataset_keeps_its_splits_names_and_bytes(images, tmp_path):
    files = [str(images / name) for name in NAMES]
    features = datasets.Features(
        {"picture": datasets.Image(), "kind": datasets.ClassLabel(names=["cat", "dog", "sofa"])}
    )
    made = datasets.DatasetDict(
        {
            "train": datasets.Dataset.from_dict({"picture": files[:3], "kind": [0, 0, 1]}, features),
            "validation": datasets.Dataset.from_dict({"picture": files[3:], "kind": [2]}, features),
        }
    )
    made.save_to_disk(tmp_path / "saved")
    shards = hugging_face(str(tmp_path / "saved"), TableOptions())
    assert list(shards.classes) == ["cat", "dog", "sofa"]
    assert list(shards.parts) == ["train", "val"]
    (sofa,) = shards.parts["val"]
    assert (sofa.label, sofa.image.encoded()) == (2, ("png", (images / NAMES[3]).read_bytes()))
    list(write(shards, tmp_path / "out", workers=2))
    index, _ = scan(str(tmp_path / "out" / "train-*.tar"), class_names=shards.classes)
    assert sorted(index.given.values.tolist()) == [0, 0, 1]


def test_an_image_folder_has_paths_that_start_there(images):
    (images / "sofa" / "1.png").rename(images / "sofa" / "7.png")
    shards = hugging_face(str(images), TableOptions())
    assert sorted(labels(shards).items()) == [
        ("cat/1.jpg", 0),
        ("cat/2.jpg", 0),
        ("dog/1.jpg", 1),
        ("sofa/7.png", 2),
    ]


def test_rows_of_several_labels_and_images_in_memory(tmp_path):
    pixels = [Image.fromarray(np.full((8, 8, 3), value, np.uint8)) for value in (0, 99)]
    classes = datasets.Sequence(datasets.ClassLabel(names=["a", "b", "c"]))
    made = datasets.Dataset.from_dict(
        {"image": pixels, "labels": [[0, 2], [1]]},
        datasets.Features({"image": datasets.Image(), "labels": classes}),
    )
    made.shuffle(seed=0).save_to_disk(tmp_path / "saved")
    shards = hugging_face(str(tmp_path / "saved"), TableOptions(full=("train",)))
    assert sorted(sample.label.full for sample in shards.parts["train"]) == [(0, 2), (1,)]
    assert all(sample.image.encoded()[0] == "png" for sample in shards.parts["train"])


def test_a_dataset_without_labels_is_refused(tmp_path):
    rows_of(text=["a"]).save_to_disk(tmp_path / "saved")
    with pytest.raises(UserError, match="none of images"):
        hugging_face(str(tmp_path / "saved"), TableOptions())
