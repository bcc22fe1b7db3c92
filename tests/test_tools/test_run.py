"""`bigscl.open_run`: runs and stores of own loops in Python, and the README's loop, which makes a store."""

import contextlib
import csv
import io
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from torchvision.datasets import ImageFolder

import bigscl as package
from bigscl.common.user_error import UserError
from bigscl.selection.trust import GROUPS, Group, Trust
from bigscl.store import HeatmapStore, StoreError
from bigscl.tools.shared.open_store import DataFlags
from tests.builders import learn, picture
from tests.test_tools.conftest import bigscl
from tests.test_tools.view_site import serving

pytest.importorskip("pandas")
ROOT = Path(__file__).parent.parent.parent
NAMES = ("cat", "dog", "owl")


def code_of(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)


def write_photos(folder):
    """24 images of three classes; one file is in a deeper folder, one is no image by its name."""
    for number in range(24):
        path = folder / NAMES[number % 3] / ("more" if number == 5 else "") / f"{23 - number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        picture(number, 40 + 8 * (number % 3), 30).save(path)
    (folder / "cat" / "notes.txt").write_text("not an image")


@pytest.fixture(scope="module")
def mine(tmp_path_factory):
    """A folder with `photos`, and `mine` that the README's loop made."""
    pytest.importorskip("efficientnet_lite_pytorch")
    folder = tmp_path_factory.mktemp("loop")
    write_photos(folder / "photos")
    with contextlib.chdir(folder):
        exec(code_of("README.md")[0], {"__name__": "readme"})
    return folder


def test_the_loop_of_the_readme_trains_and_resumes_as_printed(mine):
    with HeatmapStore.open(mine / "mine" / "store") as store:
        assert (store.last_epochs()[:24] == 3).all()
        newest = store.snapshot.id
    with contextlib.chdir(mine):  # from its checkpoint: nothing is left to do
        exec(code_of("README.md")[0], {"__name__": "readme"})
    with HeatmapStore.open(mine / "mine" / "store") as store:
        assert (store.last_epochs()[:24] == 3).all()
        assert store.snapshot.slots == HeatmapStore.open(store.backend.url, snapshot=newest).snapshot.slots


def test_images_are_in_the_order_of_torchvision(mine):
    photos = ImageFolder(mine / "photos")
    run = package.open_run(mine / "mine" / "store", images=mine / "photos")
    labels = run.labels()
    given = labels[labels.given]
    assert [str(mine / "photos" / path) for path in given.path] == [path for path, _ in photos.samples]
    assert given["class"].tolist() == [photos.classes[number] for _, number in photos.samples]


def own_stores(mine):
    """The same store with its images as a folder, a table, and lists."""
    photos = ImageFolder(mine / "photos")
    table = mine / "photos.csv"
    with table.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["path", "label"])
        writer.writerows([Path(path).relative_to(mine), number] for path, number in photos.samples)
    names = mine / "names.txt"
    names.write_text("".join(f"{name}\n" for name in NAMES))
    store = mine / "mine" / "store"
    paths, labels = zip(*photos.samples, strict=True)
    return [
        package.open_run(store, images=mine / "photos"),
        package.open_run(store, images=table, names=names),
        package.open_run(store, images=paths, labels=[[each] for each in labels], names=photos.classes),
    ]


def test_an_own_store_opens_with_a_folder_a_table_or_lists(mine):
    frames = [run.labels() for run in own_stores(mine)]
    assert frames[0].shape == (24 + 12, 7)  # K is 1.5: half as many expected ones are not given
    for other in frames[1:]:
        for column in ("class", "score", "given", "expected", "box"):
            assert other[column].tolist() == frames[0][column].tolist(), column
    assert {path.removeprefix("photos/") for path in frames[1].path} == set(frames[0].path)


def test_what_the_loop_did_not_see_is_refused(mine):
    store = mine / "mine" / "store"
    photos = [path for path, _ in ImageFolder(mine / "photos").samples]
    for words, why in (
        (
            {"images": photos[:5], "labels": [[0]] * 5},
            "24 samples with other labels or in another order than these 5",
        ),
        ({"images": photos, "labels": [[0]] * 24}, "other labels or in another order"),
        ({"images": photos}, "a list of paths needs labels"),
        ({"images": photos, "labels": [[7]] * 24}, r"classes span 7\.\.7, expected 0\.\.2"),
        ({"images": mine / "nothing"}, "no such folder. Give a folder with a subfolder for each class"),
        ({"images": mine / "photos" / "cat" / "more"}, "no such folder|no images in subfolders"),
        ({}, "--images FOLDER if your own loop read files"),
    ):
        with pytest.raises((UserError, StoreError), match=why):
            package.open_run(store, **words)


@pytest.mark.parametrize("name", ["dense", "topk"])
def test_labels_are_those_that_are_exported(runs, tmp_path, name):
    path = tmp_path / "labels.csv"
    assert bigscl("export", runs / name, "labels", "--which", "all", "-o", path).code == 0
    with path.open() as file:
        rows = list(csv.DictReader(file))
    labels = package.open_run(runs / name).labels()
    assert labels.columns.tolist() == ["path", "class", "score", "given", "expected", "trust", "box"]
    assert labels.index.tolist() == [row["key"] for row in rows]
    assert labels["class"].tolist() == [row["name"] for row in rows]
    assert labels.score.tolist() == [float(row["score"]) for row in rows]
    assert labels.given.tolist() == [row["annotated"] == "True" for row in rows]
    assert [box and list(box) for box in labels.box] == [
        [float(row[edge]) for edge in ("x0", "y0", "x1", "y1")] if row["x0"] else None for row in rows
    ]


def test_a_heatmap_covers_its_image(runs, index, mine):
    run = package.open_run(runs / "dense")
    row, number = 3, int(index.full[3][0])
    heatmap = run.heatmap(index.key(row), index.class_names[number])
    stored = HeatmapStore.open(runs / "dense" / "store", annotations=index.annotations())
    own = stored.read_without_initial_value([row]).heatmaps[0, number]
    assert heatmap.dtype == np.float32
    assert heatmap.shape[0] == heatmap.shape[1] > own.shape[0]
    y, x = np.unravel_index(heatmap.argmax(), heatmap.shape)
    peak = np.array(np.unravel_index(own.argmax(), own.shape))
    assert abs((np.array([y, x]) + 0.5) / heatmap.shape - (peak + 0.5) / own.shape).max() < 1 / len(own)
    wide = package.open_run(mine / "mine" / "store", images=mine / "photos")
    key = wide.labels().index[0]
    with Image.open(mine / "photos" / key) as image:
        assert wide.heatmap(key, "cat").shape == (image.height, image.width)
    with pytest.raises(UserError, match="class 'horse': no such class"):
        run.heatmap(index.key(row), "horse")
    with pytest.raises(UserError, match="sample 'x': not an id"):
        run.heatmap("x", 0)


def test_a_class_without_heatmap_is_refused_with_those_that_are_kept(runs, index):
    kept = HeatmapStore.open(runs / "topk" / "store").read([0]).kept_classes()[0]
    other = next(number for number in range(index.num_classes) if number not in kept)
    with pytest.raises(UserError, match=f"no heatmap of '{other}', kept: {index.class_names[kept[0]]}, "):
        package.open_run(runs / "topk").heatmap(index.key(0), index.class_names[other])


def test_pictures_are_shown_inline(runs, index, mine, tmp_path):
    own = package.open_run(mine / "mine" / "store", images=mine / "photos")
    for run, key in ((package.open_run(runs / "dense"), index.key(5)), (own, own.labels().index[4])):
        shown = run.show(key)
        with Image.open(io.BytesIO(shown._repr_png_())) as image:
            assert image.width > 300
            assert len(np.unique(np.asarray(image.convert("L")))) > 50
        shown.save(tmp_path / "shown.png")
        assert (tmp_path / "shown.png").stat().st_size > 1000


def test_metrics_are_a_row_for_each_epoch(runs, tmp_path):
    shutil.copytree(runs / "dense", tmp_path / "run")
    lines = [{"kind": "train", "step": n, "epoch": n // 2 + 1, "loss": 1.0 + n} for n in range(4)]
    lines.append({"kind": "val", "step": 4, "epoch": 2, "map": 0.5, "classes": [1]})
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    metrics = package.open_run(tmp_path / "run").metrics()
    assert metrics.index.tolist() == [1, 2]
    assert metrics.columns.tolist() == ["train/loss", "val/map"]
    assert metrics["train/loss"].tolist() == [1.5, 3.5]
    assert np.isnan(metrics["val/map"][1])
    with pytest.raises(UserError, match=r"no metrics\.jsonl"):
        package.open_run(runs / "dense").metrics()


def test_samples_have_the_order_of_the_page(run, index):
    opened = package.open_run(run)
    surprising = opened.samples(by="surprise", count=10)
    assert len(surprising) == 10
    assert not surprising.given.any()
    assert surprising.score.is_monotonic_decreasing
    store = HeatmapStore.open(run / "store", annotations=index.annotations())
    scores = store.read_without_initial_value(index.ids()).scores.astype(np.float32)
    assert surprising.score.iloc[0] == scores[index.labels_of(index.ids()) != 1].max()
    of_class = opened.samples(by="score", name=index.class_names[2])
    assert set(of_class["class"]) == {index.class_names[2]}
    with pytest.raises(
        UserError, match="by: found 'surprize', expected one of surprise, change, heat, score"
    ):
        opened.samples(by="surprize")


def test_tables_without_pandas_are_one_line(runs, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UserError, match=r"need the package pandas: pip install 'bigscl\[notebook\]'"):
        package.open_run(runs / "dense").labels()


def test_commands_take_images_in_place_of_shards(mine, tmp_path):
    store, images = mine / "mine" / "store", ("--images", mine / "photos")
    for words, told in (
        (("export", store, "labels", "-o", tmp_path / "found.csv"), "12 rows"),
        (
            ("export", store, "labels", "--format", "coco", "--which", "all", "-o", tmp_path / "x.json"),
            "36 rows",
        ),
        (("render", store, "-o", tmp_path / "x.png", "--choose", "confident"), "8 samples"),
        (("export", store, "scores", "-o", tmp_path / "x.npz"), "24 rows"),
        (("export", store, "samples", "-o", tmp_path / "samples.json"), "24 rows"),
        (("show", store, "--sample", "cat/11.png"), "cat"),
        (("review", "ask", store, "--answers", tmp_path / "answers.jsonl", "--list", "--count", 3), "owl"),
        (("view", store, "--prepare", "--cache", tmp_path / "cache"), "is indexed"),
    ):
        answer = bigscl(*words, *images)
        assert answer.code == 0, answer.err
        assert told in answer.out, answer.out
    with (tmp_path / "found.csv").open() as file:
        assert all((mine / "photos" / row["path"]).is_file() for row in csv.DictReader(file))
    coco = json.loads((tmp_path / "x.json").read_text())
    assert len(coco["images"]) == 24
    for image in coco["images"]:
        with Image.open(mine / "photos" / image["file_name"]) as opened:
            assert opened.size == (image["width"], image["height"])
    answer = bigscl("export", store, "labels", "-o", tmp_path / "y.csv", *images, "--shards", "x.tar")
    assert answer.code == 2
    assert "--images: has no effect with --shards" in answer.err


def kinds(cell):
    """What a cell shows: the types of its result, and whether it prints."""
    results = [sorted(output["data"]) for output in cell.outputs if output.output_type == "execute_result"]
    return results, any(output.get("name") == "stdout" for output in cell.outputs)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_the_notebook_shows_what_is_in_its_file(runs, tmp_path):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    file = ROOT / "docs" / "notebook.ipynb"
    assert file.stat().st_size < 300_000
    shutil.copytree(runs / "dense", tmp_path / "quickstart" / "scl_plus")
    lines = (
        {"kind": kind, "step": 1, "epoch": 1, name: 0.5} for kind, name in (("train", "loss"), ("val", "map"))
    )
    metrics = tmp_path / "quickstart" / "scl_plus" / "metrics.jsonl"
    metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    stored, executed = (nbformat.read(file, as_version=4) for _ in range(2))
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(executed, timeout=170, kernel_name="python3", resources=resources).execute()
    code = [cell for cell in stored.cells if cell.cell_type == "code"]
    assert all(results or prints for results, prints in map(kinds, code))
    assert list(map(kinds, code)) == [kinds(cell) for cell in executed.cells if cell.cell_type == "code"]


def test_the_page_shows_the_images_of_an_own_loop(mine):
    source = DataFlags(images=mine / "photos")
    with serving(mine / "mine" / "store", source=source) as site:
        (item, *_) = site.ask("/api/samples?count=1").json()["items"]
        assert (mine / "photos" / item["key"]).is_file()
        sample = site.ask(f"/api/sample?row={item['row']}").json()
        assert sample["path"] == item["key"]
        assert site.ask(f"/api/image?row={item['row']}").body == (mine / "photos" / item["key"]).read_bytes()
        assert site.ask(f"/api/thumbnail?row={item['row']}").headers["content-type"] == "image/jpeg"


def test_an_own_loop_is_reviewed_by_paths_of_images(mine, tmp_path, monkeypatch):
    store = (mine / "mine" / "store", "--images", mine / "photos", "--answers", tmp_path / "answers.jsonl")
    assert bigscl("review", "export", store[0], "csv", "-o", tmp_path / "questions.csv", *store[1:]).code == 0
    lines = (tmp_path / "questions.csv").read_text().splitlines()
    rows = list(csv.DictReader(lines))
    assert all(row["path"] == row["key"] and (mine / "photos" / row["path"]).is_file() for row in rows)
    rows[0]["yes"] = "yes"
    with (tmp_path / "questions.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    assert bigscl("review", "import", store[0], tmp_path / "questions.csv", *store[1:]).code == 0
    left = bigscl("review", "ask", *store, "--json").json()
    assert (rows[0]["key"], rows[0]["class"]) not in {(each["key"], each["class_name"]) for each in left}
    assert len(left) == len(rows) - 1


def test_an_image_that_is_gone_is_named(mine, tmp_path):
    shutil.copytree(mine, tmp_path / "copy")
    paths, labels = zip(*ImageFolder(tmp_path / "copy" / "photos").samples, strict=True)
    store = tmp_path / "copy" / "mine" / "store"
    run = package.open_run(store, images=paths, labels=[[label] for label in labels])
    key = run.labels().index[0]
    Path(paths[0]).unlink()
    with pytest.raises(UserError, match=f"{key}: cannot be read: No such file"):
        run.show(key)
    with pytest.raises(UserError, match=f"{key}: the image cannot be read"):
        run.heatmap(key, 0)


def test_each_call_sees_the_newest_snapshot(run, index):
    opened = package.open_run(run)
    before, at = opened.labels(), opened._opened.store.snapshot.id
    with HeatmapStore.open(run / "store", annotations=index.annotations(), mode="w", run="more") as writer:
        learn(writer, index, 3, 0.2, np.random.default_rng(5))
    pinned = package.open_run(f"{run}@{at}")
    assert before.score.tolist() == pinned.labels().score.tolist()
    assert before.score.tolist() != opened.labels().score.tolist()
    assert opened._opened.store.snapshot.id > at


def test_trust_is_that_of_the_classes_of_a_label(run, index):
    counts = np.bincount(index.given.values, minlength=index.num_classes)
    groups = tuple(
        Group(name=name, classes=len(own), precision=precision, hidden=20, found=9)
        for name, precision, own in zip(
            GROUPS, (0.2, 0.5, 0.8), np.array_split(np.argsort(counts, kind="stable"), 3), strict=True
        )
    )
    known = {"precision": 0.6, "low": 0.5, "high": 0.7, "recall": 0.4}
    trust = Trust(hidden=60, found=27, **known, epochs=3, images_per_class=3.0, groups=groups)
    with HeatmapStore.open(run / "store", annotations=index.annotations(), mode="w", run="more") as store:
        attributes = {**store.snapshot.attributes, "trust": trust.to_json()}
        store.commit(epoch=2, step=31, attributes=attributes)
    labels = package.open_run(run).labels()
    assert labels.trust[labels.given].isna().all()
    expected = dict(
        zip(np.argsort(counts, kind="stable").tolist(), [0.2] * 4 + [0.5] * 3 + [0.8] * 3, strict=True)
    )
    mined = labels[~labels.given]
    assert mined.trust.tolist() == [expected[index.class_names.index(name)] for name in mined["class"]]
    assert trust.by_class(counts).tolist() == [expected[number] for number in range(len(counts))]
    few = replace(trust, hidden=3)
    assert np.isnan(few.by_class(counts)).all()
