"""Only its parent ends a loader worker."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time

from bigscl.data.workers import obey_parent_only

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
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
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
