"""Servers of other people that tests start and end."""

import functools
import http.server
import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


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


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    """Serves a folder without a line for each request."""

    def log_message(self, *args) -> None:
        pass


@contextmanager
def web_server(folder: Path, handler: type[QuietHandler] = QuietHandler) -> Iterator[str]:
    """The address of a web server on this machine over a folder."""
    handle = functools.partial(handler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handle) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
