from importlib.metadata import version

import pytest
from typer.testing import CliRunner

from bigscl.tools.cli import VERBS, app, main


def test_version_is_the_installed_one():
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.output.strip() == f"bigscl {version('bigscl')}"


def test_unknown_verb_is_a_usage_error():
    assert CliRunner().invoke(app, ["frobnicate"]).exit_code == 2


def test_an_unreachable_object_store_is_one_line_and_exit_2(monkeypatch, capsys):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    with pytest.raises(SystemExit) as caught:
        main(["show", "s3://bucket/store", "--endpoint", "http://127.0.0.1:9"])
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("bigscl: s3://bucket/store at http://127.0.0.1:9: ")


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help(verb):
    result = CliRunner().invoke(app, [verb, "--help"])
    assert result.exit_code == 0
    assert "Usage" in result.output


@pytest.mark.parametrize(
    "verb", ["plan", "doctor", "show", "render", "export", "diff", "verify", "compact", "unlock"]
)
def test_help_shows_an_example(verb):
    text = " ".join(CliRunner().invoke(app, [verb, "--help"]).output.split())
    assert "Example: " in text
