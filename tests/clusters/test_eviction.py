"""One of two nodes is told to end: both end soon, with the exit code of a stopped run, and resume exactly.

`pytest -m slow tests/clusters/test_eviction.py`. Two launchers on the loopback stand for the pods of a Job.
"""

import signal
import subprocess
import sys
import time

import pytest

from bigscl.common.failures import STOPPED
from tests.builders import write_config
from tests.forks import free_port
from tests.integration.runs import ENVIRONMENT, ROOT, TIMEOUT, assert_same_runs, command, steps_of, train

SCENES = (150, 16)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SECONDS = 30
"""A stop takes a few; torch's launcher alone would wait 300 for the other one."""
WRAPPER = [sys.executable, "-m", "bigscl.launch"]


def accelerate(config, rank, port):
    machines = {"num_machines": 2, "machine_rank": rank, "main_process_ip": "127.0.0.1"}
    return command([config], processes=2, main_process_port=port, **machines)


def torchrun(config, rank, port):
    machines = ["--nnodes", "2", "--node-rank", str(rank), "--nproc-per-node", "1"]
    address = ["--master-addr", "127.0.0.1", "--master-port", str(port)]
    call = ["-m", "bigscl.train", str(config)]
    return [sys.executable, "-m", "torch.distributed.run", *machines, *address, *call]


class Pods:
    """Two launchers of one run, with one rank each; gone at the end of the block."""

    def __init__(self, launcher, config, wrapper=WRAPPER):
        self._run, port = config.with_suffix(""), free_port()
        self._logs = [config.with_name(f"pod-{rank}-{time.time_ns()}.log") for rank in range(2)]
        self.launchers = []
        for rank, log in enumerate(self._logs):
            words = [*wrapper, *launcher(config, rank, port)]
            with log.open("w") as file:
                self.launchers.append(
                    subprocess.Popen(words, cwd=ROOT, env=ENVIRONMENT, stdout=file, stderr=file)
                )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for each in self.launchers:
            each.kill()
            each.wait()

    @property
    def outputs(self):
        return [log.read_text() for log in self._logs]

    def wait_for_step(self, step):
        deadline = time.monotonic() + TIMEOUT
        while steps_of(self._run) < step:
            assert time.monotonic() < deadline, self.outputs
            assert [each.poll() for each in self.launchers] == [None, None], self.outputs
            time.sleep(0.02)

    def wait(self, seconds=TIMEOUT):
        deadline = time.monotonic() + seconds
        return [each.wait(max(0.1, deadline - time.monotonic())) for each in self.launchers]


def config_of(path, shards):
    data, model = {"batch_size": 2, "workers": 1}, {"backbone": "tests.integration.tiny:noisy_net"}
    return write_config(path, shards, data=data, model=model)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, shards):
    """An uninterrupted run on two ranks."""
    config = config_of(tmp_path_factory.mktemp("whole") / "run.yaml", shards)
    train(config, processes=2)
    return config.with_suffix("")


@pytest.mark.parametrize(
    ("launcher", "evicted", "number"),
    [
        (accelerate, 0, signal.SIGUSR1),
        (accelerate, 1, signal.SIGTERM),
        (torchrun, 0, signal.SIGTERM),
        (torchrun, 1, signal.SIGUSR1),
    ],
)
def test_signal_to_one_of_two_launchers_stops_both_with_one_code(
    tmp_path, shards, whole, launcher, evicted, number
):
    config = config_of(tmp_path / "run.yaml", shards)
    with Pods(launcher, config) as pods:
        pods.wait_for_step(10)
        pods.launchers[evicted].send_signal(number)
        assert pods.wait(SECONDS) == [STOPPED, STOPPED], pods.outputs
        assert pods.outputs[0].strip().splitlines()[-1].startswith("stopped as asked;"), pods.outputs
        assert not any("Traceback" in output for output in pods.outputs), pods.outputs
    stopped = steps_of(tmp_path / "run")
    with Pods(launcher, config) as pods:
        assert pods.wait() == [0, 0], pods.outputs
    assert steps_of(tmp_path / "run") > stopped
    assert_same_runs(tmp_path / "run", whole, shards)


@pytest.mark.parametrize("launcher", [accelerate, torchrun])
def test_bare_launchers_do_not_take_a_stopped_run_for_a_finished_one(tmp_path, shards, whole, launcher):
    """Their only code for a rank that did not end with 0 is 1."""
    config = config_of(tmp_path / "run.yaml", shards)
    with Pods(launcher, config, wrapper=[]) as pods:
        pods.wait_for_step(10)
        pods.launchers[1].send_signal(signal.SIGTERM)
        assert pods.wait(SECONDS) == [1, 1], pods.outputs
    with Pods(launcher, config, wrapper=[]) as pods:
        assert pods.wait() == [0, 0], pods.outputs
    assert_same_runs(tmp_path / "run", whole, shards)


def test_launcher_that_waits_for_another_node_ends_at_a_signal(tmp_path, shards):
    config = config_of(tmp_path / "run.yaml", shards)
    words = [*WRAPPER, *accelerate(config, 0, free_port())]
    alone = subprocess.Popen(words, cwd=ROOT, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
    time.sleep(12)
    alone.send_signal(signal.SIGTERM)
    said = alone.communicate(timeout=SECONDS)[1]
    assert alone.returncode == STOPPED
    assert said.endswith("bigscl.launch: stopped by SIGTERM before training began.\n")
