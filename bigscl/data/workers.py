"""Loader workers and the process that started them, which alone may end them."""

import os
import signal
import threading
from multiprocessing.connection import Connection
from typing import Any

POLL_SECONDS = 1.0


def obey_parent_only(worker: int) -> None:
    """Make a loader worker ignore SIGINT, and SIGTERM unless its parent sent it.

    Batch systems send SIGTERM to all processes of a job, launchers repeat it to the process group of a rank,
    and a terminal sends SIGINT to all. The trainer then finishes its step and saves, for which it needs its
    workers: one that dies raises an error in the trainer's main thread, even in the middle of a commit.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_await_parent, args=(os.getppid(),), name="signals", daemon=True).start()


def _await_parent(parent: int) -> None:
    """End this process when its parent sends SIGTERM."""
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(128 + signal.SIGTERM)


def receive(inbox: Connection) -> Any:
    """Return the next message of the parent; end this process if the parent is gone."""
    # The pipe does not say so: other workers have its other end open as well.
    parent = os.getppid()
    while not inbox.poll(POLL_SECONDS):
        if os.getppid() != parent:
            os._exit(1)
    return inbox.recv()
