"""What this machine can compute in, found out before a run depends on it, and how it is made to go faster."""

import ctypes
import logging
import subprocess
import sys

import torch

logger = logging.getLogger(__name__)
# Of glibc's malloc.h.
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4


def usable_precision(wanted: str, device: torch.device) -> str:
    """The precision to train in: the one that was asked for, or fp32 where this CPU cannot do bf16.

    Some CPUs that claim bf16 die of an illegal instruction, so it is tried in another process.
    """
    if wanted == "fp16" and device.type != "cuda":
        raise ValueError(
            f"hardware.precision: fp16 needs a GPU, this run is on {device.type}. Use bf16 or fp32."
        )
    if wanted == "bf16" and device.type == "cpu" and not _bf16_works():
        logger.warning("bf16 does not work on this CPU: training in fp32")
        return "fp32"
    return wanted


def _bf16_works() -> bool:
    code = (
        "import torch; a = torch.ones(64, 64, dtype=torch.bfloat16); c = torch.nn.Conv2d(8, 8, 3).bfloat16();"
        "assert (a @ a)[0, 0] == 64; c(torch.ones(1, 8, 9, 9, dtype=torch.bfloat16)).sum().backward()"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def keep_freed_memory() -> None:
    """Let freed memory stay with this process, for the next step of a training on the CPU.

    Otherwise glibc gives large tensors back to the kernel one by one, and the kernel clears every page of the
    next ones: a third of the time of a network with large feature maps. Where there is no glibc, nothing
    changes.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, -1)
