"""`bigscl stop` ends a run after its step, saved, and the run resumes as if it had never stopped."""

import pytest

from tests.builders import write_config
from tests.integration.runs import Running, assert_same_runs, train
from tests.test_tools.conftest import bigscl

NOISY = {"backbone": "tests.integration.tiny:noisy_net"}


@pytest.mark.parametrize("processes", [1, 2])
def test_run_that_is_asked_to_stop_saves_exits_0_and_resumes_bit_for_bit(tmp_path, shards, noisy, processes):
    config = write_config(tmp_path / "run.yaml", shards, model=NOISY)
    with Running(tmp_path / "run", config, processes=processes) as running:
        assert running.wait_for_step(3)
        answer = bigscl("stop", tmp_path / "run", "--wait", 60, "--json")
        assert answer.code == 0, answer.err
        assert answer.json() == {"run": str(tmp_path / "run"), "requested": True, "saved": True}
        assert running.wait() == 0, running.output
        assert "stopped as asked" in running.output
    assert not (tmp_path / "run" / "stop").exists()
    train(config, processes=processes)
    assert_same_runs(tmp_path / "run", noisy[processes], shards)


def test_request_that_no_run_meets_is_removed_by_the_next_start(tmp_path, plain):
    answer = bigscl("stop", plain)
    assert answer.code == 0
    assert "if it is training" in answer.out
    assert bigscl("stop", plain, "--wait", 0.1).code == 1
    assert bigscl("stop", plain, "--cancel").code == 0
    assert not (plain / "stop").exists()
