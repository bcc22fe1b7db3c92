"""How the machine is used."""

import platform
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from accelerate import DistributedType

from bigscl.config import make_config
from bigscl.training import accelerator

RESIDENT = """
import sys
import numpy as np
import psutil
from bigscl.distributed.hardware import keep_freed_memory

if sys.argv[1] == "keep":
    keep_freed_memory()
process = psutil.Process()
large = np.ones(2**27, np.uint8)
before = process.memory_info().rss
del large
print(before - process.memory_info().rss)
"""


def given_back(mode):
    """Bytes that a process gives back to the kernel when it frees 128 MB."""
    done = subprocess.run(
        [sys.executable, "-c", RESIDENT, mode], capture_output=True, text=True, check=True, timeout=60
    )
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="there is nothing to tell this libc")
def test_freed_memory_stays_with_a_process_that_was_told_so():
    assert given_back("give") > 2**26
    assert given_back("keep") < 2**20


@pytest.mark.parametrize("deterministic", [False, True])
def test_convolutions_are_chosen_by_trials_unless_the_run_is_deterministic(monkeypatch, deterministic):
    made = SimpleNamespace(distributed_type=DistributedType.NO)
    monkeypatch.setattr(accelerator, "Accelerator", lambda **_: made)
    monkeypatch.setattr(accelerator, "keep_freed_memory", lambda: None)  # of the process of the tests
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", deterministic)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    values = {
        "run": "run",
        "data": {"train": "shards"},
        "selection": {"K": 2.0},
        "model": {"backbone": "resnet18"},
    }
    try:
        accelerator.start_accelerator(make_config(values | {"hardware": {"deterministic": deterministic}}))
        assert torch.backends.cudnn.benchmark is not deterministic
        assert torch.are_deterministic_algorithms_enabled() is deterministic
    finally:
        torch.use_deterministic_algorithms(False)
