"""Runs to try the tools on, and the way to call them."""

import contextlib
import io
import json
import shutil
from dataclasses import dataclass
from typing import Any

import pytest

from bigscl.tools.cli import main
from tests.builders import make_store, scene_index
from tests.test_tools.view_site import browser, page  # noqa: F401 - fixtures


@dataclass(frozen=True)
class Answer:
    """What a command said."""

    code: int
    out: str
    err: str

    def json(self) -> Any:
        return json.loads(self.out)


def bigscl(*arguments: Any) -> Answer:
    """The command, in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main([str(argument) for argument in arguments])
            code: Any = 0
        except SystemExit as end:
            code = end.code
    return Answer(code or 0, out.getvalue(), err.getvalue())


@pytest.fixture(scope="session")
def index(tmp_path_factory):
    """30 scenes in 4 shards, the last one smaller."""
    return scene_index(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session")
def runs(tmp_path_factory, index):
    """A folder of finished runs: dense, weak (a worse network) and topk, each with its config."""
    folder = tmp_path_factory.mktemp("runs")
    made = {"dense": {}, "weak": {"skill": 0.4}, "topk": {"top": 4}}
    for name, settings in made.items():
        make_store(folder / name / "store", index, **settings)
        add_config(folder / name, index)
    return folder


@pytest.fixture(scope="session")
def bare(tmp_path_factory, index):
    """A store outside of any run's folder."""
    place = tmp_path_factory.mktemp("bare") / "store"
    make_store(place, index, epochs=1)
    return place


@pytest.fixture(scope="session")
def other_shards(tmp_path_factory):
    """Shards that no store here was made for."""
    return scene_index(tmp_path_factory.mktemp("other"), train=3).urls[0]


def add_config(run, index):
    """The config that a run leaves in its folder, as far as the tools read it."""
    pattern = index.urls[0].replace("000000", "*")
    (run / "config.yaml").write_text(f"data:\n  train: {pattern}\n")


@pytest.fixture
def run(tmp_path, runs):
    """A dense run of one's own, to be changed."""
    shutil.copytree(runs / "dense", tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def topk(tmp_path, runs):
    """A compacted run of one's own, to be changed."""
    shutil.copytree(runs / "topk", tmp_path / "topk")
    return tmp_path / "topk"
