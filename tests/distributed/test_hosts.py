"""Two nodes with networks of their own find each other; the loss of a link ends both and loses nothing.

`pytest -m 'slow or not slow' tests/distributed/test_hosts.py`; needs root and iproute2, skipped elsewhere.
"""

import json
import subprocess
import sys
import time

import pytest

from tests.builders import write_config
from tests.distributed.hosts import hosts, need_hosts
from tests.forks import trainer_server
from tests.integration.runs import ENVIRONMENT, ROOT, TIMEOUT, assert_same_runs, command, steps_of, train
from tests.integration.test_resume import assert_each_sample_once, visited_by_checkpoint

SCENES = (60, 8)

pytestmark = pytest.mark.timeout(600)
PORT = 29517
SECONDS_TO_NOTICE = 12
IDS = {"trackers": [], "pictures_every": 0, "every_steps": 1, "ids": True}


@pytest.fixture(scope="module", autouse=True)
def hosts_are_there():
    need_hosts()


class Cluster:
    """One launcher on each host, with one rank each; the first host is called by its name or address."""

    def __init__(self, config, machines, called, module="bigscl.train", arguments=()):
        self._logs = [config.with_name(f"{config.stem}-{machine.name}.log") for machine in machines]
        self._launchers = []
        for rank, (machine, log) in enumerate(zip(machines, self._logs, strict=True)):
            words = command(
                arguments or [config],
                processes=len(machines),
                num_machines=len(machines),
                machine_rank=rank,
                main_process_ip=getattr(machines[0], called),
                main_process_port=PORT,
            )
            words[words.index("bigscl.train")] = module
            target = ("tests.distributed.hosts:run_on", machine.name, machine.names, *words[2:])
            self._launchers.append(trainer_server().start(*target, output=log))

    @property
    def outputs(self):
        return [log.read_text() for log in self._logs]

    def wait(self, seconds=TIMEOUT):
        ended = trainer_server().wait_all(self._launchers, seconds)
        return [ended[pid].returncode for pid in self._launchers]


def config_of(path, shards, epochs, **sections):
    return write_config(
        path,
        shards,
        model={"backbone": "tests.integration.tiny:noisy_net"},
        schedule={
            "warmup": {"epochs": 1, "learning_rate": 1e-2, "decay": "constant"},
            "main": {"epochs": epochs, "learning_rate": 2e-3},
        },
        **sections,
    )


@pytest.mark.parametrize("called", ["name", pytest.param("address", marks=pytest.mark.slow)])
def test_nodes_whose_host_name_is_the_loopback_train_as_two_local_processes(tmp_path, shards, called):
    """Gloo alone would listen on 127.0.1.1; called by name, the first node finds no other route to itself."""
    config = config_of(tmp_path / "run.yaml", shards, epochs=1)
    with hosts(2) as machines:
        cluster = Cluster(config, machines, called)
        assert cluster.wait() == [0, 0], cluster.outputs
    local = config_of(tmp_path / "local.yaml", shards, epochs=1)
    train(local, processes=2)
    assert_same_runs(tmp_path / "run", tmp_path / "local", shards)


@pytest.mark.slow
def test_nodes_whose_host_name_is_the_loopback_evaluate_together(tmp_path, shards):
    train(config_of(tmp_path / "run.yaml", shards, epochs=1), processes=2)
    with hosts(2) as machines:
        words = [tmp_path / "run", "--shards", shards / "val-*.tar"]
        cluster = Cluster(tmp_path / "evaluation.yaml", machines, "name", "bigscl.evaluate", words)
        assert cluster.wait() == [0, 0], cluster.outputs
    assert "2 processes" in cluster.outputs[0]


@pytest.mark.slow
@pytest.mark.parametrize("called", ["name", "address"])
def test_preflight_finds_nodes_that_have_no_launcher_but_its_variables(tmp_path, called):
    """The first rank then keeps the store through which they meet, which is the launcher's otherwise."""
    need_hosts()
    words = [sys.executable, "-m", "bigscl", "preflight", "--place", str(tmp_path / "store"), "--json"]
    with hosts(2) as machines:
        shared = {"MASTER_ADDR": getattr(machines[0], called), "MASTER_PORT": str(PORT), "WORLD_SIZE": "2"}
        nodes = [
            subprocess.Popen(
                machine.command(words),
                cwd=ROOT,
                env={**ENVIRONMENT, **shared, "RANK": str(rank)},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank, machine in enumerate(machines)
        ]
        outputs = [node.communicate(timeout=TIMEOUT)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outputs
    facts = json.loads(outputs[0].strip().splitlines()[-1])
    assert [one["address"] for one in facts["processes"]] == [machine.address for machine in machines]


@pytest.mark.slow
def test_nodes_that_lose_each_other_end_in_time_and_resume_each_sample_once(tmp_path, shards):
    config = config_of(
        tmp_path / "run.yaml",
        shards,
        epochs=400,
        hardware={"timeout_minutes": SECONDS_TO_NOTICE / 60},
        checkpoint={"every_steps": 7},
        log=IDS,
    )
    with hosts(2) as machines:
        cluster = Cluster(config, machines, "name")
        deadline = time.monotonic() + TIMEOUT
        while steps_of(tmp_path / "run") < 20:
            assert time.monotonic() < deadline, cluster.outputs
            time.sleep(0.02)
        machines[1].cut()
        cut = time.monotonic()
        codes = cluster.wait()
        assert 0 not in codes
        assert all("lost the connection to the others" in output for output in cluster.outputs)
        assert time.monotonic() - cut < SECONDS_TO_NOTICE + 30
        machines[1].restore()
        epoch, had = visited_by_checkpoint(tmp_path / "run", shards)
        for file in (tmp_path / "run").glob("ids-*.txt"):
            file.unlink()
        config_of(tmp_path / "run.yaml", shards, epochs=epoch + 1, log=IDS)
        cluster = Cluster(config, machines, "name")
        assert cluster.wait() == [0, 0], cluster.outputs
    assert_each_sample_once(tmp_path / "run", shards, epoch, had, epochs=epoch + 2)
