"""The quickstart's commands; the runs themselves take minutes and are the README's first command."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bigscl.config import load_config
from bigscl.evaluation.localization import STORED
from bigscl.tools.cli import app
from bigscl.tools.quickstart import DEFAULT_FOLDER, METHODS, QuickstartRun, _figures, _table
from bigscl.tools.running import CONFIGS, Runner


def test_default_commands_need_no_settings_beyond_the_configs():
    for name in ("pretrain", *METHODS):
        assert QuickstartRun(DEFAULT_FOLDER, 0, None, Runner())._settings(name) == []
        config = load_config(CONFIGS / f"quickstart_{name}.yaml")
        assert config.run == DEFAULT_FOLDER / name


@pytest.mark.parametrize("name", ["pretrain", *METHODS])
def test_another_folder_and_seed_reach_the_run_as_settings(name):
    settings = QuickstartRun(Path("elsewhere"), 3, 2, Runner())._settings(name)
    config = load_config(CONFIGS / f"quickstart_{name}.yaml", settings)
    assert (config.run, config.seed, config.schedule.main.epochs) == (Path("elsewhere") / name, 3, 2)
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
    assert "expected some of an, en, cl, scl, bce" in str(result.exception)


def test_the_table_shows_the_figures_of_the_reports(tmp_path):
    heat = {"observed": {"hit_rate": 0.5}, "missing": {"hit_rate": 0.25}}
    report = {"mean_ap": {"present": 0.756}, "localization": {STORED: heat}}
    path = tmp_path / "report.json"
    path.write_text(json.dumps(report))
    lines = _table({"scl": _figures(path)}).splitlines()
    assert lines[1].split()[-3:] == ["75.6%", "50.0%", "25.0%"]
