"""A fork server, made once, and a report of all kills at the end."""

import pytest

from tests.faults import kills
from tests.forks import ForkServer


@pytest.fixture(scope="session")
def store_server():
    """A process that has imported the store, and no torch."""
    with ForkServer("tests.faults.store_life") as server:
        yield server


def pytest_terminal_summary(terminalreporter):
    if lines := kills.report():
        terminalreporter.section("kills at storage operations")
        for line in lines:
            terminalreporter.line(line)
