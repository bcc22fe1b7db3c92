"""Runs that are killed or asked to stop at any moment, and go on as if nothing had happened.

A moment is a random step and a random time after it. With a checkpoint every third step, most of a run's time
goes into commits and checkpoints, so many of the kills fall into one. The uninterrupted runs have none in
mid-epoch, so that these cannot matter either.
"""

import contextlib
import os
import random
import shutil
import signal
import time

import numpy as np
import psutil
import pytest

from bigscl.common import failures
from bigscl.training.checkpoint_folder import Checkpoints
from tests.builders import index_of, write_config
from tests.integration.runs import (
    TIMEOUT,
    Running,
    assert_same_runs,
    copy_run,
    ids_of,
    memory_of,
    steps_of,
    store_of,
    train,
)

# The first test of a file also pays for the runs that the others compare with.
pytestmark = pytest.mark.timeout(360)
NUM_STEPS = {1: 57, 2: 30}
STOPPED = "is saved. Resume with the same command."


def noisy_config(path, shards):
    return write_config(
        path,
        shards,
        model={"backbone": "tests.integration.tiny:noisy_net"},
        checkpoint={"every_steps": 3},
        log={"trackers": [], "pictures_every": 0, "every_steps": 1, "ids": True},
    )


def interrupt(config, moments, how, processes=1):
    """Start the run or go on with it, and end it somewhere on its way; False if it was done before."""
    folder = config.with_suffix("")
    # In the next third of what is left, so that a run is interrupted often before it is done.
    had = steps_of(folder)
    step = had + moments.randint(1, max(1, (NUM_STEPS[processes] - had) // 3))
    with Running(folder, config, processes=processes) as running:
        if running.wait_for_step(step):
            time.sleep(moments.uniform(0, 0.1))
            return how(running)
        assert running.wait() == 0, running.output
    return False


def kill(running):
    running.kill()
    return True


def kill_a_rank(running):
    """The others end with it, of themselves: before the launcher loses its patience of 30 seconds."""
    running.ranks()[-1].kill()
    assert running.wait(60) != 0, running.output
    assert "forcefully exiting" not in running.output, running.output
    return True


def stop(running):
    """A signal to one rank stops all, unless there was no step left to stop after."""
    running.ranks()[-1].send_signal(signal.SIGTERM)
    return was_stopped(running)


def was_stopped(running):
    """Whether the run ended before its last step; its exit code says the same, a launcher's in part."""
    code, stopped = running.wait(60), STOPPED in running.output
    if running.is_launched:
        assert code or not stopped, running.output
    else:
        assert code == (failures.STOPPED if stopped else 0), running.output
    return stopped


def stop_forked_ranks(server, config, step):
    """The same without a launcher, in the middle of a run on two ranks."""
    output = config.with_suffix(".txt")
    words = ("tests.fork_server:run_module", "bigscl.train", config)
    ranks = server.start_ranks(*words, processes=2, output=output)
    deadline = time.monotonic() + TIMEOUT
    while steps_of(config.with_suffix("")) < step:
        assert time.monotonic() < deadline, output.read_text()
        time.sleep(0.01)
    os.kill(ranks[-1], signal.SIGTERM)
    ended = server.wait_all(ranks)
    stopped = STOPPED in output.read_text()
    expected = failures.STOPPED if stopped else 0
    assert [ended[rank].code for rank in ranks] == [expected] * 2, output.read_text()
    return stopped


def stop_everything(running):
    """As batch systems do it: the signal goes to every process of the ranks, also to the image readers."""
    for rank in running.ranks():
        for process in [rank, *rank.children()]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGTERM)
    return was_stopped(running)


def stop_launcher(running):
    """The launcher hands the signal on; it cannot know that the ranks ended well."""
    running.launcher.send_signal(signal.SIGTERM)
    running.wait(60)
    return STOPPED in running.output


def press_ctrl_c(running):
    """A terminal signals the whole foreground group. Torch's launcher signals its ranks in turn."""
    os.killpg(running.launcher.pid, signal.SIGINT)
    return was_stopped(running)


def kill_launcher(running):
    """The ranks and their loader workers notice, and end of themselves."""
    started = psutil.Process(running.launcher.pid).children(recursive=True)
    running.launcher.kill()
    _, alive = psutil.wait_procs(started, timeout=60)
    assert not alive, running.output
    return True


def visited_by_checkpoint(folder, shards):
    """(epoch, ids that it has had) according to the newest checkpoint."""
    latest = Checkpoints(folder / "checkpoints", 1).latest()
    stamps = store_of(folder, shards, latest.progress.snapshot).last_epochs()
    return latest.progress.epoch, set(np.flatnonzero(stamps == latest.progress.epoch).tolist())


def assert_each_sample_once(folder, shards, epoch, had, epochs=3):
    """In all that a run trained since it was resumed in mid-epoch."""
    everything = set(index_of(shards).ids().tolist())
    wanted = {(epoch, n): 1 for n in everything - had}
    wanted |= {(later, n): 1 for later in range(epoch + 1, epochs) for n in everything}
    assert ids_of(folder) == wanted
    assert (memory_of(folder, shards)["last_epoch"] == epochs - 1).all()


def test_run_that_is_killed_and_stopped_ends_as_if_it_never_was(tmp_path, noisy, shards):
    config, moments = noisy_config(tmp_path / "run.yaml", shards), random.Random(1)
    for how in (kill, stop_everything, press_ctrl_c):
        assert interrupt(config, moments, how)
    train(config)
    assert_same_runs(tmp_path / "run", noisy[1], shards)


def test_ranks_end_with_each_other_and_their_launcher_and_resume_bit_for_bit(tmp_path, noisy, shards):
    config, moments = noisy_config(tmp_path / "run.yaml", shards), random.Random(2)
    for how in (kill_a_rank, press_ctrl_c, kill_launcher):
        assert interrupt(config, moments, how, processes=2)
    train(config, processes=2)
    assert_same_runs(tmp_path / "run", noisy[2], shards)


@pytest.mark.parametrize("processes", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_resumed_ranks_add_up_gradients_in_the_same_order(tmp_path, shards, processes):
    """From three ranks on, a sum depends on how DDP packs the gradients before it adds them up."""
    config = noisy_config(tmp_path / "run.yaml", shards)
    train(config, processes=processes)
    resumed = copy_run(tmp_path / "run", tmp_path / "resumed")
    *_, middle, _ = sorted((resumed / "checkpoints").iterdir())
    train(config, "--run", resumed, "--resume", middle, processes=processes)
    assert_same_runs(resumed, tmp_path / "run", shards)


@pytest.mark.parametrize(
    "objective",
    [
        {"base": "ll_cp", "large_loss": {"rate": 0.05}},
        {"base": "crisp"},
        # It keeps what ll_cp keeps; tests/integration/test_train_cli.py resumes it on one process.
        pytest.param({"base": "em_apl", "em_apl": {"start_epoch": 1}}, marks=pytest.mark.slow),
    ],
    ids=lambda objective: objective["base"],
)
def test_what_a_loss_keeps_is_resumed_within_an_epoch_bit_for_bit(tmp_path, shards, objective):
    """In the middle of the second of three epochs: the third depends on what both parts of it have left."""
    config = write_config(
        tmp_path / "run.yaml", shards, objective=objective, checkpoint={"every_steps": 16, "every_epochs": 3}
    )
    train(config, processes=2)
    resumed = copy_run(tmp_path / "run", tmp_path / "resumed")
    first = min((resumed / "checkpoints").iterdir())
    assert first.name.endswith("16")
    train(config, "--run", resumed, "--resume", first, processes=2)
    assert_same_runs(resumed, tmp_path / "run", shards)


@pytest.mark.parametrize("codec", [pytest.param("none", marks=pytest.mark.slow), "uint8"])
def test_scl_plus_is_resumed_within_an_epoch_bit_for_bit(tmp_path, shards, codec):
    """Rankings, visits, K of each class and rounded heatmaps come back with the snapshot."""
    config = write_config(
        tmp_path / "run.yaml",
        shards,
        objective={"base": "enp", "consistency": "scl_corrected"},
        selection={"K": 1.7, "by": "spatial", "per_class": True},
        store={"codec": codec},
        checkpoint={"every_steps": 16, "every_epochs": 3},
    )
    train(config, processes=2)
    resumed = copy_run(tmp_path / "run", tmp_path / "resumed")
    train(config, "--run", resumed, "--resume", min((resumed / "checkpoints").iterdir()), processes=2)
    assert_same_runs(resumed, tmp_path / "run", shards)


def test_stopped_run_goes_on_with_fewer_or_more_processes_each_sample_once(tmp_path, trainer_server, shards):
    config = noisy_config(tmp_path / "run.yaml", shards)
    assert stop_forked_ranks(trainer_server, config, step=12)
    epoch, had = visited_by_checkpoint(tmp_path / "run", shards)
    logged = ids_of(tmp_path / "run")
    assert {n for seen, n in logged if seen == epoch} == had
    assert set(logged.values()) == {1}
    for processes in (1, 3):
        folder = copy_run(tmp_path / "run", tmp_path / f"run-{processes}")
        train(config, "--run", folder, processes=processes)
        assert_each_sample_once(folder, shards, epoch, had)


def test_only_rank_0_lists_folders_and_reads_visit_stamps(tmp_path, trainer_server, noisy, shards):
    config = noisy_config(tmp_path / "run.yaml", shards)
    assert stop_forked_ranks(trainer_server, config, step=12)
    done = trainer_server.run_module("tests.integration.blind_ranks", config, processes=2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_same_runs(tmp_path / "run", noisy[2], shards)


def test_killed_run_repeats_only_what_no_checkpoint_has(tmp_path, shards):
    """Also the log of ids: what was logged after the checkpoint is trained again."""
    config = noisy_config(tmp_path / "run.yaml", shards)
    with Running(tmp_path / "run", config) as running:
        assert running.wait_for_step(30)
        kill(running)
    epoch, had = visited_by_checkpoint(tmp_path / "run", shards)
    for file in (tmp_path / "run").glob("ids-*.txt"):
        file.unlink()
    train(config, "--data.workers", 2)
    assert_each_sample_once(tmp_path / "run", shards, epoch, had)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("processes", "interruptions"), [(1, 20), (2, 10)])
def test_many_interruptions_end_as_if_there_were_none(tmp_path, noisy, shards, processes, interruptions):
    moments = random.Random(processes)
    config = noisy_config(tmp_path / "run.yaml", shards)
    ways = [kill, kill, stop, stop_everything, press_ctrl_c]
    if processes > 1:
        ways += [kill_a_rank, kill_launcher, stop_launcher]
    done = 0
    while done < interruptions:
        # Near its end a run may be done before it is interrupted, which only a kill does not mind.
        late = steps_of(tmp_path / "run") > NUM_STEPS[processes] - 10
        done += interrupt(config, moments, kill if late else moments.choice(ways), processes)
        if done == interruptions or steps_of(tmp_path / "run") == NUM_STEPS[processes]:
            train(config, processes=processes)
            assert_same_runs(tmp_path / "run", noisy[processes], shards)
            shutil.rmtree(tmp_path / "run")
