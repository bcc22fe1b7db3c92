"""Servers of other people that tests start and end."""

import functools
import http.server
import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.forks import CREDENTIALS


@contextmanager
def serving(words: Sequence[str], port: int, *, seconds: float = 60.0, **environment: str) -> Iterator[None]:
    """A server that listens on a port of this machine, until the end of the block."""
    variables = {**os.environ, **environment}
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(words, env=variables, stdout=quiet, stderr=quiet)
    try:
        deadline = time.monotonic() + seconds
        while process.poll() is None and time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        else:
            raise AssertionError(f"{words[0]} did not start: exit code {process.poll()}")
        yield
    finally:
        process.kill()
        process.wait()


@contextmanager
def s3_server() -> Iterator[str]:
    """The address of an S3 server in this process; see `make_bucket`."""
    from moto.server import ThreadedMotoServer

    running = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    yield f"http://{host}:{port}"
    running.stop()


def make_bucket(address: str, name: str, files: Iterable[Path] = (), folder: str = "") -> None:
    """Make a bucket on an S3 server, and put files below a folder of it."""
    import boto3

    login = {
        "aws_access_key_id": CREDENTIALS["AWS_ACCESS_KEY_ID"],
        "aws_secret_access_key": CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
        "region_name": CREDENTIALS["AWS_REGION"],
    }
    client = boto3.client("s3", endpoint_url=address, **login)
    client.create_bucket(Bucket=name)
    for path in sorted(files):
        client.upload_file(str(path), name, f"{folder}{path.name}")


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    """Serves a folder without a line for each request."""

    def log_message(self, *args) -> None:
        pass


@contextmanager
def web_server(folder: Path, handler: type[QuietHandler] = QuietHandler) -> Iterator[str]:
    """The address of a web server on this machine over a folder."""
    handle = functools.partial(handler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handle) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
