"""A real Slurm stops, moves and cancels the job of configs/slurm/train.sbatch; runs end as if it had not.

`pytest -m slow tests/clusters/test_slurm.py`; needs root, slurm-wlm, munge and iproute2, else it is skipped.
"""

import contextlib
import time

import pytest

from bigscl.common.failures import STOPPED
from bigscl.training.checkpoint_folder import Checkpoints
from tests.builders import write_config
from tests.clusters.slurm import need_slurm, slurm
from tests.integration.runs import assert_same_runs, steps_of, train

SCENES = (100, 12)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
PAUSE_SECONDS = 0.3
SECONDS_TO_NOTICE = 15


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    need_slurm()
    with slurm(tmp_path_factory.mktemp("slurm")) as running:
        yield running


@pytest.fixture(scope="module", autouse=True)
def slurm_is_there():
    need_slurm()


def config_of(path, shards):
    return write_config(
        path,
        shards,
        data={"batch_size": 2, "workers": 1},
        model={"backbone": "tests.clusters.pausing:pausing_net"},
        checkpoint={"every_steps": 7},
        hardware={"timeout_minutes": SECONDS_TO_NOTICE / 60},
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory, shards):
    """An uninterrupted run on two ranks."""
    config = config_of(tmp_path_factory.mktemp("whole") / "run.yaml", shards)
    train(config, processes=2)
    return config.with_suffix("")


class Trial:
    """A run under Slurm on two nodes, whose steps are slow until something has happened to it."""

    def __init__(self, cluster, folder, shards):
        self.cluster, self.run = cluster, folder / "run"
        self._config, self._pause = config_of(folder / "run.yaml", shards), folder / "pause"

    def start(self, *options, pause=PAUSE_SECONDS):
        self._pause.write_text(str(pause))
        self.job = self.submit(*options)

    def submit(self, *options):
        environment = f"PAUSE_FILE={self._pause}"
        return self.cluster.submit(self._config, options=options, environment=environment)

    def wait_for_step(self, step):
        deadline = time.monotonic() + 200
        while steps_of(self.run) < step:
            assert time.monotonic() < deadline, self.job.log + self.cluster.logs()
            time.sleep(0.05)

    def hurry(self):
        self._pause.unlink()

    def is_saved(self):
        """Whether the last checkpoint has all steps that were made."""
        latest = Checkpoints(self.run / "checkpoints", 1).latest()
        return latest is not None and latest.progress.step == steps_of(self.run)


@pytest.fixture
def trial(cluster, tmp_path, shards):
    cluster.wait_until_idle()
    trial = Trial(cluster, tmp_path, shards)
    yield trial
    for node in cluster.nodes:
        node.restore()
        with contextlib.suppress(AssertionError):  # it is not down
            cluster.call("scontrol", "update", f"nodename={node.name}", "state=resume")
    with contextlib.suppress(AssertionError):  # it has ended
        cluster.call("scancel", trial.job.number)


def assert_requeued_and_equal(trial, whole, shards, restarts=1):
    facts = trial.job.wait_for("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", seconds=500)
    assert (facts["JobState"], facts["Restarts"]) == ("COMPLETED", str(restarts)), trial.job.log
    assert_same_runs(trial.run, whole, shards)


def assert_saved_without_tracebacks(trial):
    """Our line is the last of the log of a stopped job, but for what Slurm says of its own."""
    assert "is saved. Resume with the same command." in trial.job.log
    assert "Traceback" not in trial.job.log
    ours = [line for line in trial.job.log.splitlines() if not line.startswith(("slurmstepd", "srun"))]
    assert "is saved" in ours[-1] or "goes back into the queue" in ours[-1], trial.job.log


def test_job_that_nothing_happens_to(trial, whole, shards):
    trial.start(pause=0)
    assert_requeued_and_equal(trial, whole, shards, restarts=0)


def requeue(trial):
    trial.cluster.call("scontrol", "requeue", trial.job.number)


def signal_script(trial):
    trial.cluster.call("scancel", "--signal=USR1", "--batch", trial.job.number)


def signal_steps(trial):
    trial.cluster.call("scancel", "--signal=USR1", trial.job.number)


def pre_empt(trial):
    trial.cluster.pre_empt(seconds=1)


def set_node_down(trial):
    trial.cluster.call("scontrol", "update", f"nodename={last_node(trial).name}", "state=down", "reason=test")


def cut_link(trial):
    last_node(trial).cut()


def last_node(trial):
    """The node of the job that does not run the script."""
    used = trial.cluster.call("scontrol", "show", "hostnames", trial.job.facts()["NodeList"]).split()
    return next(node for node in trial.cluster.nodes if node.name == used[-1])


@pytest.mark.parametrize(
    ("event", "options", "saves"),
    [
        (requeue, (), False),
        (signal_script, (), True),
        (signal_steps, (), True),
        (pre_empt, ("--partition=low",), True),
        (pre_empt, ("--partition=nograce",), False),
        (set_node_down, (), False),
        (cut_link, (), False),
    ],
    ids=["requeue", "USR1 to the script", "USR1 to the steps", "grace", "no grace", "node down", "link cut"],
)
def test_job_comes_back_and_ends_as_if_nothing_had_been(trial, whole, shards, event, options, saves):
    trial.start(*options)
    trial.wait_for_step(10)
    event(trial)
    trial.job.wait_for("PENDING", "REQUEUED", seconds=120)
    if saves:
        assert trial.is_saved()
        assert_saved_without_tracebacks(trial)
    trial.hurry()
    assert_requeued_and_equal(trial, whole, shards)


def test_job_is_saved_before_its_time_limit_and_comes_back(trial, whole, shards):
    """Slurm rounds to minutes: the signal may come up to one minute earlier than it is asked for."""
    trial.start("--time=4", "--signal=B:USR1@60", pause=4)
    trial.wait_for_step(3)
    trial.job.wait_for("PENDING", "REQUEUED", seconds=300)
    assert trial.is_saved()
    assert_saved_without_tracebacks(trial)
    trial.hurry()
    assert_requeued_and_equal(trial, whole, shards)


def test_cancelled_job_is_saved_and_stays_cancelled(trial, whole, shards):
    trial.start()
    trial.wait_for_step(10)
    trial.cluster.call("scancel", trial.job.number)
    trial.job.wait_for("CANCELLED", seconds=60)
    trial.cluster.wait_until_idle()
    assert trial.is_saved(), trial.job.log
    time.sleep(10)  # longer than a requeued job waits
    facts = trial.job.facts()
    assert (facts["JobState"], facts["Restarts"]) == ("CANCELLED", "0")
    assert_saved_without_tracebacks(trial)
    trial.hurry()
    trial.job = trial.submit()
    assert_requeued_and_equal(trial, whole, shards, restarts=0)


@pytest.mark.parametrize("words", [(), ("nosuch.yaml",)], ids=["none", "no such file"])
def test_job_without_a_config_fails_with_one_line(cluster, words):
    cluster.wait_until_idle()
    job = cluster.submit(*words)
    facts = job.wait_for("FAILED", "COMPLETED", "CANCELLED")
    assert (facts["JobState"], facts["ExitCode"]) == ("FAILED", "2:0"), job.log
    assert len(job.log.splitlines()) == 1, job.log


def test_job_that_may_not_be_requeued_says_that_it_was_stopped(trial):
    trial.start("--no-requeue")
    trial.wait_for_step(10)
    signal_steps(trial)
    facts = trial.job.wait_for("FAILED", "COMPLETED", "CANCELLED", seconds=60)
    assert (facts["JobState"], facts["ExitCode"]) == ("FAILED", f"{STOPPED}:0"), trial.job.log
    assert trial.is_saved()
