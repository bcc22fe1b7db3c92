"""Loader workers: how they are started, the process that alone may end them, and waits that last too long."""

import atexit
import fcntl
import logging
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import forkserver, util
from pathlib import Path
from typing import Any, Literal

from bigscl.store import SCHEMES

logger = logging.getLogger(__name__)

POLL_SECONDS = 1.0
SILENT_SECONDS = 60.0
"""A loader that gives no batch for this long is named in the log, and again after twice as long."""
SIGNALS_OF_JOBS = {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1}
"""Signals that batch systems, launchers and terminals send to all processes of a job."""


SOCKETS = "bigscl-sockets-"
"""How the names of the folders begin that hold the sockets of workers."""
NEW_SECONDS = 60.0
"""A folder younger than this may belong to a process that is about to lock it."""
NO_TRACKER_WARNING = "ignore:resource_tracker:UserWarning"
"""The process that removes the semaphores of a run that ended at once would warn after its last line."""


# How workers start


def make_socket_folder() -> None:
    """Give this process and its workers one folder for their sockets, and remove those of killed processes.

    Workers send batches through sockets, each of which would make a folder of its own (`pymp-*`) that stays
    if the worker is killed. The process and its workers lock theirs: a folder without a lock is left over.
    """
    settings = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    if settings.get("tempdir") is not None:
        return
    for left in Path(tempfile.gettempdir()).glob(f"{SOCKETS}*"):
        with suppress(OSError):
            if left.is_dir() and time.time() - left.stat().st_mtime > NEW_SECONDS:
                os.close(_lock(left))
                shutil.rmtree(left)
    folder = tempfile.mkdtemp(prefix=SOCKETS)
    # The lock is held until this process and its forks end.
    with suppress(OSError):
        _lock(folder)
    settings["tempdir"] = folder
    atexit.register(_remove_of, os.getpid(), folder)


def _remove_of(process: int, folder: str) -> None:
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)


def _lock(folder: str | Path) -> int:
    """Lock a folder that no living process has locked; raise OSError if one has."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def start_method(urls: Iterable[str]) -> Literal["forkserver"] | None:
    """Return how workers that read these tars are started; None is a fork of this process.

    Clients of object stores and of HTTP have threads of their own, which a fork does not copy: in a fork of
    a process that has used one, the first request waits for ever. So these workers are forks of a server
    process that has imported what they need and has never opened a client.
    """
    make_socket_folder()
    if not any(url.partition("://")[0] in SCHEMES for url in urls):
        return None
    forkserver.set_forkserver_preload(["bigscl.data.loader"])
    # Signals to the whole job must not end the server: its workers would end with it, even in a save.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS_OF_JOBS)
    sys.warnoptions.append(NO_TRACKER_WARNING)
    try:
        forkserver.ensure_running()
    finally:
        sys.warnoptions.remove(NO_TRACKER_WARNING)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    return "forkserver"


def on_start(method: str | None) -> Callable[[int], None]:
    """Return what a worker does first: one of the server gets the variables that this process has now."""
    return obey_parent_only if method is None else partial(_start_from_server, dict(os.environ))


def _start_from_server(environment: dict[str, str], worker: int) -> None:
    os.environ.clear()
    os.environ.update(environment)
    obey_parent_only(worker)


@contextmanager
def without_main_module() -> Iterator[None]:
    """Keep processes that are not forks of this one from importing the script that the user runs.

    They need nothing of it, and a training script without `if __name__ == "__main__"` would train again.
    """
    main = sys.modules["__main__"]
    hidden: dict[str, Any] = {
        name: main.__dict__.pop(name) for name in ("__spec__", "__file__") if name in main.__dict__
    }
    main.__spec__ = None
    try:
        yield
    finally:
        main.__dict__.update(hidden)


def obey_parent_only(worker: int) -> None:
    """Make a loader worker ignore SIGINT and SIGUSR1, and SIGTERM unless its parent sent it.

    Batch systems send SIGTERM or SIGUSR1 to all processes of a job, launchers repeat SIGTERM to the process
    group of a rank, and a terminal sends SIGINT to all. The trainer then finishes its step and saves, for
    which it needs its workers: one that dies raises an error in its main thread, even in mid-commit.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_await_parent, args=(os.getppid(),), name="signals", daemon=True).start()


def _await_parent(forked_by: int) -> None:
    """End this process when the one that started it sends SIGTERM or is gone; a server may have forked it."""
    parent = multiprocessing.parent_process()
    while True:
        received = signal.sigtimedwait({signal.SIGTERM}, POLL_SECONDS)
        # The first says it to a fork of the parent, the second to a fork of a server.
        if os.getppid() != forked_by or not (parent is None or parent.is_alive()):
            # The parent would have removed its folder of sockets.
            shutil.rmtree(util.get_temp_dir(), ignore_errors=True)
            os._exit(1)
        if received is not None and received.si_pid == (parent.pid if parent else forked_by):
            os._exit(128 + signal.SIGTERM)


# Waits that last too long


class Waits:
    """The loaders that this process waits for, since when, and what each of them reads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waits: dict[object, tuple[float, Callable[[], str]]] = {}
        self._thread: threading.Thread | None = None

    @contextmanager
    def waiting(self, reads: Callable[[], str]) -> Iterator[None]:
        """Note that the caller waits for a batch; `reads` names the worker and the tar if it takes long."""
        key = object()
        with self._lock:
            self._waits[key] = time.monotonic(), reads
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._watch, name="loader-waits", daemon=True)
                self._thread.start()
        try:
            yield
        finally:
            with self._lock:
                del self._waits[key]

    def longest(self) -> float:
        """Return for how many seconds a loader has given nothing; 0 if none is waited for."""
        with self._lock:
            return max((time.monotonic() - since for since, _ in self._waits.values()), default=0.0)

    def _watch(self) -> None:
        named: dict[object, float] = {}
        while True:
            time.sleep(min(POLL_SECONDS, SILENT_SECONDS))
            with self._lock:
                waits = dict(self._waits)
            now = time.monotonic()
            named = {key: at for key, at in named.items() if key in waits}
            for key, (since, reads) in waits.items():
                if now - since >= named.get(key, SILENT_SECONDS):
                    named[key] = 2 * (now - since)
                    logger.warning("no batch for %.0f s: %s", now - since, reads())


WAITS = Waits()
