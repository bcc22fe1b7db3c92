"""A fork server, made once, and a report of all kills at the end."""

import pytest

from tests.faults import kills
from tests.forks import ForkServer


@pytest.fixture(scope="session")
def store_server():
    """A process that has imported the store, and no torch."""
    with ForkServer("tests.faults.store_life") as server:
        yield server


def pytest_sessionfinish(session):
    """Give the kills of a worker of pytest-xdist to its controller."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["kills"] = [[*key, number] for key, number in kills.hits.items()]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    """Add the kills of a worker to those of the session."""
    for scene, kind, number in getattr(node, "workeroutput", {}).get("kills", []):
        kills.hits[scene, kind] += number


def pytest_terminal_summary(terminalreporter):
    if lines := kills.report():
        terminalreporter.section("kills at storage operations")
        for line in lines:
            terminalreporter.line(line)
