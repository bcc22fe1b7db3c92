"""Shards and uninterrupted runs that several tests compare with: made once, for all workers."""

from pathlib import Path

import pytest

from tests.builders import SCENES, make_once, shared_shards, write_config
from tests.integration.runs import launch, train


@pytest.fixture(scope="session")
def ten_shards(tmp_path_factory):
    """The last one is shorter."""
    return shared_shards(tmp_path_factory, *SCENES)


@pytest.fixture(scope="session")
def few_shards(tmp_path_factory):
    """The same scenes in three shards: fewer than some runs have ranks."""
    return shared_shards(tmp_path_factory, SCENES[0], 64)


@pytest.fixture(scope="session")
def plain(tmp_path_factory, ten_shards) -> Path:
    """The folder of a run on one process, with one worker and the store on disk, in an interpreter."""

    def make(folder: Path) -> None:
        done = launch(write_config(folder / "run.yaml", ten_shards))
        assert done.returncode == 0, done.stderr

    return make_once(tmp_path_factory, "plain", make) / "run"


@pytest.fixture(scope="session")
def noisy(tmp_path_factory, ten_shards) -> dict[int, Path]:
    """Uninterrupted runs of a network with batch statistics and dropout, by their number of processes.

    The two processes are started by accelerate's launcher.
    """

    def make(folder: Path) -> None:
        for processes, start in ((1, train), (2, launch)):
            config = write_config(
                folder / f"run{processes}.yaml",
                ten_shards,
                model={"backbone": "tests.integration.tiny:noisy_net"},
            )
            done = start(config, processes=processes)
            assert done.returncode == 0, done.stderr

    folder = make_once(tmp_path_factory, "noisy", make)
    return {processes: folder / f"run{processes}" for processes in (1, 2)}
