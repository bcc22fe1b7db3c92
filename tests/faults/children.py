"""The test's side of the fork server: start children, wait for them, and see how they ended."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.faults.injector import Plan

ROOT = Path(__file__).parent.parent.parent
# One thread for each process: sums come out in one order, and ranks do not fight for the cores.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
# Of the object store on loopback; without any, obstore would ask the machine's metadata service for them.
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1"}
HANG_SECONDS = 60.0
POLL_SECONDS = 0.003


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


class ForkServer:
    """A server process; it and its children are gone at the end of the block. Threads may share it."""

    def __init__(self, *modules: str) -> None:
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.server", *modules],
            cwd=ROOT,
            env={**os.environ, **ENVIRONMENT, **CREDENTIALS},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
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
        plan: Plan | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> int:
        """The process id of a child that calls `module:function` with the arguments as strings."""
        pid: int = self._ask(
            {
                "do": "start",
                "target": target,
                "arguments": [str(argument) for argument in arguments],
                "plan": None if plan is None else plan.to_json(),
                "environment": dict(environment or {}),
                "output": str(output),
            }
        )
        return pid

    def wait_any(self, pids: Sequence[int], seconds: float = HANG_SECONDS) -> dict[int, Ended]:
        """Those that ended or stand still, when at least one does; nothing after `seconds`."""
        deadline = time.monotonic() + seconds
        while True:
            events = self._ask({"do": "look", "pids": list(pids)})
            if events or time.monotonic() > deadline:
                return {pid: Ended(how=how, number=number) for pid, how, number in events}
            time.sleep(POLL_SECONDS)

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
