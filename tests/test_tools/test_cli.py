import re
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import version
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from bigscl.common.command_line import Settings, make_command, run, start_is_over
from bigscl.config import ConfigError
from bigscl.store.backends import retries
from bigscl.tools.cli import VERBS, app, help_of, main


def test_version_is_the_installed_one():
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.output.strip() == f"bigscl {version('bigscl')}"


def test_unknown_verb_is_a_usage_error():
    assert CliRunner().invoke(app, ["frobnicate"]).exit_code == 2


def test_an_unreachable_object_store_is_one_line_and_exit_2(monkeypatch, capsys):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setattr(retries, "FIRST_CONTACT_SECONDS", 0.5)
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
    "verb", ["plan", "preflight", "show", "render", "export", "diff", "verify", "compact", "unlock"]
)
def test_help_shows_an_example(verb):
    text = " ".join(CliRunner().invoke(app, [verb, "--help"]).output.split())
    assert "Example: " in text


@pytest.mark.parametrize(
    "arguments", [["--help"], *([verb, "--help"] for verb in ("plan", "train", "evaluate"))]
)
def test_help_is_printed_without_torch_or_zarr(arguments):
    """Importing torch takes seconds, and zarr half of one. Verbs over stores import zarr."""
    code = "import sys; from bigscl.tools.cli import run, app, typer; "
    code += f"run(typer.main.get_command(app), {arguments}, 'bigscl'); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    modules = set(done.stdout.splitlines()[-1].split())
    assert "bigscl.common.command_line" in modules
    assert not {"torch", "matplotlib", "accelerate", "zarr", "numpy"} & modules or arguments[0] == "plan"
    assert not {"torch", "matplotlib", "accelerate", "zarr"} & modules


def test_the_module_is_the_same_command():
    done = subprocess.run(
        [sys.executable, "-m", "bigscl", "--version"], check=True, capture_output=True, text=True
    )
    assert done.stdout.strip() == f"bigscl {version('bigscl')}"


# Options that commands share


@dataclass(frozen=True)
class Place:
    """Where to look."""

    folder: Annotated[str, typer.Argument()]
    deep: Annotated[bool, typer.Option("--deep")] = False


def test_a_group_of_options_becomes_options_of_the_command():
    seen = []

    def command(place: Place, count: Annotated[int, typer.Option()] = 3) -> None:
        """Look there."""
        seen.append((place, count))

    assert run(make_command(command, "look"), ["here", "--deep", "--count", "4"], "look") == 0
    assert seen == [(Place(folder="here", deep=True), 4)]


def test_settings_are_the_words_that_are_no_options(capsys):
    seen = []

    def command(
        config: Annotated[str, typer.Argument()], settings: Settings = None, loud: bool = False
    ) -> None:
        seen.append((config, settings, loud))

    words = ["a.yaml", "--data.size", "3", "--loud", "--optimizer.clip=-1e-4", "--x", "-5"]
    assert run(make_command(command, "train"), words, "train") == 0
    assert seen == [("a.yaml", ["--data.size", "3", "--optimizer.clip=-1e-4", "--x", "-5"], True)]


def test_an_option_for_several_values_takes_what_a_shell_makes_of_a_glob():
    seen = []

    def command(
        model: Annotated[str | None, typer.Argument()] = None,
        shards: Annotated[list[str] | None, typer.Option()] = None,
        workers: int = 1,
    ) -> None:
        seen.append((model, shards, workers))

    made = make_command(command, "evaluate", ("--shards",))
    assert run(made, ["run", "--shards", "a", "b", "c", "--workers", "2"], "evaluate") == 0
    assert run(made, ["--shards", "a", "--shards", "b"], "evaluate") == 0
    assert seen == [("run", ["a", "b", "c"], 2), (None, ["a", "b"], 1)]


# The end of a command


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ConfigError("--top: 3, expected 4"), "--top: 3, expected 4"),
        (ValueError("heads: 3, expected 4"), None),
        (FileNotFoundError(2, "No such file or directory", "a.tar"), "a.tar: No such file or directory"),
        (ConnectionRefusedError(111, "Connection refused"), "Connection refused"),
        (UnicodeDecodeError("utf-8", b"x", 0, 1, "bad"), None),
        (KeyError("classes"), None),
        (OSError(9, "Bad file descriptor"), None),
    ],
)
def test_mistakes_end_in_one_line_and_bugs_in_a_traceback(capsys, error, told):
    def command() -> None:
        raise error

    if told is None:
        with pytest.raises(type(error)):
            run(make_command(command, "try"), [], "bigscl")
        return
    assert run(make_command(command, "try"), [], "bigscl") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("bigscl: ")
    assert told in line


def test_all_ranks_report_after_the_start_and_one_before(monkeypatch, capsys):
    monkeypatch.setenv("LOCAL_RANK", "1")

    def command(late: bool = False) -> None:
        if late:
            start_is_over()
        raise ConfigError("no")

    assert run(make_command(command, "try"), ["--late"], "bigscl") == 2
    assert capsys.readouterr().err == "bigscl: no\n"
    assert run(make_command(command, "try"), [], "bigscl") == 2
    assert run(make_command(command, "try"), ["--wrong"], "bigscl") == 2
    assert run(make_command(command, "try"), ["--help"], "bigscl") == 0
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")


def test_help_names_every_verb_with_its_sentence():
    lines = CliRunner().invoke(app, ["--help"]).stdout.splitlines()
    for name in VERBS:
        assert any(re.search(rf"\b{name}\s+{re.escape(help_of(name)[:20])}", line) for line in lines), name
