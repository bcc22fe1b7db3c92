"""The fork server that tests of every folder share."""

import pytest

from tests import forks


@pytest.fixture(scope="session")
def trainer_server() -> forks.ForkServer:
    """A process that has imported the trainer, the evaluation and the tools."""
    return forks.trainer_server()


def pytest_unconfigure() -> None:
    forks.close_servers()
