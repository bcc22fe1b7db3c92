"""`bigscl compare`: runs beside the first, as a table or as JSON."""

import json

import numpy as np
import pytest

from tests.test_bigscl.test_curves import write_metrics
from tests.test_bigscl.test_report import pooled_twice, problem, saved
from tests.test_tools.test_report_verb import run


@pytest.fixture
def runs(tmp_path):
    """Two runs on the same images, of which the second knows more."""
    logits, labels = problem(num_images=300)
    saved(logits, labels, model="first").save(tmp_path / "a" / "predictions.zarr")
    better = (logits + 2 * labels).astype(np.float16)
    saved(better, labels, model="better").save(tmp_path / "b" / "predictions.zarr")
    return tmp_path


def test_the_table_has_values_differences_and_intervals(runs, capsys):
    assert run("compare", runs / "a", runs / "b", "--resamples", "50") == 0
    text = capsys.readouterr().out
    header, _, first, better = [line for line in text.splitlines() if line.startswith("|")][:4]
    assert header == "| run | mAP | AP per image | top-1 | F1 at 0.5 |"
    assert (first.count(" [+"), better.count(" [+")) == (0, 4)
    assert "300 images; differences from first" in text
    assert "| AP of first | AP of better |" in text


def test_json_has_the_same_figures(runs, capsys):
    assert run("compare", runs / "a", runs / "b", "--resamples", "50", "--classes", "3", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["first"] == "first"
    better = found["runs"][1]
    change = better["figures"]["map"]
    assert 0 < change["low"] < change["difference"] < change["high"]
    assert len(better["changes"]) == 3
    assert found["runs"][0]["changes"] == []


def test_runs_of_one_name_are_told_apart_by_their_paths(runs, capsys):
    assert run("compare", runs / "a", runs / "a" / "predictions.zarr", "--resamples", "10") == 0
    assert f"differences from {runs / 'a'} " in capsys.readouterr().out


def test_poolings_are_compared_alone_or_with_each_other(runs, capsys):
    logits, labels = problem(num_images=300)
    better = (logits + 2 * labels).astype(np.float16)
    # In another order of the images, which must not matter.
    pooled_twice(
        logits[::-1], better[::-1], labels[::-1], model="c", keys=[f"image{n}" for n in range(300)][::-1]
    ).save(runs / "c.zarr")
    words = [runs / "c.zarr", "--resamples", "50", "--json"]
    assert run("compare", *words, "--pooling", "both") == 0
    plain, pooled = json.loads(capsys.readouterr().out)["runs"]
    assert (plain["pooling"], pooled["pooling"]) == ("plain", "map")
    assert run("compare", runs / "a", runs / "b", "--resamples", "50", "--json") == 0
    for mine, other in zip((plain, pooled), json.loads(capsys.readouterr().out)["runs"], strict=True):
        assert mine["figures"] == other["figures"]
    assert run("compare", *words[:-1], "--pooling", "map", "-o", runs / "out") == 0
    text = capsys.readouterr().out
    assert "differences from c, map pooling" in text
    assert "\n| plain | " in text
    assert run("compare", *words[:-1], "--pooling", "both", "-o", runs / "out") == 0
    assert run("compare", runs / "c.zarr", runs / "a", "--pooling", "map") == 2
    assert "first: pooling map, but only plain logits" in capsys.readouterr().err


def test_runs_on_other_images_are_refused(runs, capsys):
    logits, labels = problem(num_images=10)
    saved(logits, labels).save(runs / "c.zarr")
    assert run("compare", runs / "a", runs / "c.zarr") == 2
    assert "Only predictions of the same images" in capsys.readouterr().err


def test_pictures_overlay_the_runs_and_show_how_they_learnt(runs, tmp_path, capsys):
    write_metrics(tmp_path / "learnt", [0.3, 0.5])
    (runs / "b" / "predictions.zarr").rename(tmp_path / "learnt" / "predictions.zarr")
    assert run("compare", runs / "a", tmp_path / "learnt", "--resamples", "10", "-o", tmp_path / "out") == 0
    text = (tmp_path / "out" / "compare.md").read_text()
    assert capsys.readouterr().out.strip() in text
    assert "![learning curves](curves.png)" in text
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "compare.md",
        "compare.json",
        "scores.png",
        "curves.png",
    }
    assert json.loads((tmp_path / "out" / "compare.json").read_text())["first"] == "first"
