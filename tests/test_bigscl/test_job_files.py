"""Job files of Slurm, Kubernetes and SkyPilot start the launcher with options that it takes.

The schedulers' own commands are small scripts here: `srun` runs its command once for each node, and
`accelerate` prints what it was called with. tests/clusters has a real Slurm.
"""

import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
import yaml
from accelerate.commands.launch import launch_command_parser

from bigscl.common.failures import STOPPED
from bigscl.config import load_config
from bigscl.config.load import packaged_files

CONFIGS = Path(__file__).parent.parent.parent / "configs"
PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
PROGRAMS = {
    # The trainer itself would import torch to look at the config.
    "python": f'[[ "$*" != *--print-config ]] && exec {sys.executable} "$@"; [ -e "$3" ] || exit 2',
    "accelerate": 'echo "called $*" >> "$CALLS"; [ -z "${SLOW:-}" ] || sleep 30',
    "scontrol": """
        case "$1 $2" in
            "show hostnames") echo "node-a" ;;
            "show job") echo "   JobState=${STATE:-RUNNING} Reason=None" ;;
            *) echo "scontrol $*" >> "$CALLS" ;;
        esac
    """,
    "srun": """
        while [ "${1#--}" != "$1" ]; do echo "srun $1" >> "$CALLS"; shift; done
        for node in $(seq 0 $((SLURM_NNODES - 1))); do SLURM_NODEID=$node "$@" & done
        trap 'kill -USR1 $(jobs -p)' USR1
        wait -n; code=$?
        [ $code -lt 128 ] || { wait -n; code=$?; }
        # As the real one: other nodes go on when one has ended.
        wait
        exit $code
    """,
}


@pytest.fixture
def call(tmp_path):
    """Runs a script with the stand-ins on its PATH; the launcher's arguments, and the other calls."""
    programs, calls = tmp_path / "bin", tmp_path / "calls"
    programs.mkdir()
    for name, script in PROGRAMS.items():
        (programs / name).write_text(f"#!/bin/bash\n{script}\n")
        (programs / name).chmod(0o755)

    def run(words, stop_with=None, code=0, **environment):
        variables = {**os.environ, **environment, "CALLS": str(calls)}
        variables["PATH"] = f"{programs}:{PATH}"
        running = subprocess.Popen(words, env=variables, start_new_session=True)
        if stop_with is not None:
            while not calls.exists() or "called" not in calls.read_text():
                time.sleep(0.01)
            running.send_signal(stop_with)
        assert running.wait(40) == code
        lines = calls.read_text().splitlines() if calls.exists() else []
        launched = [line.removeprefix("called launch ").split() for line in lines if "called" in line]
        return launched, [line for line in lines if "called" not in line]

    return run


@pytest.fixture
def config():
    return CONFIGS / "quickstart_scl.yaml"


def parsed(words):
    """What accelerate makes of the words."""
    return launch_command_parser().parse_args(words)


SLURM = {"SLURM_JOB_ID": "123", "SLURM_JOB_NODELIST": "node-[a-b]", "SLURM_CPUS_PER_TASK": "96"}


@pytest.mark.parametrize(
    ("nodes", "gpus", "multi"), [(1, 1, False), (1, 8, True), (2, 8, True), (2, 1, True)]
)
def test_slurm_starts_one_launcher_per_node_with_all_its_cores(call, config, nodes, gpus, multi):
    launched, others = call(
        ["bash", CONFIGS / "slurm" / "train.sbatch", config, "--data.batch_size", "32"],
        SLURM_NNODES=str(nodes),
        SLURM_GPUS_ON_NODE=str(gpus),
        **SLURM,
    )
    options = sorted((parsed(words) for words in launched), key=lambda each: each.machine_rank)
    assert [each.machine_rank for each in options] == list(range(nodes))
    for each in options:
        assert (each.num_machines, each.num_processes, each.multi_gpu) == (nodes, nodes * gpus, bool(multi))
        assert (each.main_process_ip, each.main_process_port) == ("node-a", 20123)
        assert each.module
        assert [each.training_script, *each.training_script_args] == [
            "bigscl.train", str(config), "--data.batch_size", "32",
        ]  # fmt: skip
    assert "srun --cpus-per-task=96" in others


@pytest.mark.parametrize("state", ["RUNNING", "COMPLETING"])
def test_slurm_job_that_is_asked_to_stop_is_queued_again_unless_it_was_cancelled(call, config, state):
    _, others = call(
        ["bash", CONFIGS / "slurm" / "train.sbatch", config],
        stop_with=signal.SIGUSR1,
        code=STOPPED,
        SLURM_NNODES="1",
        SLURM_GPUS_ON_NODE="2",
        SLOW="1",
        STATE=state,
        **SLURM,
    )
    assert ("scontrol requeue 123" in others) == (state == "RUNNING")


def test_slurm_job_without_its_config_starts_no_node(call, tmp_path):
    """The trainer's one line about a config that is not there is in tests/test_tools/test_mistakes.py."""
    words = ["bash", CONFIGS / "slurm" / "train.sbatch", tmp_path / "nosuch.yaml"]
    assert call(words, code=2, SLURM_NNODES="1", **SLURM) == ([], [])


def test_kubernetes_pods_are_the_machines_of_one_launcher(call):
    service, job = yaml.safe_load_all((CONFIGS / "kubernetes" / "train.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    given = {each["name"]: each["value"] for each in container["env"]}
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == int(given["NUM_MACHINES"])
    codes, disruptions = job["spec"]["podFailurePolicy"]["rules"]
    assert codes["onExitCodes"] == {"containerName": container["name"], "operator": "In", "values": [STOPPED]}
    assert codes["action"] == disruptions["action"] == "Ignore"
    launched, _ = call([*container["command"], *container["args"]], JOB_COMPLETION_INDEX="1", **given)
    options = parsed(launched[0])
    assert (options.num_machines, options.num_processes, options.machine_rank) == (2, 16, 1)
    name = job["metadata"]["name"]
    assert options.main_process_ip == f"{name}-0.{pod['subdomain']}"
    assert pod["subdomain"] == service["metadata"]["name"]
    assert options.training_script == "bigscl.train"


def test_skypilot_nodes_are_the_machines_of_one_launcher(call, tmp_path):
    task = yaml.safe_load((CONFIGS / "skypilot" / "train.yaml").read_text())
    launched, _ = call(
        ["bash", "-c", task["run"].replace("/data", str(tmp_path))],
        **task["envs"],
        SKYPILOT_NUM_NODES=str(task["num_nodes"]),
        SKYPILOT_NUM_GPUS_PER_NODE="8",
        SKYPILOT_NODE_RANK="1",
        SKYPILOT_NODE_IPS="10.0.0.4\n10.0.0.5",
    )
    options = parsed(launched[0])
    assert (options.num_machines, options.num_processes, options.machine_rank) == (2, 16, 1)
    assert options.main_process_ip == "10.0.0.4"
    # On a mounted bucket there are no hard links, and nodes do not share their caches.
    store = "s3://my-bucket/stores/imagenet_resnet50_scl"
    assert options.training_script_args == ["imagenet_resnet50_scl.yaml", "--store.url", store]
    assert load_config(Path("imagenet_resnet50_scl"), options.training_script_args[1:]).store.url == store
    assert task["file_mounts"]["/data"]["source"] == "${BUCKET}"


@pytest.mark.parametrize("name", ["Dockerfile", "bigscl.def"])
def test_containers_install_what_the_project_has(name):
    """Building needs a network and a daemon: here only what they name is checked."""
    text = (CONFIGS / "containers" / name).read_text()
    project = tomllib.loads((CONFIGS.parent / "pyproject.toml").read_text())["project"]
    (extras,) = re.findall(r"pip install \S+ -e '/opt/bigscl\[([\w,]+)\]'", text)
    assert set(extras.split(",")) <= project["optional-dependencies"].keys()
    for requirement in re.findall(r"'(torch[^']*)'", text):
        assert requirement in project["dependencies"]
    (python,) = re.findall(r"python:(\d+\.\d+)-slim", text)
    assert tuple(map(int, python.split("."))) >= (3, 11)
    for path in re.findall(r"/opt/bigscl/(configs/[\w/.]+)", text) + re.findall(
        r"(?<!/)(configs/[\w/.]+\w)", text
    ):
        assert (CONFIGS.parent / path).exists(), path
    assert "imagenet_resnet50_scl" in packaged_files()


def test_the_citation_is_of_this_version():
    citation = yaml.safe_load((CONFIGS.parent / "CITATION.cff").read_text())
    project = tomllib.loads((CONFIGS.parent / "pyproject.toml").read_text())["project"]
    assert (citation["version"], citation["license"]) == (project["version"], project["license"])
    assert citation["cff-version"] == "1.2.0"
    assert {"message", "title", "authors"} <= citation.keys()
    assert citation["preferred-citation"]["title"].startswith("Spatial Consistency Loss")
