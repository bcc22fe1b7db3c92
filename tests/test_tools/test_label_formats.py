"""Labels in the formats of other tools, read back by readers of their own."""

import contextlib
import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from bigscl.tools.shared.label_formats import FILES, Label, LabelledImage, label_writer

HOSTILE = [
    "cat",
    "a \"b\" <c> & 'd'",
    "line\nbreak\ttab",
    "bell\x07",
    "größe 猫",
    "\ud800 alone",
    "</View>",
    "{}[],",
    "null",
]
KEYS = ["a/0001", "ä b#c?d&e=f%20", 'quo"te', "new\nline", "../up", "semi;colon"]


def images():
    """Images with no, one and several labels, with and without boxes, of hostile names."""
    boxes = [None, (0.0, 0.0, 1.0, 1.0), (0.1429, 0.2857, 0.5714, 0.3333)]
    for place, key in enumerate(KEYS):
        labels = [
            Label(
                number=(place + step) % len(HOSTILE),
                score=round(0.9 - 0.1 * step - 0.01 * place, 4),
                box=boxes[(place + step) % 3],
                facts={"annotated": step == 0},
            )
            for step in range(place)
        ]
        name = f"train-000/{key}.jpg"
        facts = {"shard": "train-000.tar", "key": key}
        yield LabelledImage(id=7 * place, file=name, width=333, height=500, labels=labels, facts=facts)


def write(form, output, **options):
    with label_writer(form, output, HOSTILE, made_by="bigscl, run x", **options) as one:
        for image in images():
            one(image)


def fractions(box, width, height):
    """x0, y0, x1, y1 of a corner and a size."""
    x, y, w, h = box
    return tuple(round(value, 4) for value in (x / width, y / height, (x + w) / width, (y + h) / height))


def wanted_labels():
    return {image.id: [(one.number, one.score) for one in image.labels] for image in images()}


def wanted_boxes():
    return {
        image.id: [(one.number, one.score, one.box) for one in image.labels if one.box is not None]
        for image in images()
    }


def test_pycocotools_reads_coco(tmp_path):
    from pycocotools.coco import COCO

    write("coco", tmp_path / "x.json", images="data/")
    coco = COCO(str(tmp_path / "x.json"))
    assert [category["name"] for category in coco.loadCats(coco.getCatIds())] == HOSTILE
    found = coco.loadImgs(coco.getImgIds())
    assert [(one["id"], one["file_name"]) for one in found] == [
        (image.id, f"data/{image.file}") for image in images()
    ]
    labels = {
        one["id"]: [(label["category_id"] - 1, label["score"]) for label in one["labels"]] for one in found
    }
    assert labels == wanted_labels()
    boxes = {
        one["id"]: [
            (each["category_id"] - 1, each["score"], fractions(each["bbox"], one["width"], one["height"]))
            for each in coco.loadAnns(coco.getAnnIds(imgIds=[one["id"]]))
        ]
        for one in found
    }
    assert boxes == wanted_boxes()
    assert all(each["id"] > 0 and each["area"] > 0 for each in coco.dataset["annotations"])


def test_coco_annotations_are_results_of_a_detector_too(tmp_path):
    """Evaluated against themselves, all boxes are found."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    write("coco", tmp_path / "x.json")
    truth = COCO(str(tmp_path / "x.json"))
    evaluation = COCOeval(truth, truth.loadRes([dict(one) for one in truth.dataset["annotations"]]), "bbox")
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    assert evaluation.stats[0] == 1


def test_label_studio_tasks_refer_to_their_interface(tmp_path):
    write("label-studio", tmp_path / "out", images="/data/local-files/?d=")
    view = ElementTree.parse(tmp_path / "out" / "config.xml").getroot()
    (image,), (choices,), (rectangles,) = (
        view.findall(tag) for tag in ("Image", "Choices", "RectangleLabels")
    )
    names = [choice.get("value") for choice in choices]
    assert names == [label.get("value") for label in rectangles]
    assert names[:2] == HOSTILE[:2]
    assert len(set(names)) == len(HOSTILE)
    tasks = json.loads((tmp_path / "out" / "tasks.json").read_text())
    assert len(tasks) == len(KEYS)
    for task, made in zip(tasks, images(), strict=True):
        data = task["data"]
        assert (data["id"], data["key"]) == (made.id, made.facts["key"])
        address = urlsplit(data[image.get("value").removeprefix("$")])
        assert not address.fragment
        assert unquote(address.query.removeprefix("d=")) == made.file
        assert [(names.index(one["name"]), one["score"]) for one in data["labels"]] == wanted_labels()[
            made.id
        ]
        results = [result for one in task["predictions"] for result in one["result"]]
        assert len({result["id"] for result in results}) == len(results)
        assert {result["to_name"] for result in results} <= {image.get("name")}
        chosen = [
            name
            for one in results
            if one["from_name"] == choices.get("name")
            for name in one["value"]["choices"]
        ]
        assert [names.index(name) for name in chosen] == [number for number, _ in wanted_labels()[made.id]]
        boxes = [
            (
                names.index(one["value"]["rectanglelabels"][0]),
                one["score"],
                fractions([one["value"][side] for side in ("x", "y", "width", "height")], 100, 100),
            )
            for one in results
            if one["from_name"] == rectangles.get("name")
        ]
        assert boxes == wanted_boxes()[made.id]


@pytest.mark.parametrize("prefix", ["s3://bucket/", "gs://bucket/x/"])
def test_names_in_a_bucket_are_not_escaped(tmp_path, prefix):
    write("label-studio", tmp_path / "out", images=prefix)
    tasks = json.loads((tmp_path / "out" / "tasks.json").read_text())
    assert [task["data"]["image"] for task in tasks] == [prefix + image.file for image in images()]


def test_fiftyone_has_labels_and_boxes_by_name(tmp_path):
    write("fiftyone", tmp_path / "out")
    labels, boxes = (json.loads((tmp_path / "out" / name).read_text()) for name in FILES["fiftyone"])
    assert labels["classes"] == boxes["classes"] == HOSTILE
    for image in images():
        name = image.file.removesuffix(".jpg")
        found = [(target["label"], target["confidence"]) for target in labels["labels"][name]]
        assert found == wanted_labels()[image.id]
        assert [one["attributes"] for one in labels["labels"][name]] == [one.facts for one in image.labels]
        placed = [
            (target["label"], target["confidence"], fractions(target["bounding_box"], 1, 1))
            for target in boxes["labels"][name]
        ]
        assert placed == wanted_boxes()[image.id]
    assert len(labels["labels"]) == len(boxes["labels"]) == len(KEYS)


@pytest.mark.parametrize("form", ["coco", "label-studio", "fiftyone"])
def test_an_interrupted_export_leaves_the_old_files(tmp_path, form):
    output = tmp_path / ("x.json" if form == "coco" else "out")
    write(form, output)
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    with contextlib.suppress(KeyboardInterrupt), label_writer(form, output, HOSTILE, made_by="") as one:
        one(next(images()))
        raise KeyboardInterrupt
    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before


@pytest.mark.parametrize("form", ["coco", "label-studio", "fiftyone"])
def test_no_images_are_valid_files_too(tmp_path, form):
    output = tmp_path / ("x.json" if form == "coco" else "out")
    with label_writer(form, output, HOSTILE, made_by=""):
        pass
    for file in [output] if form == "coco" else output.glob("*.json"):
        json.loads(file.read_text())


def test_scores_that_are_no_numbers_are_refused(tmp_path):
    broken = LabelledImage(
        id=0, file="x.jpg", width=1, height=1, labels=[Label(number=0, score=float("nan"))]
    )
    with pytest.raises(ValueError), label_writer("coco", tmp_path / "x.json", ["a"], made_by="") as one:
        one(broken)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_may_have_a_dot_in_its_name(tmp_path):
    write("fiftyone", tmp_path / "labels-v1.0")
    assert (tmp_path / "labels-v1.0" / "labels.json").exists()


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak memory from /proc")
def test_labels_are_never_all_in_memory(tmp_path):
    """Megabytes of each format pass through a process that hardly grows."""
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from bigscl.tools.shared.label_formats import FILES, Label, LabelledImage, label_writer\n"
        "labels = [Label(number=n, score=0.5, box=(0.1, 0.2, 0.3, 0.4), facts={'annotated': n == 0}) "
        "for n in range(5)]\n"
        "def peak():\n"
        "    lines = Path('/proc/self/status').read_text().splitlines()\n"
        "    return next(int(line.split()[1]) for line in lines if line.startswith('VmHWM'))\n"
        "before = peak()\n"
        "ends = {'coco': '.json', 'multilabel-imagenet': '.txt'}\n"
        "for form in FILES:\n"
        "    output = Path(sys.argv[1]) / (form + ends.get(form, ''))\n"
        "    with label_writer(form, output, list('abcde'), made_by='x') as write:\n"
        "        for n in range(6000):\n"
        "            write(LabelledImage(id=n, file=f'{n}.jpg', width=9, height=9, labels=labels))\n"
        "print(peak() - before)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], check=True, capture_output=True, text=True
    )
    assert sum(file.stat().st_size for file in tmp_path.rglob("*.json")) > 18e6
    assert int(done.stdout) * 1024 < 5e6
