"""What ends a run from outside: signals, and the death of its launcher. A thread of its own listens.

Python runs a signal handler in the main thread and between two instructions: too late while a collective
waits for a rank that is gone, and too early in the middle of a queue's locking. So the handlers do nothing.
The interpreter writes the number of a signal into a pipe when it arrives, and the thread reads it there.
"""

import contextlib
import multiprocessing
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn, Self

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
PARENT_POLL_SECONDS = 1.0
SAME_REQUEST_SECONDS = 1.0
"""A launcher may hand on a signal that the process got already: what comes this soon is the same request."""


class Interrupts:
    """Turns the first signal into a request to stop, and leaves at once when asked again or left alone.

    Nothing is saved by leaving: a run resumes from its last checkpoint, as after `kill -9`.
    """

    def __init__(self, *, speaks: bool = True) -> None:
        self._speaks = speaks
        self._stop: Callable[[], object] | None = None
        self._asked = False
        self._interrupted_at: float | None = None
        self._parent = os.getppid()

    def save_first(self, stop: Callable[[], object]) -> None:
        """From now on a signal calls `stop`, and the run saves itself; before, it ends at once."""
        self._stop = stop

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
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.set_wakeup_fd(self._pipe_before)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._ended = True
        # The thread may have received the request to leave: then this process ends while it waits here.
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
            if self._is_abandoned():
                self._leave(
                    1, f"the launcher (process {self._parent}) is gone. Resume with the same command."
                )

    def _receive(self, number: signal.Signals) -> None:
        now = time.monotonic()
        if self._stop is None:
            self._leave(128 + number, f"stopped by {number.name} before training began.")
        elif self._is_second(number, now):
            self._leave(130, "ended without saving. Resume from the last checkpoint with the same command.")
        elif number == signal.SIGINT and self._interrupted_at is None:
            self._interrupted_at = now
            self._say("saving after this step. Press Ctrl-C again to end at once without saving.")
        self._asked = True
        self._stop()

    def _is_second(self, number: signal.Signals, now: float) -> bool:
        """Whether somebody who interrupted the run insists. Torch's launcher makes it a SIGTERM."""
        if self._interrupted_at is None or number == signal.SIGUSR1:
            return False
        return now - self._interrupted_at >= SAME_REQUEST_SECONDS

    def _is_abandoned(self) -> bool:
        """Whether the launcher is dead. A shell that started the run may well end before it does."""
        if os.getppid() == self._parent:
            return False
        if "TORCHELASTIC_RUN_ID" in os.environ:
            return True
        # Accelerate's launcher of a single process dies of Ctrl-C before the run is saved.
        return "ACCELERATE_MIXED_PRECISION" in os.environ and not self._asked

    def _say(self, message: str) -> None:
        if self._speaks:
            with contextlib.suppress(OSError):  # a terminal that is gone
                print(f"bigscl.train: {message}", file=sys.stderr, flush=True)

    def _leave(self, code: int, message: str) -> NoReturn:
        """End this process and its loader workers now, whatever its other threads wait for."""
        self._say(message)
        for worker in multiprocessing.active_children():
            worker.kill()
        os._exit(code)


def _do_nothing(*_: object) -> None:
    """With a handler in place the interpreter notes the signal, and the process lives on."""


def _stay_out_of_the_pipe() -> None:
    """A forked process inherits the pipe: its signals are not those of this run."""
    with contextlib.suppress(ValueError):  # forked by another thread than the main one
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_stay_out_of_the_pipe)
