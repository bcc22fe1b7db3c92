"""Runs beside each other: which images and classes are shown, and as what."""

import numpy as np
import pytest
from PIL import Image

from bigscl.evaluation import run_plots as side_by_side
from bigscl.evaluation.run_plots import StoredSample, _shown, _with_missing, draw_runs
from bigscl.store import Rows
from tests.builders import config_of, make_store, scene_index


def held(scores, annotated):
    rows = Rows(scores=np.array([scores], np.float16), last_epoch=np.zeros(1, np.int32))
    return StoredSample(rows=rows, annotated=np.array(annotated, bool))


def test_of_each_kind_the_class_of_the_highest_mean_score_is_shown():
    memories = {
        "an": held([0.9, 0.1, 0.3, 0.6, 0.0], [1, 0, 0, 0, 0]),
        "scl": held([0.8, 0.7, 0.4, 0.1, 0.2], [1, 0, 0, 0, 0]),
    }
    present = np.array([1, 1, 1, 0, 0], bool)
    kinds = ("annotated", "unannotated", "negative")
    assert _shown(memories, present, kinds) == [("annotated", 0), ("unannotated", 1), ("negative", 3)]
    assert _shown(memories, present, ("negative",)) == [("negative", 3)]


def test_a_kind_that_the_image_has_not_is_left_out():
    everything = np.ones(2, bool)
    assert _shown({"a": held([0.5, 0.5], [1, 1])}, everything, ("annotated", "unannotated", "negative")) == [
        ("annotated", 0)
    ]


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    return scene_index(tmp_path_factory.mktemp("beside"))


def test_images_with_an_unnamed_positive_are_chosen(index):
    ids = _with_missing(index, 4)
    assert len(ids) == 4
    missing = (index.labels_of(ids, "full") == 1) & (index.labels_of(ids) != 1)
    assert missing.any(1).all()


def test_a_line_is_drawn_for_each_image_and_kind(tmp_path, index, monkeypatch):
    runs = {}
    for name, settings in {"dense": {}, "topk": {"top": 4}}.items():
        make_store(tmp_path / name / "store", index, **settings)
        pattern = index.urls[0].replace("000000", "*")
        runs[name] = config_of(run=str(tmp_path / name), data={"train": pattern})
    drawn = []

    def draw(samples, path, title):
        drawn.extend(samples)
        assert title == "2 training images with an unannotated positive, evenly over the set"
        original(samples, path, title=title)

    original = side_by_side.draw_samples
    monkeypatch.setattr(side_by_side, "draw_samples", draw)
    draw_runs(runs, tmp_path / "beside.png", count=2)
    kinds = [[panel.kind for panel in sample.panels] for sample in drawn]
    assert kinds == [["annotated"] * 2, ["unannotated"] * 2, ["negative"] * 2] * 2
    shown = drawn[0].title.split(":")[0]
    assert [panel.name for panel in drawn[0].panels] == [f"dense: {shown}", f"topk: {shown}"]
    with Image.open(tmp_path / "beside.png") as picture:
        assert picture.width > picture.height / 4
