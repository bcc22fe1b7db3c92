"""The commands that docs/commands.md shows are ones that bigscl has, and its outputs can be made again."""

import re
import shlex
import shutil
import subprocess
from types import SimpleNamespace

import pytest
import typer
import yaml
from braceexpand import braceexpand

from bigscl.memory.score_history import ScoreLog
from bigscl.store import HeatmapStore, SingleProcess
from bigscl.tools.cli import VERBS, app
from tests.builders import make_store
from tests.test_tools.conftest import add_config, bigscl
from tests.tools_readme import PAGE, ROOT, commands, portable, renewed, went_well, workplace

SHELL = ("head",)


def words_of(command: str) -> list[str]:
    """The words after `bigscl`, as the shell passes them."""
    words = [word for part in shlex.split(command) for word in braceexpand(part)]
    return words[words.index("bigscl") + 1 :]


def parsed(words: list[str]):
    """The command that the words call, its arguments checked but not executed."""
    command = typer.main.get_command(app)
    context = typer.Context(command)
    while hasattr(command, "get_command"):
        name, *words = words
        command = command.get_command(context, name)
        assert command is not None, f"there is no verb {name}"
    return command.make_context(command.name, words)


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory, index):
    """What the commands of the page read of a quickstart."""
    folder = tmp_path_factory.mktemp("quickstart")
    for name in ("en", "scl"):
        make_store(folder / name / "store", index, skill=1.0 if name == "scl" else 0.4)
        scores = HeatmapStore.open(folder / name / "store").read(index.ids()).scores
        log = ScoreLog(folder / name, index.annotations(), SingleProcess(), 4)
        log.note(index.ids(), scores)
        log.write(0)
        add_config(folder / name, index)
        config = yaml.safe_load((folder / name / "config.yaml").read_text())
        (folder / name / "config.yaml").write_text(yaml.safe_dump(config | {"run": str(folder / name)}))
    (folder / "results.json").write_text("{}")
    return folder


@pytest.fixture
def place(quickstart, monkeypatch):
    with workplace(quickstart) as place:
        monkeypatch.chdir(place)
        yield place


def answer(words: list[str]) -> str:
    """Like `executed`, in this process."""
    if words[0] in SHELL:
        return subprocess.run(words, check=True, capture_output=True, text=True).stdout
    done = bigscl(*words[1:])
    assert went_well(words, done.code), f"{words}: {done.err}"
    return done.out


@pytest.mark.parametrize("command", [each for each in commands(PAGE.read_text()) if "bigscl" in each])
def test_every_command_of_the_page_parses_and_its_configs_exist(command):
    words = words_of(command)
    parsed(words)
    configs = [word for word in shlex.split(command) if word.startswith("configs/")]
    for config in (path for word in configs for path in braceexpand(word)):
        assert (ROOT / config).exists(), config


def test_the_table_has_every_verb():
    rows = re.findall(r"^\| (`.*?) \|", PAGE.read_text(), flags=re.MULTILINE)
    named = {word for row in rows for word in re.findall(r"`(\w+)", row)}
    assert named == set(VERBS)


def test_no_command_of_the_page_that_is_executed_changes_a_store():
    assert not [command for command in commands(PAGE.read_text(), marked_only=True) if "--apply" in command]


def test_every_marked_command_of_the_page_works_and_its_output_is_written(place, monkeypatch):
    # `plan` of ImageNet's store ends with 1 where the disk has no 26 GB.
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10**12))
    page = PAGE.read_text()
    once = renewed(page, lambda words: portable(answer(words), place))
    assert commands(once) == commands(page)
    assert "30 samples in 4 shards" in once
    assert str(place) not in once
    assert once != page
