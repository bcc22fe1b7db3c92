"""Shards and uninterrupted runs that several tests compare with: made once."""

from pathlib import Path

import pytest

from tests.integration.runs import launch, make_shards, train, write_config

NUM_SCENES = 150


@pytest.fixture(scope="session")
def shards(tmp_path_factory):
    """Ten shards, the last one shorter."""
    return make_shards(tmp_path_factory.mktemp("shards"), NUM_SCENES, 16, val=12)


@pytest.fixture(scope="session")
def few_shards(tmp_path_factory):
    """The same scenes in three shards: fewer than some runs have ranks."""
    return make_shards(tmp_path_factory.mktemp("few-shards"), NUM_SCENES, 64)


@pytest.fixture(scope="session")
def plain(tmp_path_factory, shards) -> Path:
    """The folder of a run on one process, with one worker and the store on disk, in an interpreter."""
    config = write_config(tmp_path_factory.mktemp("plain") / "run.yaml", shards)
    done = launch(config)
    assert done.returncode == 0, done.stderr
    return config.with_suffix("")


@pytest.fixture(scope="session")
def noisy(tmp_path_factory, shards) -> dict[int, Path]:
    """Uninterrupted runs of a network with batch statistics and dropout, by their number of processes.

    The two processes are started by accelerate's launcher.
    """
    folder = tmp_path_factory.mktemp("noisy")
    runs = {}
    for processes, start in ((1, train), (2, launch)):
        config = write_config(
            folder / f"run{processes}.yaml", shards, model={"backbone": "tests.integration.tiny:noisy_net"}
        )
        done = start(config, processes=processes)
        assert done.returncode == 0, done.stderr
        runs[processes] = config.with_suffix("")
    return runs
