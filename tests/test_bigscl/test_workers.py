"""Only its parent ends a loader worker; what is silent is named; nothing is left in the folder of sockets."""

import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from bigscl.data import workers
from bigscl.data.workers import Waits, obey_parent_only

FORK = multiprocessing.get_context("fork")


def work(ready):
    obey_parent_only(0)
    ready.set()
    while True:
        time.sleep(0.05)


def start_worker():
    ready = FORK.Event()
    worker = FORK.Process(target=work, args=(ready,), daemon=True)
    worker.start()
    assert ready.wait(30)
    return worker


def test_signals_of_others_leave_a_worker_alive_and_its_parent_ends_it():
    worker = start_worker()
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGTERM):
        code = f"import os; os.kill({worker.pid}, {int(number)})"
        subprocess.run([sys.executable, "-S", "-c", code], check=True)
    os.kill(worker.pid, signal.SIGINT)
    worker.join(0.3)
    assert worker.is_alive()
    worker.terminate()
    worker.join(10)
    assert worker.exitcode == 128 + signal.SIGTERM


def test_process_that_ends_with_an_error_takes_its_workers_along():
    code = (
        "from tests.test_bigscl.test_workers import start_worker\n"
        "print(start_worker().pid, flush=True)\n"
        "raise RuntimeError('in mid-epoch')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 1
    assert not os.path.exists(f"/proc/{done.stdout.strip()}")


class Endless(IterableDataset):
    """Batches that are sent through sockets."""

    def __iter__(self):
        while True:
            yield torch.zeros(1 << 16)


def load(url):
    """Take batches of two workers that would read tars of this URL, and print the pids of the workers."""
    method = workers.start_method([url])
    loader = DataLoader(
        Endless(),
        batch_size=None,
        num_workers=2,
        multiprocessing_context=method,
        worker_init_fn=workers.on_start(method),
    )
    with workers.without_main_module():
        batches = iter(loader)
    for _ in range(8):
        next(batches)
    print(*(worker.pid for worker in batches._workers), flush=True)
    return batches


@pytest.fixture
def sockets():
    """A folder for temporary files with a short name: addresses of sockets have at most 107 characters."""
    with tempfile.TemporaryDirectory(prefix="t-") as folder:
        yield Path(folder)


def ends_soon(pid):
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("url", ["a.tar", "s3://bucket/a.tar"])
@pytest.mark.parametrize("end", ["", "import os; os.kill(os.getpid(), 9)"])
def test_a_process_that_ends_or_is_killed_leaves_no_worker_and_no_folder(sockets, url, end):
    code = f"from tests.test_bigscl.test_workers import load\nbatches = load({url!r})\n{end}"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "TMPDIR": str(sockets)},
    )
    pids = [int(word) for word in done.stdout.split()]
    assert len(pids) == 2, done.stderr
    assert all(ends_soon(pid) for pid in pids)
    assert done.returncode == (-9 if end else 0)
    assert not list(sockets.iterdir())


def test_folders_of_jobs_that_were_killed_whole_are_removed_at_the_next_start(sockets):
    left, new, used = (sockets / f"bigscl-sockets-{name}" for name in ("left", "new", "used"))
    somebodys = sockets / "bigscl-experiments"
    for folder in (left, new, used, somebodys):
        folder.mkdir()
        (folder / "listener-x").touch()
    for folder in (left, used, somebodys):
        os.utime(folder, (0, 0))
    held = workers._lock(used)
    try:
        code = "from bigscl.data.workers import make_socket_folder as make\nmake()\nmake()"
        environment = {**os.environ, "TMPDIR": str(sockets)}
        subprocess.run([sys.executable, "-c", code], check=True, env=environment)
    finally:
        os.close(held)
    assert set(sockets.iterdir()) == {new, used, somebodys}


def test_a_silent_loader_is_named_once_and_again_after_twice_as_long(monkeypatch, caplog):
    monkeypatch.setattr(workers, "SILENT_SECONDS", 0.05)
    waits = Waits()
    assert waits.longest() == 0.0
    with caplog.at_level(logging.WARNING), waits.waiting(lambda: "loader worker 1 reads a.tar"):
        deadline = time.monotonic() + 30
        while len(caplog.messages) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert waits.longest() >= 0.2
    assert waits.longest() == 0.0
    assert all("loader worker 1 reads a.tar" in message for message in caplog.messages)
    assert len(caplog.messages) == 3
