"""The accelerator of a run, and the launches that it refuses."""

import ctypes
import logging
import os
import subprocess
import sys
import time
from datetime import timedelta
from functools import cache

import torch
from accelerate import Accelerator, InitProcessGroupKwargs

from bigscl.common.failures import SECONDS_FOR_THE_FIRST
from bigscl.common.user_error import UserError
from bigscl.config import Config
from bigscl.distributed.ranks import choose_interface

logger = logging.getLogger(__name__)

# From glibc's malloc.h.
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4


def usable_precision(wanted: str, device: torch.device) -> str:
    """Return the precision to train in: the one of the config, or fp32 if this CPU cannot compute in bf16.

    Some CPUs that report bf16 stop the process with an illegal instruction, so another process tries it.
    """
    if wanted == "fp16" and device.type != "cuda":
        raise UserError(
            f"hardware.precision: fp16 needs a GPU, this run is on {device.type}. Use bf16 or fp32."
        )
    if wanted == "bf16" and device.type == "cpu" and not _bf16_works():
        logger.warning("bf16 does not work on this CPU: training in fp32")
        return "fp32"
    return wanted


@cache
def _bf16_works() -> bool:
    code = (
        "import torch; a = torch.ones(64, 64, dtype=torch.bfloat16); c = torch.nn.Conv2d(8, 8, 3).bfloat16();"
        "assert (a @ a)[0, 0] == 64; c(torch.ones(1, 8, 9, 9, dtype=torch.bfloat16)).sum().backward()"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def keep_freed_memory() -> None:
    """Keep freed memory in this process, for the next training step on the CPU.

    Otherwise glibc returns each large tensor to the kernel, and the kernel clears every page of the next one:
    a third of the time of a network with large feature maps. Without glibc nothing changes.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, -1)


def choose_algorithms(*, deterministic: bool) -> None:
    """Let torch use the fastest operations, or only those that give the same bits every time.

    Then it raises at an operation that cannot. The fastest convolutions are found by trials, whose winner may
    be another one the next time.
    """
    torch.backends.cudnn.benchmark = not deterministic
    if deterministic:
        # Of cuBLAS; read when a process first uses the GPU.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


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
