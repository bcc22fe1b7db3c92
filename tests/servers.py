"""Servers of other people that tests start and end."""

import os
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


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
