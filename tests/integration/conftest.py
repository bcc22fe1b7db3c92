"""Shards and uninterrupted runs that several tests compare with: made once, for all workers."""

from pathlib import Path

import pytest

from tests.integration.runs import launch, make_shards, train, write_config
from tests.sharing import make_once

NUM_SCENES = 150


@pytest.fixture(scope="session")
def shards(tmp_path_factory):
    """Ten shards, the last one shorter."""
    return make_once(tmp_path_factory, "shards", lambda folder: make_shards(folder, NUM_SCENES, 16, val=12))


@pytest.fixture(scope="session")
def few_shards(tmp_path_factory):
    """The same scenes in three shards: fewer than some runs have ranks."""
    return make_once(tmp_path_factory, "few-shards", lambda folder: make_shards(folder, NUM_SCENES, 64))


@pytest.fixture(scope="session")
def plain(tmp_path_factory, shards) -> Path:
    """The folder of a run on one process, with one worker and the store on disk, in an interpreter."""

    def make(folder: Path) -> None:
        done = launch(write_config(folder / "run.yaml", shards))
        assert done.returncode == 0, done.stderr

    return make_once(tmp_path_factory, "plain", make) / "run"


@pytest.fixture(scope="session")
def noisy(tmp_path_factory, shards) -> dict[int, Path]:
    """Uninterrupted runs of a network with batch statistics and dropout, by their number of processes.

    The two processes are started by accelerate's launcher.
    """

    def make(folder: Path) -> None:
        for processes, start in ((1, train), (2, launch)):
            config = write_config(
                folder / f"run{processes}.yaml",
                shards,
                model={"backbone": "tests.integration.tiny:noisy_net"},
            )
            done = start(config, processes=processes)
            assert done.returncode == 0, done.stderr

    folder = make_once(tmp_path_factory, "noisy", make)
    return {processes: folder / f"run{processes}" for processes in (1, 2)}
