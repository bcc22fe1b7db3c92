"""Launches that cannot work end at the start, in one line of the first task and exit code 2."""

import subprocess
from types import SimpleNamespace

import pytest
import yaml
from accelerate.utils import DistributedType

from bigscl.common.user_error import UserError
from bigscl.config import load_config
from bigscl.training import accelerator
from tests.builders import write_config
from tests.forks import trainer_server
from tests.integration.runs import ENVIRONMENT, ROOT, command

SCENES = (16, 8)

TASKS = {
    "srun": {"SLURM_NTASKS": "2", "SLURM_PROCID": "0"},
    "a step of a larger job": {"SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "8"},
    "mpirun": {"OMPI_COMM_WORLD_SIZE": "2"},
    "mpirun of MPICH": {"PMI_SIZE": "2", "PMI_RANK": "0"},
}
ALONE = {
    "a job of one task": {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"},
    "one task of a larger job": {"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "2"},
}


def config_of(path, shards):
    phases = {"warmup": 0, "main": 1}
    one_epoch = {name: {"epochs": count, "learning_rate": 1e-3} for name, count in phases.items()}
    return write_config(path, shards, data={"workers": 0}, store={"top": None}, schedule=one_epoch)


def start(config, environment, processes=1):
    return trainer_server().run_module(
        "bigscl.train", config, processes=processes, environment={"OMP_NUM_THREADS": "1", **environment}
    )


@pytest.mark.parametrize("environment", TASKS.values(), ids=TASKS)
def test_tasks_without_a_launcher_are_refused_with_the_line_that_launches_them(tmp_path, shards, environment):
    refused = start(config_of(tmp_path / "run.yaml", shards), environment)
    assert refused.returncode == 2
    (line,) = refused.stderr.strip().splitlines()
    assert line.startswith(f"bigscl.train: {next(iter(environment))}: 2, but no WORLD_SIZE")
    assert "accelerate launch --multi_gpu --num_processes 2 -m bigscl.train CONFIG" in line
    assert not (tmp_path / "run").exists()


def test_only_the_first_task_says_so(tmp_path, shards):
    refused = start(config_of(tmp_path / "run.yaml", shards), {"SLURM_NTASKS": "2", "SLURM_PROCID": "1"})
    assert (refused.returncode, refused.stdout, refused.stderr) == (2, "", "")


@pytest.mark.parametrize("environment", ALONE.values(), ids=ALONE)
def test_a_single_task_trains(tmp_path, shards, environment):
    done = start(config_of(tmp_path / "run.yaml", shards), environment)
    assert done.returncode == 0, done.stderr


def test_ranks_of_a_launcher_train_in_a_job_of_several_tasks_and_tools_read_their_run(tmp_path, shards):
    environment = {"SLURM_NTASKS": "2", "SLURM_PROCID": "0"}
    done = start(config_of(tmp_path / "run.yaml", shards), environment, processes=2)
    assert done.returncode == 0, done.stderr
    shown = trainer_server().run_module("bigscl", "show", tmp_path / "run", environment=environment)
    assert shown.returncode == 0, shown.stderr


@pytest.mark.parametrize("name", ["FSDP", "DEEPSPEED", "MEGATRON_LM", "PARALLELISM_CONFIG"])
def test_models_that_accelerate_would_divide_are_refused_by_one_rank(tmp_path, shards, name):
    config = config_of(tmp_path / "run.yaml", shards)
    refused = start(config, {f"ACCELERATE_USE_{name}": "true"}, processes=2)
    assert refused.returncode == 2
    (line,) = refused.stderr.strip().splitlines()
    assert line.startswith(f"bigscl.train: ACCELERATE_USE_{name}: true: is not supported, expected")
    assert "NO, MULTI_GPU or MULTI_CPU" in line


def test_fsdp_in_the_users_accelerate_config_is_refused(tmp_path, shards):
    """Through the real launcher, which tells its ranks."""
    settings = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP",
        "fsdp_config": {"fsdp_version": 1, "fsdp_sharding_strategy": "FULL_SHARD"},
    }
    file = tmp_path / "fsdp.yaml"
    file.write_text(yaml.safe_dump(settings))
    words = command([config_of(tmp_path / "run.yaml", shards)], processes=2, config_file=file)
    words.remove("--multi_gpu")
    refused = subprocess.run(
        words, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=120, check=False
    )
    assert refused.returncode != 0
    assert refused.stderr.count("bigscl.train: ACCELERATE_USE_FSDP: true: is not supported") == 1


def test_devices_that_accelerate_knows_and_no_test_of_ours_are_refused(tmp_path, shards, monkeypatch):
    made = SimpleNamespace(distributed_type=DistributedType.MULTI_NPU)
    monkeypatch.setattr(accelerator, "Accelerator", lambda **_: made)
    monkeypatch.setattr(accelerator, "keep_freed_memory", lambda: None)  # of the process of the tests
    with pytest.raises(UserError, match="distributed_type: MULTI_NPU: is not supported, expected"):
        accelerator.start_accelerator(load_config(config_of(tmp_path / "run.yaml", shards), []))
