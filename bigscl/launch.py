"""A launcher that ends as its run does: `python -m bigscl.launch accelerate launch ... -m bigscl.train ...`.

Launchers turn every exit code of a rank into 1, print tracebacks when they are told to end, and do not know
SIGUSR1. So this process receives the signals. The launcher is started with them blocked and sees none. The
ranks get them, end quietly once the run is saved, and leave their exit codes in a folder. Linux only.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bigscl.common.failures import LAUNCH_FOLDER, STOPPED
from bigscl.distributed.signals import SIGNALS

POLL_SECONDS = 0.2
SECONDS_TO_END = 20.0
"""How long ranks that have stopped may take to end."""
PR_SET_PDEATHSIG = 1


def main(words: list[str]) -> int:
    """Run the words as a launcher; return the exit code of its ranks, or the launcher's if they left none."""
    if not words or words[0].startswith("-"):
        print("usage: python -m bigscl.launch accelerate launch ... -m bigscl.train CONFIG", file=sys.stderr)
        return 2
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    with tempfile.TemporaryDirectory(prefix="bigscl-launch-") as folder:
        environment = {**os.environ, LAUNCH_FOLDER: folder}
        try:
            launcher = subprocess.Popen(words, env=environment, preexec_fn=_die_with_parent)
        except OSError as error:
            print(f"bigscl.launch: {words[0]}: {error.strerror}. Check the launcher's name.", file=sys.stderr)
            return 2
        return _wait(launcher, Path(folder))


def _die_with_parent() -> None:
    """Let the kernel kill the launcher when this process is killed: no other signal would reach it."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _wait(launcher: "subprocess.Popen[bytes]", folder: Path) -> int:
    """Pass signals on until the launcher ends."""
    while launcher.poll() is None:
        arrived = signal.sigtimedwait(SIGNALS, POLL_SECONDS)
        codes = _codes(folder)
        if arrived is not None:
            number = signal.Signals(arrived.si_signo)
            if not codes:
                return _end_early(launcher, folder, number)
            for rank in [rank for rank, code in codes.items() if code is None]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank, number)
        if {*codes.values()} == {STOPPED}:
            # Torch's launcher would wait for those of other nodes, up to 300 s, and print a traceback if
            # the first one ends before it.
            launcher.kill()
            launcher.wait()
            _end_ranks(folder)
            return STOPPED
    return _exit_code(_codes(folder), launcher.returncode)


def _end_early(launcher: "subprocess.Popen[bytes]", folder: Path, number: signal.Signals) -> int:
    """End everything at a signal while no rank is there to receive it."""
    _kill_all(folder)
    launcher.wait()
    print(f"bigscl.launch: stopped by {number.name} before training began.", file=sys.stderr)
    return STOPPED


def _end_ranks(folder: Path) -> None:
    """Wait until ranks that have stopped are gone; kill those that take too long."""
    deadline = time.monotonic() + SECONDS_TO_END
    while _processes(folder) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    _kill_all(folder)


def _codes(folder: Path) -> dict[int, int | None]:
    """Return the exit code of each rank by its process id; None if it has not ended, or not by itself."""
    texts = {int(file.name): file.read_text() for file in folder.iterdir()}
    return {rank: int(text) if text else None for rank, text in texts.items()}


def _exit_code(codes: dict[int, int | None], launcher: int) -> int:
    """Return the code of a rank that stopped, else of one that failed, else the launcher's.

    A rank may stop so early that the others only see that it is gone, and fail.
    """
    if STOPPED in codes.values():
        if {*codes.values()} != {STOPPED}:  # The others have said something else.
            print("bigscl.launch: the run was stopped. Resume with the same command.", file=sys.stderr)
        return STOPPED
    failed = [code for code in codes.values() if code]
    return min(failed) if failed else launcher if launcher >= 0 else 128 - launcher


def _kill_all(folder: Path) -> None:
    """Kill every process that was started under this launcher, those included that left its group."""
    while processes := _processes(folder):
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


def _processes(folder: Path) -> list[int]:
    mark, processes = os.fsencode(f"{LAUNCH_FOLDER}={folder}\0"), []
    for file in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # another user's, or gone
            if mark in file.read_bytes():
                processes.append(int(file.parent.name))
    return processes


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
