"""Real annotation files of COCO, and real photographs in folders as in ImageNet's downloads."""

import json
import shutil
from collections import defaultdict

import numpy as np
import pytest

from bigscl.data.index import load_index
from bigscl.data.read_samples import read_images, read_metadata
from tests.builders import DATA
from tests.test_tools.conftest import bigscl

COCO = DATA / "coco_tiny"
WNIDS = ("n01440764", "n01443537", "n02099601")
# ILSVRC2012_ID of these classes: not in the order of the names.
NUMBERS = {"n01440764": 3, "n01443537": 1, "n02099601": 2}
pytestmark = pytest.mark.skipif(not COCO.exists(), reason="the real data is not there")


def indexed(out, part):
    assert bigscl("index", f"{out}/{part}-*.tar").code == 0
    return load_index(f"{out}/{part}-*.tar")


# COCO


@pytest.fixture(scope="module")
def coco(tmp_path_factory):
    """Shards of the real files, under the names of COCO 2017."""
    source, out = tmp_path_factory.mktemp("coco"), tmp_path_factory.mktemp("shards")
    (source / "annotations").mkdir()
    for part in ("train2017", "val2017"):
        shutil.copy(COCO / f"instances_{part}.json", source / "annotations")
        (source / part).symlink_to(COCO / "images" / part)
    answer = bigscl("shards", "coco", source, out, "--year", 2017, "--samples-per-shard", 10)
    assert answer.code == 0, answer.err
    return {part: indexed(out, part) for part in ("train", "val", "test")}


def annotated(part):
    """Names of the classes, and (class, box) by key, read from the annotations by hand."""
    content = json.loads((COCO / f"instances_{part}.json").read_text())
    names = {category["id"]: category["name"] for category in content["categories"]}
    images = {image["id"]: image for image in content["images"]}
    found = defaultdict(list)
    for item in content["annotations"]:
        image = images[item["image_id"]]
        x, y, width, height = item["bbox"]
        box = (x / image["width"], y / image["height"])
        box += ((x + width) / image["width"], (y + height) / image["height"])
        found[image["file_name"].removesuffix(".jpg")].append((names[item["category_id"]], box))
    return list(names.values()), found


def test_coco_labels_and_boxes_are_those_of_the_annotations(coco):
    names, boxes = annotated("train2017")
    names_of_val, boxes_of_val = annotated("val2017")
    assert names == names_of_val
    seen = set()
    for part, index in coco.items():
        assert list(index.class_names) == names
        known, metadata = boxes_of_val if part == "test" else boxes, read_metadata(index, index.ids())
        for sample in index.ids().tolist():
            key = index.key(sample)
            seen.add(key)
            labels = {names[n] for n in np.flatnonzero(index.labels_of(np.array([sample]), "full")[0] == 1)}
            assert labels == {name for name, _ in known[key]}
            found = sorted((names[int(number)], *box) for number, *box in metadata[sample]["boxes"])
            wanted = sorted((name, *np.clip(box, 0, 1)) for name, box in known[key])
            assert [name for name, *_ in found] == [name for name, *_ in wanted]
            np.testing.assert_allclose([box for _, *box in found], [box for _, *box in wanted], atol=1e-4)
    assert seen == boxes.keys() | boxes_of_val.keys()
    assert len(seen) == 36


def test_coco_training_sees_one_of_the_labels_and_all_images_decode(coco):
    index = coco["train"]
    ids = index.ids()
    given, full = index.labels_of(ids) == 1, index.labels_of(ids, "full") == 1
    assert (given.sum(1) == 1).all()
    assert not (given & ~full).any()
    assert full.sum() > 3 * given.sum()
    assert all(image.shape[0] == 3 for image in read_images(index, ids).values())


# ImageNet


@pytest.fixture(scope="module")
def imagenet(tmp_path_factory):
    """train/<wnid>/<wnid>_<n>.JPEG, flat val/ and test/, as in the official download; the truth of val."""
    root = tmp_path_factory.mktemp("ilsvrc")
    photographs = sorted((COCO / "images").rglob("*.jpg"))
    for number, photograph in enumerate(photographs[:9]):
        wnid = WNIDS[number % 3]
        (root / "train" / wnid).mkdir(parents=True, exist_ok=True)
        shutil.copy(photograph, root / "train" / wnid / f"{wnid}_{10026 + number}.JPEG")
    for split, count in (("val", 6), ("test", 3)):
        (root / split).mkdir()
        for number, photograph in enumerate(photographs[:count], 1):
            shutil.copy(photograph, root / split / f"ILSVRC2012_{split}_{number:08d}.JPEG")
    truth = [WNIDS[(number + 1) % 3] for number in range(6)]
    (root / "truth.txt").write_text("".join(f"{NUMBERS[wnid]}\n" for wnid in truth))
    (root / "synsets.txt").write_text("".join(f"{wnid}\n" for wnid in sorted(NUMBERS, key=NUMBERS.get)))
    rows = [f"ILSVRC2012_val_{n:08d},{wnid} 1 2 30 40 " for n, wnid in enumerate(truth, 1)]
    # Kaggle's table is in no order.
    (root / "LOC_val_solution.csv").write_text(
        "\n".join(["ImageId,PredictionString", *reversed(rows)]) + "\n"
    )
    return root, truth


@pytest.mark.parametrize("kind", ["devkit", "kaggle"])
def test_imagenets_folders_become_shards_with_the_right_labels(imagenet, tmp_path, kind):
    root, truth = imagenet
    files = {
        "devkit": ("--ground-truth", root / "truth.txt", "--synsets", root / "synsets.txt"),
        "kaggle": ("--ground-truth", root / "LOC_val_solution.csv"),
    }[kind]
    splits = ("--split", "train", "--split", "val")
    answer = bigscl("shards", "folder", root, tmp_path, *splits, *files, "--samples-per-shard", 4)
    assert answer.code == 0, answer.err
    train, val = indexed(tmp_path, "train"), indexed(tmp_path, "val")
    assert train.class_names == val.class_names == WNIDS
    assert [val.key(int(n)) for n in val.ids()] == [f"ILSVRC2012_val_{n:08d}" for n in range(1, 7)]
    assert [WNIDS[n] for n in val.labels_of(val.ids()).argmax(1)] == truth
    for sample, number in zip(train.ids().tolist(), train.labels_of(train.ids()).argmax(1), strict=True):
        assert train.key(sample).startswith(WNIDS[number])
    assert train.num_samples == 9


def test_imagenets_test_images_without_labels_are_named_with_the_way_out(imagenet, tmp_path):
    root, _ = imagenet
    answer = bigscl(
        "shards", "folder", root, tmp_path / "out", "--ground-truth", root / "LOC_val_solution.csv"
    )
    assert answer.code == 2
    assert f"3 images of {root / 'test'} have no line" in answer.err
    assert "--split train --split val" in answer.err
