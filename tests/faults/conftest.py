"""A fork server, made once, and a report of all kills at the end."""

import os

import pytest

from tests.faults import kills
from tests.forks import CREDENTIALS, ForkServer


@pytest.fixture(scope="session")
def store_server():
    """A process that has imported the store, and no torch."""
    with ForkServer("tests.faults.store_life") as server:
        yield server


@pytest.fixture(scope="session")
def s3_endpoint():
    """An S3-compatible server on loopback, with a bucket named `bucket`."""
    server = pytest.importorskip("moto.server")
    import boto3

    os.environ.update(CREDENTIALS)
    running = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1").create_bucket(Bucket="bucket")
    yield endpoint
    running.stop()


def pytest_terminal_summary(terminalreporter):
    if lines := kills.report():
        terminalreporter.section("kills at storage operations")
        for line in lines:
            terminalreporter.line(line)
