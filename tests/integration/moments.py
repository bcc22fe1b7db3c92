"""Runs of the trainer that are killed, or find the disk full, at the n-th call of a function.

A moment is written `module:function before|after n`.
"""

import errno
import functools
import importlib
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from tests.forks import ForkServer


class InterruptedTrainer:
    """Runs the trainer in forks of a server."""

    def __init__(self, server: ForkServer) -> None:
        self._server = server

    def __call__(self, *arguments: object, kill: str = "", full: str = "") -> tuple[int, str]:
        """Return the (exit code, output) of a run that is killed, or whose disk is full, at a moment."""
        done = self._server.run("tests.integration.moments:train", kill, full, *arguments)
        output = done.stdout + done.stderr
        if kill:
            assert done.returncode == -signal.SIGKILL, f"{kill}: never came\n{output}"
        return done.returncode, output


def train(kill: str, full: str, *arguments: str) -> int:
    """Train in a child of the server."""
    from bigscl.train import main

    if kill:
        inject(kill, lambda: os.kill(os.getpid(), signal.SIGKILL))
    if full:
        inject(full, fail_as_full)
    sys.argv = ["bigscl.train", *arguments]
    return main(list(arguments))


def inject(moment: str, act: Callable[[], object]) -> None:
    """Act at the n-th call of a function, before or after it is done."""
    target, when, number = moment.split()
    module, _, path = target.partition(":")
    owner: Any = importlib.import_module(module)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    function, calls = getattr(owner, name), iter(range(1, 10**9))

    @functools.wraps(function)
    def acting(*arguments: Any, **options: Any) -> Any:
        due = next(calls) == int(number)
        if due and when == "before":
            act()
        result = function(*arguments, **options)
        if due and when == "after":
            act()
        return result

    setattr(owner, name, acting)


def fail_as_full() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
