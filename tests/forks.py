"""Processes that start in milliseconds: forks of a server that has imported the trainer and the tools.

Importing torch takes seconds and a small run a fraction of one. A fork behaves as a new process does: it
has its own process group, environment and output, and leaves the same files when it is killed.
"""

import functools
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from tests.faults.injector import Plan

ROOT = Path(__file__).parent.parent
# One thread for each process: sums come out in one order, and ranks do not fight for the cores.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
# Of the object store on loopback; without any, obstore would ask the machine's metadata service for them.
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1"}
TRAINER_MODULES = (
    "bigscl.train",
    "bigscl.evaluate",
    "bigscl.tools.cli",
    "accelerate.commands.launch",
    "torch.distributed.run",
    # What a run imports later: with the first optimizer a thousand modules, which take longer than the run.
    "torch._dynamo",
    "torchvision",
    "PIL.JpegImagePlugin",
    "PIL.PngImagePlugin",
    "matplotlib.pyplot",
    "tests.integration.tiny",
    "tests.faults.hooks",
)
HANG_SECONDS = 60.0
POLL_SECONDS = 0.02
PATIENCE_SECONDS = 150.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a child ended, or that it stands still."""

    how: str
    number: int

    @property
    def killed(self) -> bool:
        return self.how == "signal" and self.number == signal.SIGKILL

    @property
    def stopped(self) -> bool:
        return self.how == "stopped"

    @property
    def code(self) -> int | None:
        return self.number if self.how == "exit" else None

    @property
    def returncode(self) -> int:
        """The exit code as `subprocess` gives it: negative for a signal."""
        return self.number if self.how == "exit" else -self.number


class ForkServer:
    """A server process; it and its children are gone at the end of the block. Threads may share it."""

    def __init__(self, *modules: str) -> None:
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.fork_server", *modules],
            cwd=ROOT,
            env={**os.environ, **ENVIRONMENT, **CREDENTIALS},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # Ctrl-C goes to the test, which then ends the server.
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()

    def _ask(self, request: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            return json.loads(self._process.stdout.readline())

    def start(
        self,
        target: str,
        *arguments: object,
        output: Path,
        errors: Path | None = None,
        plan: "Plan | None" = None,
        environment: Mapping[str, str] | None = None,
        kill_group: bool = True,
    ) -> int:
        """Return the process id of a child that calls `module:function` with the arguments as strings.

        Without `errors`, both streams go to `output`. With `kill_group`, what is left of the child's process
        group when it ends is killed.
        """
        pid: int = self._ask(
            {
                "do": "start",
                "target": target,
                "arguments": [str(argument) for argument in arguments],
                "plan": None if plan is None else plan.to_json(),
                "environment": dict(environment or {}),
                "output": str(output),
                "errors": str(errors or output),
                "kill_group": kill_group,
            }
        )
        return pid

    def start_ranks(
        self,
        target: str,
        *arguments: object,
        processes: int,
        output: Path,
        errors: Path | None = None,
        plans: "Mapping[int, Plan] | None" = None,
        environment: Mapping[str, str] | None = None,
    ) -> list[int]:
        """Return the process ids of all ranks, which find each other as those of a launcher do."""
        return [
            self.start(
                target,
                *arguments,
                output=output,
                errors=errors,
                plan=(plans or {}).get(rank),
                environment={**(environment or {}), **given},
            )
            for rank, given in enumerate(environments(processes))
        ]

    def run(
        self,
        target: str,
        *arguments: object,
        processes: int = 1,
        environment: Mapping[str, str] | None = None,
        seconds: float = PATIENCE_SECONDS,
    ) -> "subprocess.CompletedProcess[str]":
        """Call a function on all ranks and wait for their ends, as `subprocess.run` does for a command.

        The exit code is the first that is not 0.
        """
        with tempfile.TemporaryDirectory(prefix="bigscl-forks-") as folder:
            output, errors = Path(folder, "output"), Path(folder, "errors")
            pids = self.start_ranks(
                target, *arguments, processes=processes, output=output, errors=errors, environment=environment
            )
            ended = self.wait_all(pids, seconds)
            codes = [ended[pid].returncode for pid in pids]
            code = next(filter(None, codes), 0)
            words = [target, *map(str, arguments)]
            return subprocess.CompletedProcess(words, code, output.read_text(), errors.read_text())

    def run_module(
        self,
        name: str,
        *arguments: object,
        processes: int = 1,
        environment: Mapping[str, str] | None = None,
        seconds: float = PATIENCE_SECONDS,
    ) -> "subprocess.CompletedProcess[str]":
        """Do what `python -m name arguments` does, on all ranks."""
        return self.run(
            "tests.fork_server:run_module",
            name,
            *arguments,
            processes=processes,
            environment=environment,
            seconds=seconds,
        )

    def wait_any(self, pids: Sequence[int], seconds: float = HANG_SECONDS) -> dict[int, Ended]:
        """Those that ended or stand still, when at least one does; nothing after `seconds`."""
        deadline = time.monotonic() + seconds
        while True:
            events = self._ask({"do": "look", "pids": list(pids)})
            if events or time.monotonic() > deadline:
                return {pid: Ended(how=how, number=number) for pid, how, number in events}
            wait_for_an_end(pids, POLL_SECONDS)

    def wait(self, pid: int, seconds: float = HANG_SECONDS) -> Ended:
        """How one ended; one that does not is killed, and is a fault."""
        found = self.wait_any([pid], seconds)
        if not found:
            self.kill(pid)
            raise AssertionError(f"the process hung for {seconds} s and was killed")
        return found[pid]

    def kill(self, pid: int) -> None:
        """End a child that is still there, frozen or not."""
        os.killpg(pid, signal.SIGKILL)
        self.wait_any([pid])

    def wait_all(
        self, pids: Sequence[int], seconds: float = HANG_SECONDS, patience: float = 0.0
    ) -> dict[int, Ended]:
        """How all ended. When one is killed, the others get `patience` seconds, then are killed as well."""
        left, ended, deadline = set(pids), dict[int, Ended](), time.monotonic() + seconds
        while left:
            found = self.wait_any(sorted(left), max(0.0, min(deadline - time.monotonic(), seconds)))
            ended |= found
            left -= found.keys()
            if any(each.killed for each in found.values()):
                deadline = min(deadline, time.monotonic() + patience)
            if left and time.monotonic() >= deadline:
                hung = not any(each.killed for each in ended.values())
                for pid in left:
                    os.killpg(pid, signal.SIGKILL)
                for pid in left:
                    ended |= self.wait_any([pid])
                if hung:
                    raise AssertionError(f"{len(left)} of {len(pids)} processes hung for {seconds} s")
                return ended
        return ended


class Child:
    """A forked process that runs `python -m name arguments`, with the methods of `subprocess.Popen`.

    Threads may share it.
    """

    def __init__(
        self,
        server: ForkServer,
        name: str,
        *arguments: object,
        output: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._server, self._lock = server, threading.Lock()
        self.returncode: int | None = None
        self.pid = server.start(
            "tests.fork_server:run_module",
            name,
            *arguments,
            output=output,
            environment=environment,
            # As after any command: what it has started may live on.
            kill_group=False,
        )

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs."""
        # Only one thread may learn of the end from the server, which then forgets the process.
        with self._lock:
            if self.returncode is None and (found := self._server.wait_any([self.pid], 0.0)):
                self.returncode = found[self.pid].returncode
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code when the process has ended; TimeoutExpired if it does not in time."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            wait_for_an_end([self.pid], POLL_SECONDS)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal to a process that has not ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


def wait_for_an_end(pids: Sequence[int], seconds: float) -> None:
    """Sleep until one of the processes ends, or for some time; a process that stands still wakes nobody."""
    if not hasattr(os, "pidfd_open"):
        time.sleep(seconds)
        return
    poll = select.poll()
    with ExitStack() as stack:
        for pid in pids:
            try:
                descriptor = os.pidfd_open(pid)
            except ProcessLookupError:
                return
            stack.callback(os.close, descriptor)
            poll.register(descriptor, select.POLLIN)
        poll.poll(1000 * seconds)


def environments(processes: int) -> list[dict[str, str]]:
    """What a launcher on one machine tells each rank."""
    if processes == 1:
        return [{}]
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "ACCELERATE_MIXED_PRECISION": "no",
        "ACCELERATE_DYNAMO_BACKEND": "no",
    }
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]


def free_port() -> int:
    """Return a port that nobody listens on.

    It is below the range from which the system gives ports to those that ask for any: one of those would be
    given to another test now and then, before the ranks listen on it.
    """
    while True:
        port = random.SystemRandom().randrange(15_000, 32_000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port


_servers = ExitStack()


@functools.cache
def started_server(*modules: str) -> ForkServer:
    """Return the server that has imported these: started at the first call, and shared by all tests."""
    return _servers.enter_context(ForkServer(*modules))


def trainer_server() -> ForkServer:
    """Return the server that has imported the trainer."""
    return started_server(*TRAINER_MODULES)


def close_servers() -> None:
    """End the shared server, if it was started."""
    _servers.close()
    started_server.cache_clear()
