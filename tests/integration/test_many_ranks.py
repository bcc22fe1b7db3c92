"""Sixteen ranks train, are stopped, and resume as five: each sample once per epoch."""

import time

import pytest

from bigscl.training.options import StopFile
from tests.builders import make_shards, write_config
from tests.integration.runs import TIMEOUT, ids_of, steps_of, train
from tests.integration.test_resume import assert_each_sample_once, visited_by_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_sixteen_ranks_are_stopped_and_resume_as_five_each_sample_once(tmp_path, trainer_server):
    shards = make_shards(tmp_path / "shards", 600, 20)
    config = write_config(
        tmp_path / "run.yaml",
        shards,
        data={"batch_size": 2, "workers": 0},
        model={"backbone": "tests.integration.tiny:noisy_net"},
        log={"trackers": [], "pictures_every": 0, "every_steps": 1, "ids": True},
    )
    run, output = tmp_path / "run", tmp_path / "output.txt"
    words = ("tests.fork_server:run_module", "bigscl.train", config)
    ranks = trainer_server.start_ranks(*words, processes=16, output=output)
    deadline = time.monotonic() + TIMEOUT
    while steps_of(run) < 25:
        assert time.monotonic() < deadline, output.read_text()
        time.sleep(0.01)
    StopFile(run).request()
    ended = trainer_server.wait_all(ranks, TIMEOUT)
    assert {ended[rank].code for rank in ranks} == {0}, output.read_text()
    epoch, had = visited_by_checkpoint(run, shards)
    assert 0 < len(had) < 600, "stopped in the middle of an epoch"
    logged = ids_of(run)
    assert {n for seen, n in logged if seen == epoch} == had
    assert set(logged.values()) == {1}
    for file in run.glob("ids-*.txt"):
        file.unlink()
    train(config, processes=5)
    assert_each_sample_once(run, shards, epoch, had)
