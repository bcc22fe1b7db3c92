from importlib.metadata import version

from typer.testing import CliRunner

from tools.cli import app


def test_version_is_the_installed_one():
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.output.strip() == f"bigscl {version('bigscl')}"


def test_unknown_verb_is_a_usage_error():
    assert CliRunner().invoke(app, ["frobnicate"]).exit_code == 2
