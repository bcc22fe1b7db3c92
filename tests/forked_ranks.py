"""Let a real launcher fork its ranks, which need not import torch then: that takes 3 s of CPU for each.

They are forks of a process that has no thread. The launcher adopts them: it waits for them and signals
them as those that it starts itself, and they see its end.
"""

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence

PR_SET_CHILD_SUBREAPER = 36
POLL_SECONDS = 0.01


class Rank:
    """A forked rank, with the methods of `subprocess.Popen` that the launcher calls."""

    def __init__(self, pid: int) -> None:
        self.pid, self.returncode = pid, None  # type: int, int | None

    def poll(self) -> int | None:
        """Return the exit code, or None while the rank runs."""
        if self.returncode is None and (ended := os.waitpid(self.pid, os.WNOHANG))[0]:
            self.returncode = os.waitstatus_to_exitcode(ended[1])
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code when the rank has ended; TimeoutExpired if it does not in time."""
        deadline = time.monotonic() + (timeout or 1e9)
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            time.sleep(POLL_SECONDS)
        return code


def fork_ranks(run_module: Callable[..., None]) -> None:
    """Make the launcher that this process becomes fork its ranks; call it before any thread starts."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    start = forker(run_module)
    SubprocessHandler._popen = lambda _, words, environment: start(words, environment)  # type: ignore


def forker(run_module: Callable[..., None]) -> Callable[..., Rank]:
    """Return what starts `python -u -m module ...` as a fork; call it before any thread starts."""
    launcher, (ours, theirs) = os.getpid(), socket.socketpair()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    if os.fork() == 0:
        ours.close()
        serve(theirs, launcher, run_module)
    theirs.close()
    requests = ours.makefile("rw")

    def start(words: Sequence[str], environment: Mapping[str, str], output: str | None = None) -> Rank:
        requests.write(json.dumps([words, dict(environment), output]) + "\n")
        requests.flush()
        return Rank(int(requests.readline()))

    return start


def serve(requests: socket.socket, launcher: int, run_module: Callable[..., None]) -> None:
    """Fork a rank for each request, until the launcher is gone."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    with requests.makefile("rw") as file:
        for line in iter(file.readline, ""):
            answer, question = os.pipe()
            if (between := os.fork()) == 0:
                if (rank := os.fork()) == 0:
                    requests.close()
                    become_rank(*json.loads(line), launcher, run_module)
                os.write(question, f"{rank}\n".encode())
                os._exit(0)
            # Only then has the launcher adopted the rank.
            os.waitpid(between, 0)
            file.write(os.read(answer, 100).decode())
            file.flush()
            os.close(answer)
            os.close(question)
    os._exit(0)


def become_rank(
    words: list[str],
    environment: dict[str, str],
    output: str | None,
    launcher: int,
    run_module: Callable[..., None],
) -> None:
    """Do what `python -u -m module ...` does, and end the process with its exit code; never returns."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    while os.getppid() not in (launcher, 1):
        time.sleep(0.001)
    if output is not None:
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        for stream in (1, 2):
            os.dup2(file, stream)
    os.environ.clear()
    os.environ.update(environment)
    sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    _, _, _, module, *arguments = words
    code = 1
    try:
        run_module(module, *arguments)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
