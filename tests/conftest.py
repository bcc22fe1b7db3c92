"""What all tests share: one thread for each process, and the fork server."""

import os

# Set before torch is imported. The work of a test is small, and as many tests run at a time as there are
# cores: more threads only spin while they wait for each other, up to ten times the CPU seconds of the work.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

from tests import forks


@pytest.fixture(scope="session")
def trainer_server() -> forks.ForkServer:
    """A process that has imported the trainer, the evaluation and the tools."""
    return forks.trainer_server()


def pytest_unconfigure() -> None:
    forks.close_servers()
