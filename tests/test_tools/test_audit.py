"""`bigscl audit`: what is suspicious comes first, with its place; a state that is gone does not count."""

import csv
import json

import numpy as np
import pytest

from bigscl.memory.score_history import ScoreLog, log_folder
from bigscl.store import SingleProcess
from tests.builders import SIDE, centres, make_store
from tests.test_tools.conftest import bigscl

COLD, HOT = 5, 17


def keep_scores(run, index, epochs=3):
    """Scores of imaginary epochs: the label of one image never warms, a missing one of another stays hot."""
    ids = index.ids()
    named, present = index.labels_of(ids) == 1, index.labels_of(ids, "labels") == 1
    scores = np.where(named, 0.9, np.where(present, 0.3, 0.05))
    cold, hot = np.flatnonzero(named[COLD])[0], np.flatnonzero(present[HOT] & ~named[HOT])[0]
    scores[COLD, cold], scores[HOT, hot] = 0.02, 0.85
    log = ScoreLog(run, index.annotations(), SingleProcess(), 10)
    for epoch in range(epochs):
        drift = scores + 0.01 * epoch
        log.note(ids, drift.astype(np.float16))
        log.write(epoch)
    return int(cold), int(hot)


def test_cold_labels_and_hot_missing_ones_come_first_with_their_place(run, index, tmp_path):
    cold, hot = keep_scores(run, index)
    answer = bigscl("audit", run, "-o", tmp_path / "found.csv", "--json")
    assert answer.code == 0, answer.err
    found = answer.json()
    assert found["epochs"] == [0, 1, 2]
    assert (found["wrong"][0]["id"], found["wrong"][0]["class"]) == (COLD, cold)
    assert (found["missing"][0]["id"], found["missing"][0]["class"]) == (HOT, hot)
    assert found["wrong"][0]["mean"] == pytest.approx(0.03, abs=1e-3)
    assert found["wrong"][0]["spread"] == pytest.approx(np.std([0.02, 0.03, 0.04]), abs=1e-3)
    assert found["missing"][0]["last"] == pytest.approx(0.87, abs=1e-3)
    assert found["wrong"][0]["suspicion"] > 0.9 > found["wrong"][1]["suspicion"]
    assert found["wrong"][0]["suspicion"] == pytest.approx(1 - found["wrong"][0]["mean"], abs=1e-3)
    # The heat of the store is where the digit is.
    y, x = (centres(index)[HOT, hot] + 0.5) / SIDE
    row = found["missing"][0]
    assert abs(row["x"] - x) <= 1 / SIDE
    assert abs(row["y"] - y) <= 1 / SIDE
    assert row["x0"] <= row["x"] <= row["x1"]
    assert row["y0"] <= row["y"] <= row["y1"]
    # All named classes are present; all missing ones are warmer than the absent.
    assert found["auc"] == {"wrong": None, "missing": 1.0}
    with (tmp_path / "found.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(found["wrong"]) + len(found["missing"])
    assert (rows[0]["kind"], int(rows[0]["id"]), rows[0]["key"]) == ("wrong", COLD, index.key(COLD))
    text = bigscl("audit", run, "--count", 3).out
    assert "30 images, 3 epochs (1 to 3)" in text
    assert text.count(index.name(COLD)) >= 1


def test_wrong_labels_of_a_run_with_noise_are_counted_as_such(tmp_path, index):
    drawn = index.draw_observed(1, noise=0.2)
    run = tmp_path / "run"
    make_store(run / "store", drawn, epochs=1)
    train = index.urls[0].replace("000000", "*")
    settings = {"data": {"train": train, "observed": {"seed": 1, "noise": 0.2}}}
    (run / "config.yaml").write_text(json.dumps(settings))
    ids = index.ids()
    named, present = drawn.labels_of(ids) == 1, index.labels_of(ids, "labels") == 1
    log = ScoreLog(run, drawn.annotations(), SingleProcess(), 10)
    log.note(ids, np.where(named & present, 0.8, 0.2).astype(np.float16))
    log.write(0)
    found = bigscl("audit", run, "--json").json()
    assert found["auc"]["wrong"] == 1.0
    wrong = {(row["id"], row["class"]) for row in found["wrong"][: (named & ~present).sum()]}
    assert wrong == {(int(ids[n]), int(c)) for n, c in zip(*np.nonzero(named & ~present), strict=True)}
    assert len(wrong) == 6


def test_epochs_after_the_snapshot_do_not_count(run, index):
    keep_scores(run, index, epochs=5)
    assert bigscl("audit", run, "--json").json()["epochs"] == [0, 1, 2]


def test_a_class_without_a_heatmap_has_no_place(topk, index):
    keep_scores(topk, index)
    found = bigscl("audit", topk, "--json").json()
    assert {row["x"] is None for row in found["missing"]} == {True, False}


def test_known_negatives_are_never_missing(tmp_path, index):
    drawn = index.draw_observed(1, negatives=3)
    run = tmp_path / "run"
    make_store(run / "store", drawn, epochs=1)
    settings = {"train": index.urls[0].replace("000000", "*"), "observed": {"seed": 1, "negatives": 3}}
    (run / "config.yaml").write_text(json.dumps({"data": settings}))
    keep_scores(run, drawn, epochs=1)
    found = bigscl("audit", run, "--json").json()["missing"]
    absent = drawn.labels_of(drawn.ids()) == 0
    assert absent.sum() == 90
    assert len(found) == 30 * 10 - 30 - 90
    assert not any(absent[row["id"], row["class"]] for row in found)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{runs}/dense"], "has no scores of finished epochs in {runs}/dense/scores. Runs keep them with"),
        (["{bare}", "--shards", "{shards}"], "in no folder of a run"),
        (["{runs}/dense", "-o", "{runs}/dense/config.yaml"], "already exists"),
        (["{run}"], "epoch-0000.npy: not scores of an epoch"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(runs, bare, run, index, arguments, message):
    keep_scores(run, index)
    (log_folder(run, index.annotations()) / "epoch-0000.npy").write_bytes(b"damaged")
    places = {"runs": runs, "bare": bare, "run": run, "shards": index.urls[0].replace("000000", "*")}
    answer = bigscl("audit", *(argument.format(**places) for argument in arguments))
    assert answer.code == 2
    assert message.format(**places) in answer.err
    assert len(answer.err.strip().splitlines()) == 1
