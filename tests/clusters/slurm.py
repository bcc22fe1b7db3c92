"""A real Slurm on one machine: a controller and three nodes, each with a network, a name and a daemon."""

import contextlib
import functools
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed.hosts import Host, hosts, need_hosts
from tests.integration.runs import ENVIRONMENT, ROOT

PROGRAMS = ("slurmctld", "slurmd", "munged", "mungekey", "sbatch")
SYSTEM_PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"
SCRIPT = ROOT / "configs" / "slurm" / "train.sbatch"
OPTIONS = ("--nodes=2", "--gpus-per-node=1", "--cpus-per-task=2")
IDLE_SECONDS = 200
"""A node whose link was cut is asked again after a minute or two."""
# A requeued job waits until its credential has expired, by default for two minutes. A node that was set
# down stays down, as if it had failed: taken back at once, it gets the job while its last step still ends.
SETTINGS = """
ClusterName=test
SlurmctldHost={controller.name}({controller.address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/controller.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
ReturnToService=1
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SlurmdTimeout=20
KillWait=30
MinJobAge=3600
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
PartitionName=low Nodes=ALL Default=YES State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=60
PartitionName=nograce Nodes=ALL State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=0
PartitionName=high Nodes=ALL State=UP PriorityTier=10 PreemptMode=OFF
"""
NODE = (
    "NodeName={node.name} NodeAddr={node.address} CPUs=4 Sockets=1 CoresPerSocket=4 ThreadsPerCore=1 "
    "RealMemory=1000 Gres=gpu:2 State=UNKNOWN\n"
)


def need_slurm() -> None:
    """Skip a test where Slurm, munge or network namespaces are missing."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=SYSTEM_PATH) is None]
    if missing:
        pytest.skip(f"needs Slurm (Debian: slurm-wlm, munge); not installed: {', '.join(missing)}")
    if os.geteuid():
        pytest.skip("needs root, for a Slurm in network namespaces")
    need_hosts()


class Job:
    """A job that was submitted."""

    def __init__(self, slurm: "Slurm", number: str, log: Path) -> None:
        self._slurm, self.number, self._log = slurm, number, log

    @property
    def log(self) -> str:
        return self._log.read_text() if self._log.exists() else ""

    def facts(self) -> dict[str, str]:
        """What `scontrol show job` says: JobState, Restarts, ExitCode, NodeList, ..."""
        return dict(re.findall(r"(\w+)=(\S*)", self._slurm.call("scontrol", "show", "job", self.number)))

    def wait_for(self, *states: str, seconds: float = 300) -> dict[str, str]:
        """Its facts, once it is in one of the states."""
        deadline = time.monotonic() + seconds
        while (facts := self.facts())["JobState"] not in states:
            assert time.monotonic() < deadline, f"{facts}\n{self.log}\n{self._slurm.logs()}"
            time.sleep(0.3)
        return facts


class Slurm:
    """The cluster, seen from its controller."""

    def __init__(self, folder: Path, controller: Host, nodes: list[Host]) -> None:
        self.folder, self.nodes, self._controller = folder, nodes, controller
        python = Path(sys.executable).parent
        self._environment = {
            **ENVIRONMENT,
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PATH": f"{python}:{SYSTEM_PATH}",
            "PYTHONPATH": str(ROOT),
        }

    def call(self, *words: object) -> str:
        """Run one of Slurm's commands, and return what it prints."""
        command = self._controller.command([str(word) for word in words])
        done = subprocess.run(
            command, env=self._environment, cwd=self.folder, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout

    def submit(self, *words: object, options: tuple[str, ...] = (), environment: str = "") -> Job:
        """Submit the product's script with these arguments."""
        log = self.folder / f"job-{time.time_ns()}.log"
        export = f"--export=ALL{environment and ','}{environment}"
        call = ("sbatch", "--parsable", f"--output={log}", export, *OPTIONS, *options, SCRIPT, *words)
        return Job(self, self.call(*call).strip(), log)

    def pre_empt(self, seconds: int) -> None:
        """Let a job of more importance take all nodes for a while."""
        words = ("--partition=high", "--nodes=3", "--exclusive", f"--output={self.folder}/high.log")
        self.call("sbatch", *words, f"--wrap=sleep {seconds}")

    def wait_until_idle(self) -> None:
        deadline = time.monotonic() + IDLE_SECONDS
        while self.call("sinfo", "-h", "-p", "low", "-t", "idle", "-o", "%D").strip() != str(len(self.nodes)):
            assert time.monotonic() < deadline, self.call("sinfo", "-R", "-N", "-l") + self.logs()
            time.sleep(0.3)

    def logs(self) -> str:
        """The last lines of the daemons."""
        files = sorted(self.folder.glob("*.log"))
        return "\n".join(
            f"{file.name}: {file.read_text()[-1500:]}" for file in files if "job" not in file.name
        )

    @functools.cached_property
    def settings(self) -> str:
        nodes = "".join(NODE.format(node=node) for node in self.nodes)
        head, mark, partitions = SETTINGS.format(controller=self._controller, folder=self.folder).partition(
            "PartitionName"
        )
        return head + nodes + mark + partitions

    def daemons(self) -> Iterator[list[str]]:
        """The commands of all daemons, in the order in which they are started."""
        socket, key = self.folder / "munge.socket", self.folder / "munge.key"
        files = {"pid": "munge.pid", "log": "munged.log", "seed": "munge.seed"}
        named = [f"--{kind}-file={self.folder / name}" for kind, name in files.items()]
        yield ["munged", "--force", "--foreground", f"--socket={socket}", f"--key-file={key}", *named]
        yield self._controller.command(["slurmctld", "-D", "-c", "-f", self._environment["SLURM_CONF"]])
        for node in self.nodes:
            yield node.command(["slurmd", "-D", "-N", node.name, "-f", self._environment["SLURM_CONF"]])

    @contextlib.contextmanager
    def running(self) -> Iterator["Slurm"]:
        """Start the daemons; all of them are gone at the end of the block."""
        for name in ("state", "dev"):
            (self.folder / name).mkdir()
        for number in range(2):
            (self.folder / "dev" / f"gpu{number}").touch()
        (self.folder / "gres.conf").write_text(f"Name=gpu File={self.folder}/dev/gpu[0-1]\n")
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=autodetect\n")
        (self.folder / "slurm.conf").write_text(self.settings)
        key = ["mungekey", "--create", f"--keyfile={self.folder / 'munge.key'}"]
        subprocess.run(key, env=self._environment, check=True)
        started = []
        try:
            for command in self.daemons():
                output = (self.folder / f"output-{len(started)}.log").open("w")
                with output:
                    started.append(
                        subprocess.Popen(command, env=self._environment, stdout=output, stderr=output)
                    )
                time.sleep(1)
            self.wait_until_idle()
            yield self
        finally:
            for process in reversed(started):
                process.terminate()
            for process in started:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(10)
                process.kill()
                process.wait()


@contextlib.contextmanager
def slurm(folder: Path) -> Iterator[Slurm]:
    """A cluster whose state is in a folder; everything that runs in it ends with the block."""
    with hosts(4) as (controller, *nodes), Slurm(folder, controller, nodes).running() as running:
        yield running
