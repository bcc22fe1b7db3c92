"""What a launcher and its ranks do when one rank fails, and when a batch system ends the job.

`pytest -m slow tests/distributed/test_launcher.py`
"""

import contextlib
import signal
import time

import psutil
import pytest

from bigscl.training.checkpoint_folder import Checkpoints
from tests.builders import write_config
from tests.distributed.sabotage import REASON
from tests.integration.runs import Running, assert_same_runs, steps_of

SCENES = (150, 16)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
SECONDS = 15
"""Well below the 30 seconds after which the launcher kills its ranks."""
SLOW_SECONDS = 40


def config_of(path, shards, **sections):
    data = {"batch_size": 2, "workers": 2}
    return write_config(
        path, shards, model={"backbone": "tests.distributed.sabotage:net"}, data=data, **sections
    )


def environment_of(folder, kinds, **more):
    return {"SABOTAGE": kinds, "SABOTAGE_FOLDER": str(folder), **more}


@pytest.fixture(scope="module")
def whole(tmp_path_factory, shards):
    """An uninterrupted run on two ranks."""
    config = config_of(tmp_path_factory.mktemp("whole") / "run.yaml", shards)
    environment = environment_of(config.parent, "")
    with Running(config.with_suffix(""), config, processes=2, environment=environment) as running:
        assert running.wait() == 0, running.output
    return config.with_suffix("")


# One rank fails


@pytest.mark.parametrize("where", ["step", "loader", "thread", "commit"])
def test_error_on_one_of_four_ranks_ends_all_in_seconds_with_its_reason_last(tmp_path, shards, where):
    """Also where destroying the group waits for all ranks, as NCCL's does."""
    config = config_of(tmp_path / "run.yaml", shards)
    environment = environment_of(tmp_path, f"{where} destroy")
    with Running(tmp_path / "run", config, processes=4, environment=environment) as running:
        assert running.wait_for_step(2), running.output
        ranks, deadline = running.ranks(), time.monotonic() + 120
        while all(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks):
            assert time.monotonic() < deadline, running.output
            time.sleep(0.02)
        failed = time.monotonic()
        assert running.wait(60) != 0
        assert time.monotonic() - failed < SECONDS, running.output
    assert "forcefully exiting" not in running.output
    *_, last = running.output.partition("Root Cause (first observed failure):")
    assert REASON in last, running.output
    assert "rank      : 3" in last
    assert "Traceback (most recent call last)" in last


def test_group_that_is_destroyed_together_ends_a_run_that_went_well(tmp_path, shards, whole):
    config = config_of(tmp_path / "run.yaml", shards)
    environment = environment_of(tmp_path, "destroy")
    with Running(tmp_path / "run", config, processes=2, environment=environment) as running:
        assert running.wait() == 0, running.output
    assert_same_runs(tmp_path / "run", whole, shards)


# The job is ended


def everything(running):
    """The launcher, its ranks and their loader workers."""
    launcher = psutil.Process(running.launcher.pid)
    return [launcher, *launcher.children(recursive=True)]


def terminate(processes):
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGTERM)


def terminate_tree(running):
    terminate(everything(running))


def terminate_launcher(running):
    terminate(everything(running)[:1])


def terminate_tree_twice(running):
    terminate(everything(running))
    time.sleep(0.2)
    terminate(everything(running))


@pytest.mark.parametrize("how", [terminate_tree, terminate_launcher, terminate_tree_twice])
@pytest.mark.parametrize("try_number", range(3))
def test_terminated_job_is_saved_and_resumes_bit_for_bit(tmp_path, shards, whole, how, try_number):
    config = config_of(tmp_path / "run.yaml", shards)
    environment = environment_of(tmp_path, "")
    with Running(tmp_path / "run", config, processes=2, environment=environment) as running:
        assert running.wait_for_step(5 + 7 * try_number), running.output
        how(running)
        running.wait(60)
        assert "is saved. Resume with the same command." in running.output, running.output
    done = steps_of(tmp_path / "run")
    assert Checkpoints(tmp_path / "run" / "checkpoints", 1).latest().progress.step == done
    resume(tmp_path, config, environment)
    assert_same_runs(tmp_path / "run", whole, shards)


def resume(folder, config, environment):
    with Running(folder / "run", config, processes=2, environment=environment) as running:
        assert running.wait() == 0, running.output


@pytest.mark.parametrize("patience", [None, "120"])
def test_save_that_takes_longer_than_the_launcher_waits_by_itself(tmp_path, shards, whole, patience):
    """TORCH_ELASTIC_SHUTDOWN_TIMEOUT makes it wait; without it nothing is saved, and nothing is lost."""
    config = config_of(tmp_path / "run.yaml", shards)
    environment = environment_of(tmp_path, "slow_save", SABOTAGE_SECONDS=str(SLOW_SECONDS))
    if patience is not None:
        environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = patience
    with Running(tmp_path / "run", config, processes=2, environment=environment) as running:
        assert running.wait_for_step(5), running.output
        terminate_tree(running)
        running.wait(120)
        assert ("is saved. Resume" in running.output) == (patience is not None), running.output
    assert bool(Checkpoints(tmp_path / "run" / "checkpoints", 1).paths()) == (patience is not None)
    resume(tmp_path, config, environment_of(tmp_path, ""))
    assert_same_runs(tmp_path / "run", whole, shards)
