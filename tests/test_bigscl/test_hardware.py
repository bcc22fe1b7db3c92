"""How the machine is used."""

import platform
import subprocess
import sys

import pytest

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
