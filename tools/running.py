"""Commands that a verb starts: shown as one would type them, run in the environment that this one runs in."""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any

CONFIGS = Path(__file__).parent.parent / "configs"
MODULES = {"bigscl": ("-m", "bigscl.tools.cli"), "accelerate": ("-m", "accelerate.commands.accelerate_cli")}
SECONDS_TO_SAVE = 120


def launcher() -> tuple[str, ...]:
    """How a run is started on this machine: `accelerate launch` for a GPU, or for the CPU."""
    import torch

    gpu = torch.cuda.is_available()
    config = CONFIGS / "accelerate" / ("1gpu.yaml" if gpu else "cpu.yaml")
    # Runs that fit a CPU are small: there a second thread would only stand in the way of the loader.
    threads = () if gpu else ("--num_cpu_threads_per_process", "1")
    return ("accelerate", "launch", "--config_file", os.path.relpath(config), *threads)


class Runner:
    """Runs commands, several at a time if asked from several threads, and ends them when it is left."""

    def __init__(self) -> None:
        self._running: set[subprocess.Popen[bytes]] = set()
        self._lock = Lock()
        self._stopped = False

    def run(
        self, words: Sequence[str], *, log: Path | None = None, variables: Mapping[str, str] | None = None
    ) -> None:
        """Run a command to its end, what it says going to a file if one is named; ValueError if it fails."""
        command = [sys.executable, *MODULES.get(words[0], ()), *words[1:]]
        with _opened(log) as output:
            with self._lock:
                if self._stopped:
                    raise KeyboardInterrupt
                # In a session of its own, a launcher and all it has started can be told to stop together.
                process = subprocess.Popen(
                    command,
                    stdout=output,
                    stderr=output and subprocess.STDOUT,
                    env={**os.environ, **(variables or {})},
                    start_new_session=True,
                )
                self._running.add(process)
            code = process.wait()
        with self._lock:
            self._running.discard(process)
        if self._stopped:
            raise KeyboardInterrupt
        if code:
            where = f" What it said is in {log}." if log is not None else ""
            raise ValueError(
                f"this command failed: {shlex.join(words)}.{where} Mend it and start again: it goes on here."
            )

    def stop(self) -> None:
        """Tell what runs to save itself, and wait for that; start nothing any more."""
        with self._lock:
            self._stopped = True
            running = list(self._running)
        for process in running:
            _signal(process, signal.SIGTERM)
        deadline = time.monotonic() + SECONDS_TO_SAVE
        # The launcher leads the group; what it has started may outlive it.
        while any(_signal(process, 0) for process in running) and time.monotonic() < deadline:
            time.sleep(0.1)
        for process in running:
            _signal(process, signal.SIGKILL)

    def __enter__(self) -> "Runner":
        self._before = signal.signal(signal.SIGTERM, signal.default_int_handler)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        signal.signal(signal.SIGTERM, self._before)


@contextmanager
def _opened(log: Path | None) -> Iterator[Any]:
    if log is None:
        yield None
        return
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        yield file


def _signal(process: subprocess.Popen[bytes], number: int) -> bool:
    """Send a signal to all that the command has started; False if nothing of it is left."""
    process.poll()
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return False
    return True
