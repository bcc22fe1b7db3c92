"""Signals and a launcher's death, in small processes of their own."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from bigscl.common.failures import STOPPED

ROOT = Path(__file__).parent.parent.parent
LISTEN = """
import multiprocessing, os, queue, signal, sys, time
from bigscl.distributed import signals as interrupts
asked = queue.SimpleQueue()
def wait_for_ever():
    time.sleep(1000)
"""
LAUNCHERS = {"TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION"}
USUAL = {name: value for name, value in os.environ.items() if name not in LAUNCHERS}
WAIT = 60


def start(code, **environment):
    return subprocess.Popen(
        [sys.executable, "-c", LISTEN + code],
        cwd=ROOT,
        env={**USUAL, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def end_of(process):
    """Exit code, lines of output, errors."""
    output, errors = process.communicate(timeout=WAIT)
    return process.returncode, output.split(), errors


def has_ended(pid):
    """Whether a process that is not our own child ends soon; a zombie only waits for its parent."""
    deadline = time.monotonic() + WAIT
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.02)
    return False


def test_signals_ask_to_stop_and_close_together_count_as_one():
    code, output, errors = end_of(
        start("""
interrupts.SAME_REQUEST_SECONDS = 1e9
with interrupts.Interrupts() as listening:
    listening.stop_with(lambda: asked.put(None))
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGINT, signal.SIGTERM):
        os.kill(os.getpid(), number)
        asked.get(timeout=60)
        print(number.name)
""")
    )
    assert code == 0, errors
    assert output == ["SIGTERM", "SIGUSR1", "SIGINT", "SIGINT", "SIGTERM"]
    assert errors.count("Press Ctrl-C again") == 1


@pytest.mark.parametrize("second", ["SIGINT", "SIGTERM"])
def test_second_interrupt_ends_a_process_that_hangs_and_its_workers(second):
    process = start(f"""
interrupts.SAME_REQUEST_SECONDS = 0
with interrupts.Interrupts() as listening:
    listening.stop_with(lambda: asked.put(None))
    worker = multiprocessing.get_context("fork").Process(target=wait_for_ever)
    worker.start()
    print(worker.pid, flush=True)
    os.kill(os.getpid(), signal.SIGINT)
    asked.get(timeout=60)
    os.kill(os.getpid(), signal.{second})
    wait_for_ever()
""")
    code, (worker,), errors = end_of(process)
    assert code == 130, errors
    assert "ended without saving" in errors
    assert has_ended(int(worker))


def test_a_run_that_gets_no_batch_after_a_signal_ends_without_saving():
    """Its step would be the place to stop, and none comes."""
    code, output, errors = end_of(
        start("""
interrupts.SILENT_SECONDS, since = 0.2, time.monotonic()
with interrupts.Interrupts() as listening:
    listening.stop_with(lambda: print("asked", flush=True), lambda: time.monotonic() - since)
    time.sleep(0.5)
    print("waits", flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    wait_for_ever()
""")
    )
    assert (code, output) == (STOPPED, ["waits", "asked"])
    assert "no batch has come for" in errors
    assert "without saving" in errors


def test_second_sigterm_still_lets_the_run_save():
    code, output, errors = end_of(
        start("""
interrupts.SAME_REQUEST_SECONDS = 0
with interrupts.Interrupts() as listening:
    listening.stop_with(lambda: asked.put(None))
    for _ in range(3):
        os.kill(os.getpid(), signal.SIGTERM)
        asked.get(timeout=60)
print("saved")
""")
    )
    assert (code, output) == (0, ["saved"]), errors


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_before_training_ends_the_process_with_one_line(number):
    process = start("""
with interrupts.Interrupts():
    print("ready", flush=True)
    wait_for_ever()
""")
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    code, _, errors = end_of(process)
    assert code == STOPPED
    assert errors == f"bigscl.train: stopped by {number.name} before training began.\n"


def test_signals_of_a_forked_worker_are_its_own():
    code, output, errors = end_of(
        start("""
def signal_itself():
    os.kill(os.getpid(), signal.SIGTERM)
    os._exit(7)
with interrupts.Interrupts() as listening:
    listening.stop_with(lambda: asked.put(None))
    worker = multiprocessing.get_context("fork").Process(target=signal_itself)
    worker.start()
    worker.join()
print(worker.exitcode, asked.qsize())
""")
    )
    assert (code, output) == (0, ["7", "0"]), errors


def test_handlers_are_as_before_at_the_end():
    code, _, errors = end_of(
        start("""
before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
with interrupts.Interrupts():
    assert signal.getsignal(signal.SIGINT) is not before[0]
assert before == (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))
assert signal.set_wakeup_fd(-1) == -1
""")
    )
    assert code == 0, errors


RUN = """
import os, signal, sys, time
from bigscl.distributed import signals as interrupts
with interrupts.Interrupts() as listening:
    listening.stop_with(lambda: print("asked", flush=True))
    print(os.getpid(), flush=True)
    while os.path.exists(sys.argv[1]):
        time.sleep(0.02)
print("saved", flush=True)
"""


def launched(folder, *signals, **environment):
    """A run whose launcher was killed, after the run got some signals; its output so far."""
    flag = folder / "running"
    flag.touch()
    launcher = start(
        f"import subprocess; subprocess.run([sys.executable, '-c', {RUN!r}, {str(flag)!r}])", **environment
    )
    run = psutil.Process(int(launcher.stdout.readline()))
    for number in signals:
        run.send_signal(number)
        assert launcher.stdout.readline() == "asked\n"
    launcher.kill()
    launcher.wait(WAIT)
    return run, launcher, flag


@pytest.mark.parametrize("variable", sorted(LAUNCHERS))
def test_run_ends_when_its_launcher_is_killed(tmp_path, variable):
    run, launcher, _ = launched(tmp_path, **{variable: "no"})
    assert end_of(launcher)[2].startswith("bigscl.train: the launcher")
    assert has_ended(run.pid)


@pytest.mark.parametrize(
    ("signals", "environment"),
    [((), {}), ((signal.SIGINT,), {"ACCELERATE_MIXED_PRECISION": "no"})],
    ids=["the shell that started it ended", "asked to save"],
)
def test_run_lives_on_when(tmp_path, signals, environment):
    run, launcher, flag = launched(tmp_path, *signals, **environment)
    # Longer than it takes to notice: it would be gone by now.
    with pytest.raises(psutil.TimeoutExpired):
        run.wait(2.5)
    flag.unlink()
    assert end_of(launcher)[1][-1] == "saved"


def test_torch_launcher_that_dies_while_the_run_is_saved_ends_it(tmp_path):
    """It dies of a second Ctrl-C at last, while accelerate's own dies of the first."""
    _, launcher, _ = launched(tmp_path, signal.SIGINT, TORCHELASTIC_RUN_ID="none")
    assert "the launcher" in end_of(launcher)[2]
