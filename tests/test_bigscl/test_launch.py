"""`bigscl.launch` around launchers that behave as torch's: every code but 0 is 1, and SIGTERM a traceback."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from bigscl.common.failures import LAUNCH_FOLDER, STOPPED
from bigscl.launch import main

ROOT = Path(__file__).parent.parent.parent
RANK = """
import os, queue, sys
from bigscl.common.failures import STOPPED, end_in_launch, exit_now
from bigscl.distributed.signals import Interrupts
asked = queue.SimpleQueue()
with Interrupts() as listening:
    if 'early' not in sys.argv:
        listening.stop_with(lambda: asked.put(None))
    os.write(1, b'ready %d\\n' % os.getpid())
    asked.get(timeout=60)
    if 'fails' in sys.argv:
        exit_now(2)
    os.write(1, b'stopped\\n')  # in one piece: both ranks write to one pipe
sys.exit(end_in_launch(STOPPED))
"""
LAUNCHER = """
import signal, subprocess, sys, time
def end(*_):
    raise RuntimeError('told to end')
signal.signal(signal.SIGTERM, end)
if sys.argv[1] == 'waits':
    print('ready', flush=True)
    time.sleep(60)
# As torch does it: each rank in a session of its own.
ranks = [subprocess.Popen([sys.executable, *sys.argv[1:]], start_new_session=True) for _ in range(2)]
sys.exit(any([rank.wait() for rank in ranks]))
"""


def launch(*words, ready=2, **environment):
    """A wrapped launcher of two ranks, once they are ready; the ids of its ranks."""
    usual = {name: value for name, value in os.environ.items() if name != LAUNCH_FOLDER}
    call = [sys.executable, "-m", "bigscl.launch", sys.executable, "-c", LAUNCHER, *words]
    process = subprocess.Popen(
        call,
        cwd=ROOT,
        env={**usual, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    lines = [process.stdout.readline().split() for _ in range(ready)]
    assert all(line[0] == "ready" for line in lines), lines
    return process, [int(pid) for _, *pids in lines for pid in pids]


def end_of(process):
    output, errors = process.communicate(timeout=60)
    return process.returncode, output.split(), errors


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_signal_reaches_the_ranks_alone_and_their_code_is_that_of_the_launch(number):
    process, _ = launch("-c", RANK)
    process.send_signal(number)
    code, output, errors = end_of(process)
    assert (code, output) == (STOPPED, ["stopped", "stopped"]), errors
    assert "Traceback" not in errors


def test_signal_to_every_process_of_a_job_is_one_request():
    process, _ = launch("-c", RANK)
    wrapper = psutil.Process(process.pid)
    for each in [wrapper, *wrapper.children(recursive=True)]:
        each.send_signal(signal.SIGTERM)
    code, output, errors = end_of(process)
    assert (code, output, errors) == (STOPPED, ["stopped", "stopped"], "")


def test_rank_that_fails_while_it_stops_decides_the_code():
    process, ranks = launch("-c", RANK, "fails")
    os.kill(ranks[0], signal.SIGTERM)
    os.kill(ranks[1], signal.SIGTERM)
    assert end_of(process)[0] == 2


def test_ranks_that_are_stopped_before_training_end_with_the_same_code():
    process, _ = launch("-c", RANK, "early")
    process.send_signal(signal.SIGTERM)
    code, _, errors = end_of(process)
    assert code == STOPPED
    assert errors.splitlines() == ["bigscl.train: stopped by SIGTERM before training began."] * 2


def test_launcher_without_ranks_is_killed_with_all_that_it_started():
    process, _ = launch("waits", ready=1)
    started = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGUSR1)
    code, _, errors = end_of(process)
    assert (code, errors) == (STOPPED, "bigscl.launch: stopped by SIGUSR1 before training began.\n")
    assert not psutil.wait_procs(started, timeout=10)[1]


def test_everything_ends_when_the_wrapper_is_killed():
    process, ranks = launch("-c", RANK, TORCHELASTIC_RUN_ID="none")
    process.kill()
    process.communicate(timeout=30)
    deadline = time.monotonic() + 30
    while any(psutil.pid_exists(rank) for rank in ranks):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(("code", "expected"), [("exit 0", 0), ("exit 3", 3), ("kill -9 $$", 137)])
def test_without_codes_of_ranks_the_code_is_the_launchers(code, expected):
    words = [sys.executable, "-m", "bigscl.launch", "sh", "-c", code]
    assert subprocess.run(words, cwd=ROOT, check=False).returncode == expected


@pytest.mark.parametrize(
    ("words", "said"), [([], "usage"), (["--help"], "usage"), (["nosuch-launcher"], "nosuch")]
)
def test_words_that_are_no_launcher_end_in_one_line(capsys, words, said):
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        assert main(words) == 2
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    errors = capsys.readouterr().err
    assert said in errors
    assert errors.count("\n") == 1
