import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from bigscl.store import HeatmapStore
from tests.builders import make_store
from tests.test_tools.conftest import add_config, bigscl


def chosen(*arguments):
    """The ids that a picture shows; it must be there, and be a picture."""
    answer = bigscl("render", *arguments, "--json")
    assert answer.code == 0, answer.err
    facts = answer.json()
    with Image.open(facts["output"]) as picture:
        assert picture.width > 300
        assert len(np.unique(np.asarray(picture.convert("L")))) > 50
    return [one["id"] for one in facts["samples"]]


def scores(run, ids, **options):
    return HeatmapStore.open(run / "store", **options).read(ids).scores.astype(np.float32)


def test_samples_are_drawn_in_the_order_they_are_named(runs, index, tmp_path):
    ids = chosen(runs / "dense", "--sample", index.key(9), "--sample", 2, "-o", tmp_path / "x.png")
    assert ids == [9, 2]


def test_random_samples_depend_on_the_seed_alone(runs, tmp_path):
    out = ("-o", tmp_path / "x.png", "--count", 5)
    first = chosen(runs / "dense", *out)
    assert chosen(runs / "dense", *out) == first
    assert chosen(runs / "dense", *out, "--seed", 1) != first
    assert len(set(first)) == 5


def test_confident_ones_have_the_highest_scores_of_classes_not_annotated(runs, index, tmp_path):
    ids = chosen(runs / "dense", "--choose", "confident", "--count", 4, "-o", tmp_path / "x.png")
    everyone = index.ids()
    found = scores(runs / "dense", everyone)
    found[index.labels_of(everyone) == 1] = -1
    best = sorted(everyone.tolist(), key=lambda n: -found[everyone == n].max())[:4]
    assert ids == best
    ids = chosen(
        *(runs / "dense", "--choose", "confident", "--class", "3", "--count", 1, "-o", tmp_path / "x.png")
    )
    assert ids == [int(everyone[found[:, 3].argmax()])]


def test_most_changed_ones_moved_furthest_since_the_snapshot_before(runs, index, tmp_path):
    everyone = index.ids()
    ids = chosen(runs / "dense", "--choose", "most-changed", "--count", 3, "-o", tmp_path / "x.png")
    change = np.abs(scores(runs / "dense", everyone) - scores(runs / "dense", everyone, snapshot=3)).max(
        axis=1
    )
    assert ids == everyone[np.argsort(-change, kind="stable")[:3]].tolist()


def test_a_class_restricts_random_samples_to_those_annotated_with_it(runs, index, tmp_path):
    ids = chosen(runs / "dense", "--class", "5", "--count", 20, "-o", tmp_path / "x.png")
    everyone = index.ids()
    assert ids == everyone[index.labels_of(everyone)[:, 5] == 1].tolist()


def test_epochs_are_drawn_for_tracked_samples(runs, tmp_path):
    history_samples = HeatmapStore.open(runs / "dense" / "store").spec.history_samples
    ids = chosen(runs / "dense", "--epochs", "--count", 2, "--heatmaps", 2, "-o", tmp_path / "x.png")
    assert ids == list(history_samples[:2])
    answer = bigscl("render", runs / "dense", "--epochs", "--sample", 1, "-o", tmp_path / "y.png")
    assert answer.code == 2
    assert "Tracked samples have them" in answer.err


def test_two_stores_are_drawn_one_below_the_other(runs, tmp_path):
    one = ("render", runs / "dense", "--sample", 3, "-o")
    assert bigscl(*one, tmp_path / "one.png").code == 0
    assert bigscl(*one, tmp_path / "two.png", "--against", runs / "topk").code == 0
    with Image.open(tmp_path / "one.png") as alone, Image.open(tmp_path / "two.png") as both:
        assert both.height > 1.5 * alone.height
        assert both.width == alone.width


def test_samples_never_visited_are_drawn_with_their_initial_heatmaps(tmp_path, index):
    HeatmapStore.create(tmp_path / "store", index.annotations(), heatmap_size=6)
    shards = index.urls[0].replace("000000", "*")
    assert chosen(tmp_path / "store", "--shards", shards, "--sample", 4, "-o", tmp_path / "x.png") == [4]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{bare}"], "render: needs the images"),
        (["{runs}/dense", "--class", "cow"], "no such class"),
        (["{runs}/dense", "--epochs", "--against", "{runs}/weak"], "has no effect with --against"),
        (["{runs}/dense", "--choose", "most-changed", "--snapshot", "3"], "is the oldest one"),
        (["{runs}/dense", "-o", "{out}.xyz"], "xyz"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_2(runs, bare, tmp_path, arguments, message):
    places = {"runs": runs, "bare": bare, "out": tmp_path / "x"}
    answer = bigscl("render", "-o", tmp_path / "x.png", *(one.format(**places) for one in arguments))
    assert answer.code == 2
    assert message in answer.err


def test_a_broken_image_is_named(tmp_path, index):
    make_store(tmp_path / "run" / "store", index, epochs=1)
    add_config(tmp_path / "run", index)
    data = tmp_path / "data"
    shutil.copytree(index.urls[0].rpartition("/")[0], data)
    shard = data / "train-000000.tar"
    content = bytearray(shard.read_bytes())
    start = int(index.image_offsets[2])
    content[start : start + int(index.image_bytes[2])] = bytes(int(index.image_bytes[2]))
    shard.write_bytes(bytes(content))
    answer = bigscl(
        *(
            "render",
            tmp_path / "run",
            "--shards",
            data / "train-*.tar",
            "--sample",
            2,
            "-o",
            tmp_path / "x.png",
        )
    )
    assert answer.code == 2
    assert f"{index.name(2)}: cannot be decoded" in answer.err


def test_the_picture_says_how_its_samples_were_chosen(runs, tmp_path):
    out = ("-o", tmp_path / "x.png", "--json")
    assert bigscl("render", runs / "dense", *out).json()["chosen"] == "random samples, seed 0"
    words = bigscl("render", runs / "dense", "--choose", "confident", "--class", 3, *out).json()["chosen"]
    assert words == "highest score of a class that is not annotated, class 3"
    assert bigscl("render", runs / "dense", "--sample", 3, *out).json()["chosen"] == "samples as named"


def test_epochs_fit_on_a_screen(runs, tmp_path):
    chosen(runs / "dense", "--epochs", "-o", tmp_path / "x.png")
    with Image.open(tmp_path / "x.png") as picture:
        assert picture.width <= 1920
        assert picture.height <= 1080


def test_a_backend_of_another_project_is_ignored(runs, tmp_path):
    command = [sys.executable, "-m", "bigscl", "render", str(runs / "dense"), "-o", str(tmp_path / "x.png")]
    environment = {**os.environ, "MPLBACKEND": "no_such_backend"}
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "x.png").stat().st_size
