"""The accelerator of a run, and the launches that it refuses."""

import os
import sys
import time
from datetime import timedelta

import torch
from accelerate import Accelerator, InitProcessGroupKwargs

from bigscl.common.failures import SECONDS_FOR_THE_FIRST
from bigscl.common.user_error import UserError
from bigscl.config import Config
from bigscl.distributed.hardware import choose_algorithms, keep_freed_memory, usable_precision
from bigscl.distributed.network import choose_interface

TASKS = (
    # Of a step by srun; the job's own number of tasks may be larger.
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    ("SLURM_NTASKS", "SLURM_PROCID"),
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("PMI_SIZE", "PMI_RANK"),
)
"""Environment variables of srun and mpirun: the number of tasks, and which one this is."""
SHARDING = ("FSDP", "DEEPSPEED", "MEGATRON_LM", "PARALLELISM_CONFIG")
"""Wrappers that accelerate's launcher announces as ACCELERATE_USE_...; our checkpoints cannot hold them."""
SUPPORTED = ("NO", "MULTI_GPU", "MULTI_CPU")
"""Of accelerate's distributed types."""


def start_accelerator(config: Config) -> Accelerator:
    """Return accelerate with the precision, the timeout and the trackers of the run."""
    refuse_lone_tasks()
    refuse_sharded_models()
    cuda = torch.cuda.is_available() and os.environ.get("ACCELERATE_USE_CPU", "").lower() != "true"
    precision = usable_precision(config.hardware.precision, torch.device("cuda" if cuda else "cpu"))
    if not cuda:
        keep_freed_memory()
    choose_interface(config.hardware.timeout_minutes)
    choose_algorithms(deterministic=config.hardware.deterministic)
    accelerator = Accelerator(
        mixed_precision="no" if precision == "fp32" else precision,
        log_with=list(config.log.trackers) or None,
        project_dir=str(config.run),
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(minutes=config.hardware.timeout_minutes))],
    )
    kind = getattr(accelerator.distributed_type, "value", accelerator.distributed_type)
    if kind not in SUPPORTED:
        raise _unsupported(f"distributed_type: {kind}")
    if config.hardware.sync_batchnorm and not cuda and kind != "NO":
        raise UserError(
            "hardware.sync_batchnorm: true, but this launcher's processes compute on CPUs, and torch has it "
            "for GPUs only. Set it to false."
        )
    return accelerator


def refuse_lone_tasks() -> None:
    """Raise UserError if srun or mpirun started several processes without a launcher: each would train alone.

    The first task says so. The others leave after it, as srun may end all tasks when one has ended.
    """
    if "WORLD_SIZE" in os.environ:
        return
    name, number = next((pair for pair in TASKS if pair[0] in os.environ), ("", ""))
    tasks = os.environ.get(name, "")
    if not tasks.isdigit() or int(tasks) <= 1:
        return
    if os.environ.get(number, "0") != "0":
        time.sleep(SECONDS_FOR_THE_FIRST)
        sys.exit(2)
    raise UserError(
        f"{name}: {tasks}, but no WORLD_SIZE: found tasks without a launcher, each of which would train "
        f"alone. Start one launcher on each node: accelerate launch --multi_gpu --num_processes {tasks} "
        f"-m bigscl.train CONFIG, on several nodes as in configs/slurm/train.sbatch; or ask for one task."
    )


def refuse_sharded_models() -> None:
    """Raise UserError if the user's accelerate config divides a model among the ranks."""
    for name in SHARDING:
        variable = f"ACCELERATE_USE_{name}"
        value = os.environ.get(variable, "")
        if value.lower() in ("1", "true", "yes", "on", "t", "y"):
            raise _unsupported(f"{variable}: {value}")


def _unsupported(found: str) -> UserError:
    return UserError(
        f"{found}: is not supported, expected an accelerate config with distributed_type "
        f"{', '.join(SUPPORTED[:-1])} or {SUPPORTED[-1]}. Run `accelerate config` again, or launch with "
        f"--config_file configs/accelerate/8gpu.yaml."
    )
