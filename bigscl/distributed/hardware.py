"""The precision that this machine can compute in, and a setting that makes training on the CPU faster."""

import ctypes
import logging
import os
import subprocess
import sys
from functools import cache

import torch

from bigscl.common.user_error import UserError

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


def machine_ram_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


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
