"""`bigscl export labels --format ...`: every format holds the labels, scores and boxes of the table."""

import csv
import io
import json
import shutil
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pytest
import yaml
from PIL import Image

from bigscl.data.build_index import scan
from bigscl.data.index import load_index
from bigscl.data.labels.label_files import with_training_labels
from bigscl.data.read_samples import read_image_heads, read_images
from bigscl.store import GroupSpec, HeatmapStore
from tests.builders import jpeg, make_store, write_config, write_tar
from tests.test_tools.conftest import bigscl

SIDES = ("x0", "y0", "x1", "y1")


def table(run, tmp_path, which):
    """The labels of the plain table by id: (class, score, annotated, box)."""
    answer = bigscl("export", run, "labels", "--which", which, "-o", tmp_path / "table.jsonl")
    assert answer.code == 0, answer.err
    found = {}
    for line in (tmp_path / "table.jsonl").read_text().splitlines():
        row = json.loads(line)
        box = None if row["x0"] is None else tuple(row[side] for side in SIDES)
        found.setdefault(row["id"], []).append((row["class"], row["score"], row["annotated"], box))
    return found


def export(run, tmp_path, form, which, *options):
    output = tmp_path / ("out.json" if form == "coco" else "out")
    answer = bigscl("export", run, "labels", "--format", form, "--which", which, "-o", output, *options)
    assert answer.code == 0, answer.err
    return output


def to_fractions(corner_and_size, width, height):
    x, y, w, h = corner_and_size
    return tuple(round(value, 4) for value in (x / width, y / height, (x + w) / width, (y + h) / height))


@pytest.mark.parametrize(("run", "which"), [("dense", "mined"), ("topk", "all")])
def test_coco_holds_what_the_table_holds(runs, index, tmp_path, run, which):
    from pycocotools.coco import COCO

    wanted = table(runs / run, tmp_path, which)
    coco = COCO(str(export(runs / run, tmp_path, "coco", which, "--image-prefix", "scenes/")))
    images = coco.loadImgs(coco.getImgIds())
    assert {one["id"] for one in images} == (set(index.ids().tolist()) if which == "all" else set(wanted))
    sizes = {name: image.shape for name, image in read_images(index, index.ids()).items()}
    for image in images:
        assert sizes[image["id"]] == (3, image["height"], image["width"])
        assert image["file_name"] == f"scenes/{index.name(image['id']).replace('.tar', '')}.png"
        labels = [(one["category_id"] - 1, one["score"], one["annotated"]) for one in image["labels"]]
        assert labels == [label[:3] for label in wanted.get(image["id"], ())]
        boxes = {
            one["category_id"] - 1: to_fractions(one["bbox"], image["width"], image["height"])
            for one in coco.loadAnns(coco.getAnnIds(imgIds=[image["id"]]))
        }
        assert boxes == {label[0]: label[3] for label in wanted.get(image["id"], ()) if label[3] is not None}


def test_lines_of_multilabel_imagenet_hold_what_the_table_holds_and_train_again(runs, index, tmp_path):
    wanted = table(runs / "dense", tmp_path, "all")
    output = tmp_path / "labels.txt"
    words = ("export", runs / "dense", "labels", "--format", "multilabel-imagenet", "-o", output)
    refused = bigscl(*words)
    assert refused.code == 2
    assert "--which all" in refused.err
    answer = bigscl(*words, "--which", "all")
    assert answer.code == 0, answer.err
    lines = [line.split("\t") for line in output.read_text().splitlines()]
    assert len(lines) == index.num_samples
    for sample, (file, given, classes, scores) in zip(index.ids().tolist(), lines, strict=True):
        labels = wanted[sample]
        (own,) = [number for number, _, annotated, _ in labels if annotated]
        assert (int(given), file) == (own, f"{index.class_names[own]}/{index.key(sample)}.png")
        assert classes == ",".join(str(number) for number, *_ in labels)
        assert scores == ",".join(f"{score:.4f}" for _, score, *_ in labels)
    again = with_training_labels(index, output)
    for sample in index.ids().tolist():
        assert again.given[sample].tolist() == [number for number, *_ in wanted[sample]]


def test_a_relabelled_dataset_trains_with_its_labels(runs, index, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    wanted = table(runs / "topk", tmp_path, "all")
    folder = export(runs / "topk", tmp_path, "dataset", "all")
    relabelled = with_training_labels(index, folder / "labels.parquet")
    positives = relabelled.labels_of(index.ids()) == 1
    assert {
        sample: np.flatnonzero(row).tolist() for sample, row in zip(index.ids(), positives, strict=True)
    } == {sample: [label[0] for label in wanted[sample]] for sample in index.ids().tolist()}
    rows = parquet.read_table(folder / "boxes.parquet").to_pylist()
    lines = [json.loads(line) for line in (tmp_path / "table.jsonl").read_text().splitlines()]
    assert rows == lines


def test_the_card_says_how_a_dataset_was_made(run, index, tmp_path):
    data = {"train": index.urls[0].replace("000000", "*"), "train_index": None}
    write_config(run / "config.yaml", tmp_path, data=data)
    wanted = table(run, tmp_path, "all")
    card = (export(run, tmp_path, "dataset", "all") / "README.md").read_text()
    front = yaml.safe_load(card.split("---")[1])
    assert [one["data_files"] for one in front["configs"]] == ["labels.parquet", "boxes.parquet"]
    store = HeatmapStore.open(run / "store")
    present = index.labels_of(index.ids(), "full") == 1
    mined = [(sample, label[0]) for sample, labels in wanted.items() for label in labels if not label[2]]
    places = {sample: place for place, sample in enumerate(index.ids().tolist())}
    right = sum(present[places[sample], number] for sample, number in mined)
    assert (
        f"Precision of the found labels: {100 * right / len(mined):.1f}%, {right} of the {len(mined)}" in card
    )
    assert f"run `run`: snapshot {store.snapshot.id}, epoch {store.snapshot.epoch + 1}" in card
    assert "median IoU" in card
    assert "Trained with objective" in card
    assert "K 2.5" in card
    assert "weight_decay: 0.0001" in card
    assert str(tmp_path) not in card
    assert str(index.urls[0]).rpartition("/")[0] not in card


@pytest.fixture
def hostile(tmp_path):
    """A run of images with hostile names, one turned, one broken, and negatives that rank high."""
    folder = tmp_path / "data"
    folder.mkdir()
    names = ['a "q" b', "dir/ä#1", "x&y<z>", "turned", "broken"]
    files = []
    for place, name in enumerate(names):
        picture = Image.new("RGB", (40 + place, 20))
        exif = Image.Exif()
        exif[274] = 6 if name == "turned" else 1
        buffer = io.BytesIO()
        picture.save(buffer, "JPEG", exif=exif)
        content = b"not an image" if name == "broken" else buffer.getvalue()
        labels = {"labels": [0, 1], "given": [0], "negatives": [2]}
        files += [(f"{name}.JPG", content), (f"{name}.json", json.dumps(labels).encode())]
    write_tar(folder / "train-000000.tar", files)
    classes = ["<b>|*one*", 'two "2"', "\x1b[31mred"]
    index, _ = scan([str(folder / "train-000000.tar")], class_names=classes)
    index.save(folder / "bigscl-index-train.npz")
    run = tmp_path / "run"
    annotations = index.annotations()
    HeatmapStore.create(run / "store", annotations, heatmap_size=2, group=GroupSpec(layout="dense"))
    with HeatmapStore.open(run / "store", annotations=annotations, mode="w") as store:
        rows = store.load_shard(0)
        rows.scores[:] = [0.9, 0.8, 0.95]
        rows.heatmaps[:, :, 0, 1] = 1
        store.save_shard(0, rows)
        cuts = {"score": [0.1] * 3, "tie_id": [10] * 3, "num_expected": [1] * 3}
        store.commit(epoch=0, attributes={"selection": cuts, "next_epoch": 1, "skipped": []})
    (run / "config.yaml").write_text(f"data:\n  train: {folder}/train-*.tar\n")
    return run, load_index(str(folder / "train-*.tar"))


def test_what_is_known_to_be_absent_is_never_found(hostile, tmp_path):
    run, index = hostile
    found = table(run, tmp_path, "all")
    assert {tuple(label[0] for label in labels) for labels in found.values()} == {(0, 1)}
    assert len(found) == index.num_samples


def test_hostile_names_turned_and_broken_images(hostile, tmp_path):
    run, index = hostile
    heads = read_image_heads(index, index.ids())
    images = json.loads(export(run, tmp_path, "coco", "all").read_text())["images"]
    sizes = {image["key"]: (image["width"], image["height"]) for image in images}
    assert sizes == {'a "q" b': (40, 20), "dir/ä#1": (41, 20), "x&y<z>": (42, 20), "turned": (20, 43)}
    for image in images:
        assert image["file_name"] == f"train-000000/{image['key']}.JPG"
        assert heads[image["id"]].name == f"{image['key']}.JPG"


def test_a_card_shows_hostile_names_as_text(hostile, tmp_path):
    run, index = hostile
    folder = export(run, tmp_path, "dataset", "all")
    card = (folder / "README.md").read_text()
    assert "\x1b" not in card
    # The front matter is data, which nobody shows as Markdown.
    _, front, shown = card.split("---\n", 2)
    (columns,) = [info["features"] for info in yaml.safe_load(front)["dataset_info"]]
    names = columns[2]["sequence"]["class_label"]["names"]
    assert [names[str(number)] for number in range(3)] == list(index.class_names)
    assert "<b>" not in shown
    assert "\\*one\\*" in card
    relabelled = with_training_labels(index, folder / "labels.parquet")
    assert relabelled.labels_of(index.ids()).tolist() == [[1, 1, 0]] * index.num_samples


def test_images_that_cannot_be_read_are_named(hostile, tmp_path, caplog):
    run, _ = hostile
    export(run, tmp_path, "coco", "all")
    assert "left out 1 images that cannot be read: train-000000.tar/broken" in caplog.text


def test_the_head_of_an_image_is_enough_unless_a_profile_comes_first(tmp_path):
    noise = np.random.default_rng(0).integers(0, 255, (300, 400, 3), np.uint8)
    files = []
    for name, options in {"plain": {}, "profile": {"icc_profile": bytes(100_000)}}.items():
        for extension in ("jpg", "png", "webp"):
            buffer = io.BytesIO()
            kind = "JPEG" if extension == "jpg" else extension.upper()
            Image.fromarray(noise).save(buffer, kind, **options)
            files += [
                (f"{name}_{extension}.{extension}", buffer.getvalue()),
                (f"{name}_{extension}.cls", b"0"),
            ]
    write_tar(tmp_path / "x.tar", files)
    index, problems = scan([str(tmp_path / "x.tar")], num_classes=1)
    assert not problems
    heads = read_image_heads(index, index.ids())
    assert {(one.width, one.height) for one in heads.values()} == {(400, 300)}
    assert len(heads) == 6


@pytest.mark.parametrize("form", ["coco", "label-studio", "fiftyone", "dataset"])
def test_an_interrupted_export_can_be_started_again(run, tmp_path, monkeypatch, form):
    load = HeatmapStore._load

    def interrupted(store, shard, names=None, **options):
        if shard == 2:
            raise OSError(28, "No space left on device")
        return load(store, shard, names, **options)

    output = tmp_path / ("out.json" if form == "coco" else "out")
    words = ("export", run, "labels", "--format", form, "--box-share", 0.5, "-o", output)
    with monkeypatch.context() as patched:
        patched.setattr(HeatmapStore, "_load", interrupted)
        assert bigscl(*words).code == 2
    assert not output.is_file()
    assert not output.is_dir() or not any(output.iterdir())
    assert bigscl(*words).code == 0
    again = bigscl(*words)
    assert again.code == 2
    assert "already exists" in again.err


def test_overwriting_a_folder_keeps_what_is_not_ours(run, tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "mine.txt").write_text("mine")
    words = ("export", run, "labels", "--format", "fiftyone", "-o", folder)
    assert bigscl(*words).code == 2
    assert bigscl(*words, "--overwrite").code == 0
    assert {file.name for file in folder.iterdir()} == {"mine.txt", "labels.json", "boxes.json"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["scores", "--format", "coco", "-o", "x.json"], "--format: has no effect on scores"),
        (["labels", "--image-prefix", "a/", "-o", "x.csv"], "--image-prefix: has no effect on format table"),
        (
            ["labels", "--format", "fiftyone", "--image-prefix", "a/", "-o", "x"],
            "no effect on format fiftyone",
        ),
        (["labels", "--format", "coco", "-o", "x.csv"], "COCO annotations are written as .json"),
        (["labels", "--format", "dataset", "-o", "x.parquet"], "a folder with labels.parquet"),
        (["labels", "--format", "label-studio", "-o", "x.json"], "a folder with tasks.json and config.xml"),
    ],
)
def test_mistakes_are_one_line(runs, tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(runs / "dense", tmp_path / "run")
    answer = bigscl("export", "run", *words)
    assert answer.code == 2
    assert message in answer.err
    assert [file.name for file in tmp_path.iterdir()] == ["run"]


# The way back to the files that the shards were made from


@pytest.fixture(scope="module")
def photographs(tmp_path_factory):
    """A folder of images with a table, its shards, and a run on them."""
    folder = tmp_path_factory.mktemp("photographs")
    rows = []
    for number in range(6):
        path = folder / "photos" / ("cat", "dog")[number % 2] / f"a b {number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(jpeg(number))
        boxes = [["cat", 0.0, 0.0, 0.5, 0.5], ["dog", 0.5, 0.5, 1.0, 1.0]]
        name = str(path.relative_to(folder / "photos"))
        rows.append({"image": name, "labels": ["cat", "dog"], "boxes": boxes})
    (folder / "table.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ("shards", "table", folder / "table.jsonl", folder / "shards", "--images", folder / "photos")
    assert bigscl(*words, "--full", "train").code == 0
    pattern = str(folder / "shards" / "train-*.tar")
    assert bigscl("index", pattern).code == 0
    index = load_index(pattern)
    labels = "".join(
        json.dumps({"key": index.key(n), "positives": [n % 2]}) + "\n" for n in index.ids().tolist()
    )
    (folder / "labels.jsonl").write_text(labels)
    labelled = replace(with_training_labels(index, folder / "labels.jsonl"), full=index.full)
    make_store(folder / "run" / "store", labelled, epochs=2, history_samples=0)
    (folder / "run" / "config.yaml").write_text(
        f"data:\n  train: {pattern}\n  labels_file: {folder / 'labels.jsonl'}\n"
    )
    return folder


def test_exports_name_the_original_files(photographs, tmp_path):
    files = {str(path.relative_to(photographs / "photos")) for path in photographs.rglob("*.jpg")}
    run, prefix = photographs / "run", f"{photographs / 'photos'}/"
    coco = json.loads(export(run, tmp_path, "coco", "all", "--image-prefix", prefix).read_text())
    assert {image["file_name"] for image in coco["images"]} == {prefix + name for name in files}
    tasks = json.loads((export(run, tmp_path, "label-studio", "all") / "tasks.json").read_text())
    assert {unquote(task["data"]["image"]) for task in tasks} == files
    output = tmp_path / "table.csv"
    assert bigscl("export", run, "labels", "--which", "all", "-o", output).code == 0
    with output.open(newline="") as file:
        assert {row["path"] for row in csv.DictReader(file)} == files


@pytest.mark.filterwarnings("ignore:unclosed file")  # timm opens images, and PIL closes them when it likes
def test_timm_trains_on_an_exported_dataset(photographs, tmp_path):
    """By the call that its training script makes with --dataset, --input-key and --target-key."""
    pytest.importorskip("datasets")
    timm_data = pytest.importorskip("timm.data")
    folder, prefix = tmp_path / "found", f"{photographs / 'photos'}/"
    words = ("--which", "all", "--format", "dataset", "--image-prefix", prefix, "-o", folder)
    assert bigscl("export", photographs / "run", "labels", *words).code == 0
    read = timm_data.create_dataset(
        f"hfds/{folder}",
        root=str(tmp_path / "cache"),
        split="train",
        input_key="path",
        target_key="positives",
    )
    with (folder / "labels.parquet").open("rb") as file:
        rows = pytest.importorskip("pyarrow.parquet").read_table(file).to_pylist()
    assert read.reader.class_to_idx == {"cat": 0, "dog": 1}
    assert [read[number][1] for number in range(len(read))] == [row["positives"] for row in rows]
    for number, row in enumerate(rows):
        with Image.open(row["path"]) as image:
            assert np.array_equal(np.asarray(read[number][0]), np.asarray(image.convert("RGB")))


def test_label_studio_accepts_every_task(photographs, tmp_path):
    """By the validator of its SDK (pip install label-studio-sdk)."""
    interface_of = pytest.importorskip("label_studio_sdk.label_interface").LabelInterface
    prefix = "/data/local-files/?d=photos/"
    folder = export(photographs / "run", tmp_path, "label-studio", "all", "--image-prefix", prefix)
    interface = interface_of((folder / "config.xml").read_text())
    interface.validate()
    for task in json.loads((folder / "tasks.json").read_text()):
        assert interface.validate_task({"data": task["data"]})
        assert all(map(interface.validate_prediction, task["predictions"]))
        path = unquote(task["data"]["image"].removeprefix(prefix))
        assert (photographs / "photos" / path).is_file()


@pytest.mark.parametrize(
    ("name", "kind", "part"),
    [
        ("labels", "FiftyOneImageClassificationDatasetImporter", "classifications"),
        ("boxes", "FiftyOneImageDetectionDatasetImporter", "detections"),
    ],
)
def test_fiftyone_imports_labels_of_the_original_files(photographs, tmp_path, monkeypatch, name, kind, part):
    """By its own importers (pip install fiftyone), without its database."""
    monkeypatch.setenv("FIFTYONE_DISABLE_SERVICES", "1")
    monkeypatch.setenv("FIFTYONE_DO_NOT_TRACK", "true")
    importers = pytest.importorskip("fiftyone.utils.data.importers")
    file = export(photographs / "run", tmp_path, "fiftyone", "all") / f"{name}.json"
    stored = json.loads(file.read_text())
    found = {}
    with getattr(importers, kind)(data_path=str(photographs / "photos"), labels_path=str(file)) as samples:
        for path, _, labels in samples:
            assert Path(path).is_file()
            key = str(Path(path).relative_to(photographs / "photos").with_suffix(""))
            found[key] = [each.label for each in getattr(labels, part)]
    assert found == {
        key: [stored["classes"][target["label"]] for target in targets]
        for key, targets in stored["labels"].items()
    }
