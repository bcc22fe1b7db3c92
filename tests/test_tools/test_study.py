"""Studies: what they run, that they go on where they stopped, and what their table says."""

import json
import math
import os
import signal
import statistics
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from bigscl.config import ConfigError
from bigscl.config.load import FOLDER as CONFIGS
from bigscl.data.build_index import scan
from bigscl.tools.shared.study_report import mean_and_spread, to_table
from bigscl.tools.verbs import study
from bigscl.tools.verbs.study import plan_trials
from tests.builders import labelled, settings, write_config, write_shards, write_tar
from tests.forks import ROOT, Child
from tests.test_tools.conftest import bigscl
from tests.test_tools.forked_study import module_words

SCENES = (24, 12, 12)

AN, SCL, ORACLE = (CONFIGS / f"voc12_lite0_{name}.yaml" for name in ("an", "scl", "bce"))


def test_every_config_and_variant_runs_with_every_seed_in_a_folder_of_its_own(tmp_path):
    trials = plan_trials(tmp_path, [AN, SCL], ["", "store.momentum=0.5"], [4, 5], ["data.workers=0"])
    assert [trial.seed for trial in trials] == [4] * 4 + [5] * 4
    assert len({trial.folder for trial in trials}) == 8
    for trial in trials:
        config = trial.resolved()
        assert (config.run, config.seed, config.data.given.seed) == (trial.folder, trial.seed, trial.seed)
        assert config.data.workers == 0
        assert config.store.momentum == (0.5 if trial.variant else 0.8)
    assert {trial.row for trial in trials} == {
        "voc12_lite0_an",
        "voc12_lite0_an store.momentum=0.5",
        "voc12_lite0_scl",
        "voc12_lite0_scl store.momentum=0.5",
    }


def test_no_labels_are_drawn_for_an_oracle(tmp_path):
    (trial,) = plan_trials(tmp_path, [ORACLE], [""], [1], [])
    assert trial.resolved().data.given is None


def test_labels_are_the_shards_own_if_asked(tmp_path):
    config = CONFIGS / "voc12_resnet50_scl.yaml"
    (trial,) = plan_trials(tmp_path, [config], [""], [1], [], redraw=False)
    assert trial.resolved().data.given is None


def test_a_variant_may_change_several_settings(tmp_path):
    variant = "data.crop.scale='[1.0, 1.0]' data.crop.flip=0"
    (trial,) = plan_trials(tmp_path, [SCL], [variant], [0], [])
    assert trial.resolved().data.crop.scale == (1.0, 1.0)
    assert trial.resolved().data.crop.flip == 0


def test_mistakes_are_found_before_anything_runs(tmp_path):
    with pytest.raises(ConfigError, match=r"store\.momentun: no such setting"):
        plan_trials(tmp_path, [AN, SCL], ["", "store.momentun=0.5"], [0], [])
    with pytest.raises(ValueError, match="expected KEY=VALUE, as"):
        plan_trials(tmp_path, [SCL], ["store.momentum"], [0], [])
    with pytest.raises(ValueError, match="two runs would share a folder"):
        plan_trials(tmp_path, [SCL, SCL], [""], [0], [])


def test_a_dry_run_shows_the_commands_and_makes_nothing(tmp_path):
    answer = bigscl("study", tmp_path / "out", AN, "--seeds", 1, "--dry-run", "--test", "test-*.tar")
    assert answer.code == 0
    training, evaluation = answer.out.splitlines()
    assert f"--run={tmp_path}/out/voc12_lite0_an/seed-0 --seed=0 --data.given.seed=0" in training
    assert "--shards 'test-*.tar'" in evaluation
    assert not (tmp_path / "out").exists()


def test_an_evaluation_on_other_shards_is_another_one(tmp_path):
    reports = [
        plan_trials(tmp_path, [AN], [""], [0], [], test=test)[0].report
        for test in ([], ["a/test-*.tar"], ["b/test-*.tar"])
    ]
    assert len(set(reports)) == 3
    assert reports[0].parent.name == "validation"


def test_shards_without_boxes_are_noticed_before_training(tmp_path):
    write_tar(tmp_path / "train-0.tar", labelled("s0", 0, full=[0], given=[0]))
    scan(str(tmp_path / "train-*.tar"), num_classes=2)[0].save(tmp_path / "bigscl-index-train.npz")
    data = {"data": {"train": str(tmp_path / "train-*.tar")}}
    config = write_config(tmp_path / "bare.yaml", tmp_path, **data)
    answer = bigscl("study", tmp_path / "out", config, "--seeds", 1)
    assert answer.code == 2
    assert "Add --no-boxes to skip it" in answer.err
    assert not (tmp_path / "out").exists()
    told = bigscl("study", tmp_path / "out", config, "--seeds", 1, "--no-boxes", "--dry-run")
    assert "--heatmaps" not in told.out


def test_shards_without_full_labels_are_noticed_before_training(tmp_path):
    scan(write_shards(tmp_path, [4]))[0].save(tmp_path / "bigscl-index-train.npz")
    config = write_config(tmp_path / "single.yaml", tmp_path)
    answer = bigscl("study", tmp_path / "out", config, "--seeds", 1, "--no-boxes")
    assert answer.code == 2
    assert "Add --same-labels" in answer.err
    assert not (tmp_path / "out").exists()


def test_the_table_has_means_spreads_and_differences_within_seeds():
    maps = {"a": (0.70, 0.80), "b": (0.71, 0.83)}
    runs = [
        {
            "row": row,
            "seed": seed,
            "map": value,
            "minutes": 2.0 + seed,
            **dict.fromkeys(("f1", "given", "missing", "mined_precision"), 0.5),
            "mined_recall": math.nan,
        }
        for row, values in maps.items()
        for seed, value in enumerate(values)
    ]
    # Both seeds see the same images: what they share of an image's luck does not average out.
    luck = np.linspace(-0.01, 0.01, 201)
    resampled = {(run["row"], run["seed"]): run["map"] + luck * (run["row"] == "b") for run in runs}
    first, second = (line.split(" | ") for line in to_table(runs, resampled).splitlines()[2:])
    assert first[:5] == ["| a", "2", f"75.0 ± {statistics.stdev((70, 80)):.1f}", "–", "–"]
    assert second[2:5] == ["77.0 ± 8.5", f"+2.0 ± {statistics.stdev((1, 3)):.1f}", "+1.1 to +2.9"]
    assert second[5:] == ["50.0 ± 0.0"] * 4 + ["–", "2.5 |"]


def test_one_seed_has_no_spread():
    assert mean_and_spread([0.123]) == "12.3"
    assert mean_and_spread([math.nan, 0.123]) == "12.3"
    assert mean_and_spread([]) == "–"


def write_configs(folder, shards, epochs):
    """A config of AN and one of the method, both tiny."""
    phases = {
        "warmup": {"epochs": 0, "learning_rate": 0.1},
        "main": {"epochs": epochs, "learning_rate": 0.01},
    }
    common = {
        "data": {**settings(shards)["data"], "val": str(shards / "val-*.tar"), "resize": "square"},
        "store": {"top": None},
        "schedule": phases,
    }
    an = write_config(folder / "an.yaml", shards, **common, objective={"base": "an", "consistency": "none"})
    return an, write_config(folder / "scl.yaml", shards, **common)


@pytest.fixture
def forked_commands(monkeypatch, trainer_server):
    """Let a study fork the trainer and the evaluation, instead of starting launchers and interpreters."""

    def start(words, *, stdout, env, **_):
        name, *arguments = module_words(words)
        output = Path(stdout.name if stdout else os.devnull)
        return Child(trainer_server, name, *arguments, output=output, environment=env)

    # Commands name files from where the study is called, which is where the server runs.
    monkeypatch.chdir(ROOT)
    patched = SimpleNamespace(Popen=start, STDOUT=subprocess.STDOUT)
    monkeypatch.setattr("bigscl.tools.shared.running.subprocess", patched)


@pytest.mark.timeout(300)
def test_a_stopped_study_saves_its_runs_and_goes_on_from_there(
    tmp_path, shards, forked_commands, trainer_server
):
    _, scl = write_configs(tmp_path, shards, epochs=12)
    words, output = (tmp_path / "out", scl, "--seeds", 1), tmp_path / "output.txt"
    study = Child(trainer_server, "tests.test_tools.forked_study", *words, output=output)
    run = tmp_path / "out" / "scl" / "seed-0"
    while not (run / "metrics.jsonl").exists() or len((run / "metrics.jsonl").read_text().splitlines()) < 10:
        assert study.poll() is None, output.read_text()
        time.sleep(0.01)
    study.send_signal(signal.SIGTERM)
    assert study.wait(60) == 130
    said = output.read_text()
    assert "the current runs are saved" in said
    assert list((run / "checkpoints").iterdir())
    assert not (run / "done").exists()

    assert bigscl("study", tmp_path / "out", scl, "--seeds", 1).code == 0
    assert (run / "done").exists()
    assert len((run / "environment.jsonl").read_text().splitlines()) == 2
    assert len((run / "seconds.txt").read_text().splitlines()) == 2


@pytest.mark.timeout(300)
def test_a_run_that_fails_leaves_the_others_to_go_on(tmp_path, shards, forked_commands):
    an, _ = write_configs(tmp_path, shards, epochs=1)
    diverging = "optimizer.name=sgd schedule.main.learning_rate=1e30 log.every_steps=1"
    variants = ("--vary", diverging, "--vary", "store.momentum=0.5", "--only-varied")
    answer = bigscl("study", tmp_path / "out", an, "--seeds", 1, *variants)
    assert answer.code == 1
    assert "1 of 2 runs are not in the table:\nthis command failed: accelerate launch" in answer.err
    (result,) = json.loads((tmp_path / "out" / "results.json").read_text())
    assert result["row"] == "an store.momentum=0.5"


@pytest.mark.timeout(300)
def test_a_study_runs_and_then_only_what_is_left(tmp_path, shards, forked_commands, monkeypatch):
    an, scl = write_configs(tmp_path, shards, epochs=1)
    arguments = ("study", tmp_path / "out", an, scl, "--seeds", 1, "--parallel", 2)

    answer = bigscl(*arguments)
    assert answer.code == 0, answer.err
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [result["row"] for result in results] == ["an", "scl"]
    for result in results:
        assert 0 < result["map"] < 1
        assert 0 <= result["mined_precision"] <= 1
        assert 0 <= result["missing"] <= 1
    assert (tmp_path / "out" / "results.md").read_text().splitlines()[5].startswith("| scl | 1 |")
    assert (tmp_path / "out" / "scores.png").exists()
    assert (tmp_path / "out" / "heatmaps.png").exists()
    assert (tmp_path / "out" / "an" / "seed-0" / "log.txt").read_text()

    (tmp_path / "out" / "scl" / "seed-0" / "validation" / "report.json").unlink()
    shown = []
    monkeypatch.setattr(study, "_show", lambda words, log: shown.append(words[2:4]))
    assert bigscl(*arguments).code == 0
    assert shown == [("bigscl.evaluate", str(tmp_path / "out" / "scl" / "seed-0"))]
    assert json.loads((tmp_path / "out" / "results.json").read_text()) == results

    # An evaluation from before there was map pooling is made again.
    report = tmp_path / "out" / "an" / "seed-0" / "validation" / "report.json"
    report.write_text(
        json.dumps({k: v for k, v in json.loads(report.read_text()).items() if k != "poolings"})
    )
    shown.clear()
    answer = bigscl(*arguments, "--pooling", "map")
    assert answer.code == 0, answer.err
    assert shown == [("bigscl.evaluate", str(tmp_path / "out" / "an" / "seed-0"))]
    assert json.loads((tmp_path / "out" / "results.json").read_text()) == results
    plain, pooled = (tmp_path / "out" / "results.md").read_text().split("With map pooling:")
    for result in results:
        for name, table in (("map", plain), ("map_with_map_pooling", pooled)):
            assert f"| {result['row']} | 1 | {100 * result[name]:.1f} | " in table

    changed = bigscl(*arguments, "--set", "store.momentum=0.3")
    assert changed.code == 2
    assert "was started with other settings (store.momentum: 0.3)" in changed.err
