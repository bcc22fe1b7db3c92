"""How the machine is used."""

import platform
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from accelerate import DistributedType

from bigscl.training import accelerator
from bigscl.training.accelerator import keep_freed_memory
from tests.builders import config_of


def print_given_back(mode):
    """Print the bytes that this process gives back to the kernel when it frees 128 MB."""
    if mode == "keep":
        keep_freed_memory()
    process, large = psutil.Process(), np.ones(2**27, np.uint8)
    before = process.memory_info().rss
    del large
    print(before - process.memory_info().rss)


def given_back(server, mode):
    done = server.run("tests.test_bigscl.test_hardware:print_given_back", mode)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="there is nothing to tell this libc")
def test_freed_memory_stays_with_a_process_that_was_told_so(trainer_server):
    assert given_back(trainer_server, "give") > 2**26
    assert given_back(trainer_server, "keep") < 2**20


@pytest.mark.parametrize("deterministic", [False, True])
def test_convolutions_are_chosen_by_trials_unless_the_run_is_deterministic(monkeypatch, deterministic):
    made = SimpleNamespace(distributed_type=DistributedType.NO)
    monkeypatch.setattr(accelerator, "Accelerator", lambda **_: made)
    monkeypatch.setattr(accelerator, "keep_freed_memory", lambda: None)  # of the process of the tests
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", deterministic)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    try:
        accelerator.start_accelerator(config_of(hardware={"deterministic": deterministic}))
        assert torch.backends.cudnn.benchmark is not deterministic
        assert torch.are_deterministic_algorithms_enabled() is deterministic
    finally:
        torch.use_deterministic_algorithms(False)
