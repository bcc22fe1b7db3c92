"""Signals and the death of the launcher, which end a run from outside. A thread listens for them.

Python runs a signal handler in the main thread between two instructions: too late while a collective waits
for a rank that is gone, and too early while a queue takes its lock. So the handlers do nothing. The
interpreter writes the number of a signal into a pipe when it arrives, and the thread reads it from there.
"""

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NoReturn, Self

from bigscl.common.failures import STOPPED, exit_now, join_launch

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
PARENT_POLL_SECONDS = 1.0
SAME_REQUEST_SECONDS = 1.0
"""A launcher may forward a signal that the process has received: within this time it is one request."""

SILENT_SECONDS = 10.0
"""How long a run that is asked to stop waits for its next batch: launchers wait for 30 s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wording:
    """Messages of a program that is interrupted."""

    program: str = "bigscl.train"
    first: str = "saving after this step. Press Ctrl-C again to end at once without saving."
    second: str = "ended without saving. Resume from the last checkpoint with the same command."
    launcher_gone: str = "Resume with the same command."
    too_early: str = "before training began."
    stuck: str = "no batch has come for {seconds:.0f} s: ended without saving. Resume with the same command."


class Interrupts:
    """Turns the first signal into a request to stop; exits at once at the next one, or without a launcher.

    Exiting saves nothing: the run resumes from its last checkpoint, as after `kill -9`.
    """

    def __init__(self, *, prints: bool = True, wording: Wording | None = None) -> None:
        self._prints = prints
        self._wording = wording or Wording()
        self._stop: Callable[[], object] | None = None
        self._clean_up: Callable[[], object] = _do_nothing
        self._silence: Callable[[], float] = lambda: 0.0
        self._asked = False
        self._interrupted_at: float | None = None
        self._parent = os.getppid()

    def stop_with(self, stop: Callable[[], object], silence: Callable[[], float] | None = None) -> None:
        """From now on call `stop` at the first signal, so that the run is saved; before, a signal exits.

        `silence` returns for how many seconds the run has waited for images: a run that is asked to stop and
        gets none has no step after which it could stop, so it ends without saving.
        """
        self._stop, self._silence = stop, silence or self._silence

    def clean_up_with(self, clean_up: Callable[[], object]) -> None:
        """From now on call `clean_up` before exiting at once, while the other threads still run."""
        self._clean_up = clean_up

    def __enter__(self) -> Self:
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._handlers: dict[signal.Signals, Any] = {
            number: signal.signal(number, _do_nothing) for number in SIGNALS
        }
        self._pipe_before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._ended = False
        self._thread = threading.Thread(target=self._listen, name="interrupts", daemon=True)
        self._thread.start()
        # bigscl.launch starts ranks with these signals blocked: they are received from here on.
        self._mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        join_launch()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        signal.set_wakeup_fd(self._pipe_before)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._ended = True
        # If the thread has received a request to exit, the process ends while it waits here.
        while self._thread.is_alive():
            with contextlib.suppress(BlockingIOError):
                os.write(self._write, b"\0")
            self._thread.join(PARENT_POLL_SECONDS)
        os.close(self._read)
        os.close(self._write)

    def _listen(self) -> None:
        while not self._ended:
            arrived, _, _ = select.select([self._read], [], [], PARENT_POLL_SECONDS)
            for number in os.read(self._read, 512) if arrived else b"":
                if number in SIGNALS:
                    self._receive(signal.Signals(number))
            if self._asked and (seconds := self._silence()) >= SILENT_SECONDS:
                self._exit(STOPPED, self._wording.stuck.format(seconds=seconds))
            if self._launcher_is_gone():
                self._exit(1, f"the launcher (process {self._parent}) is gone. {self._wording.launcher_gone}")

    def _receive(self, number: signal.Signals) -> None:
        now = time.monotonic()
        if self._stop is None:
            self._exit(STOPPED, f"stopped by {number.name} {self._wording.too_early}")
        elif self._interrupted_at is not None and number != signal.SIGUSR1:
            # Torch's launcher turns Ctrl-C into SIGTERM.
            if now - self._interrupted_at >= SAME_REQUEST_SECONDS:
                self._exit(130, self._wording.second)
        elif number == signal.SIGINT and self._interrupted_at is None:
            self._interrupted_at = now
            self._print(self._wording.first)
        self._asked = True
        self._stop()

    def _launcher_is_gone(self) -> bool:
        """Return whether the launcher is dead. A shell that started the run may end before it."""
        if os.getppid() == self._parent:
            return False
        if "TORCHELASTIC_RUN_ID" in os.environ:
            return True
        # Accelerate's launcher of a single process ends at Ctrl-C before the run is saved.
        return "ACCELERATE_MIXED_PRECISION" in os.environ and not self._asked

    def _print(self, message: str) -> None:
        if self._prints:
            with contextlib.suppress(OSError):  # a terminal that is gone
                # In one piece, as `print` does not with PYTHONUNBUFFERED: ranks share the terminal.
                sys.stderr.write(f"{self._wording.program}: {message}\n")
                sys.stderr.flush()

    def _exit(self, code: int, message: str) -> NoReturn:
        """End this process and its loader workers now, whatever its threads are waiting for."""
        self._print(message)
        with contextlib.suppress(Exception):  # whatever it meets, the process ends
            self._clean_up()
        exit_now(code)


def _do_nothing(*_: object) -> None:
    """Ignore the signal: with a handler the interpreter writes it to the pipe, and the process continues."""


def _detach_fork() -> None:
    """Detach a forked process from the pipe: its signals are not those of this run."""
    with contextlib.suppress(ValueError):  # forked by another thread than the main one
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_detach_fork)
