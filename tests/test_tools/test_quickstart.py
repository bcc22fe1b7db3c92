"""The quickstart's commands; the runs themselves take minutes and are the README's first command."""

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from bigscl.config import load_config, to_yaml
from bigscl.config.load import FOLDER
from bigscl.evaluation.localization import STORED
from bigscl.tools.cli import app
from bigscl.tools.shared.running import Runner
from bigscl.tools.shared.study_report import differences_from, mined_figures, quickstart_figures
from bigscl.tools.verbs.quickstart import DEFAULT_FOLDER, METHODS, QuickstartRun, _table
from tests.builders import config_of, make_store
from tests.test_bigscl.test_report import saved


def test_default_commands_need_no_settings_beyond_the_configs():
    for name in ("pretrain", *METHODS):
        assert QuickstartRun(DEFAULT_FOLDER, 0, None, Runner())._settings(name) == []
        config = load_config(FOLDER / f"quickstart_{name}.yaml")
        assert config.run == DEFAULT_FOLDER / name


@pytest.mark.parametrize("name", ["pretrain", *METHODS])
def test_another_folder_and_seed_reach_the_run_as_settings(name):
    settings = QuickstartRun(Path("elsewhere"), 3, 2, Runner())._settings(name)
    config = load_config(FOLDER / f"quickstart_{name}.yaml", settings)
    assert (config.run, config.seed, config.schedule.main.epochs) == (Path("elsewhere") / name, 3, 2)
    assert config.validation.every_epochs == 1, "else a trial of two epochs has no best weights to start from"
    assert config.data.train.startswith("elsewhere/scenes/")
    weights = "elsewhere/pretrain/best/model.safetensors"
    assert config.model.weights == (None if name == "pretrain" else weights)


def test_what_is_there_is_not_made_again(tmp_path, monkeypatch):
    ran = []
    monkeypatch.setattr(QuickstartRun, "_run", lambda self, *words: ran.append(words))
    (tmp_path / "an" / "test").mkdir(parents=True)
    (tmp_path / "an" / "done").touch()
    (tmp_path / "an" / "test" / "report.json").touch()
    quickstart_run = QuickstartRun(tmp_path, 0, None, Runner())
    quickstart_run.train("an")
    quickstart_run.evaluate("an")
    assert ran == []


def test_unknown_methods_are_refused():
    result = CliRunner().invoke(app, ["quickstart", "--methods", "an,magic"])
    assert isinstance(result.exception, ValueError)
    assert "expected some of an, en, cl, scl, scl_plus, bce" in str(result.exception)


def test_the_table_shows_f1_intervals_and_mined_labels_beside_the_map(tmp_path):
    heat = {"given": {"hit_rate": 0.5}, "missing": {"hit_rate": 0.25}}
    report = {
        "mean_ap": {"present": 0.756},
        "at_threshold": {"overall_f1": 0.4},
        "localization": {STORED: heat},
    }
    path = tmp_path / "report.json"
    path.write_text(json.dumps(report))
    figures = {**quickstart_figures(path), "mined_precision": 0.61, "mined_recall": None}
    labels = np.random.default_rng(0).integers(0, 2, (60, 4)).astype(np.int8)
    for name, strength in {"en": 0.5, "scl": 2.0}.items():
        noise = np.random.default_rng(1).normal(size=labels.shape)
        saved(strength * labels + noise, labels).save(tmp_path / name / "test" / "predictions.zarr")
    differences = differences_from(tmp_path, ["scl", "en"], "en")
    change = differences["scl"]["map_over_en"]
    assert 0 < change["low"] < change["difference"] < change["high"]
    head, scl, en = _table({"scl": figures, "en": figures}, differences, "en").splitlines()
    assert head.split()[:7] == ["test", "mAP", "over", "EN", "F1", "over", "EN"]
    assert f"+{100 * change['difference']:.1f} [+{100 * change['low']:.1f}," in scl
    assert "75.6%" in scl
    assert "40.0%" in scl
    assert scl.split()[-4:] == ["61.0%", "–", "50.0%", "25.0%"]
    assert "[" not in en


def test_mined_labels_of_a_run_are_those_of_a_study(tmp_path, index):
    make_store(tmp_path / "store", index)
    train, config = index.urls[0].replace("000000", "*"), tmp_path / "config.yaml"
    config.write_text(to_yaml(config_of(run=str(tmp_path), data={"train": train}, selection={"K": 2.5})))
    found = mined_figures(tmp_path)
    assert found["mined_precision"] > 0.8
    assert 0.5 < found["mined_recall"] < 1
    config.write_text(to_yaml(config_of(run=str(tmp_path), data={"train": train, "labels": "full"})))
    assert mined_figures(tmp_path) == {"mined_precision": None, "mined_recall": None}
