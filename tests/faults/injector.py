"""Kill, freeze or fail a process at its n-th storage operation.

An operation is whatever changes files below the places of a plan: the creation of a file, each write of its
bytes, sync, rename, link, delete, truncation, and folders; on an object store each PUT and DELETE. They run
one at a time, so that a process dies between two of them, or in the middle of a write, and nowhere else.
"""

import contextlib
import errno
import json
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self

from tests.faults.kinds import callers, kind_of

How = Literal["before", "after", "torn"]
Action = Literal["kill", "stop", "ENOSPC", "EIO"]
# A full disk refuses these; it still deletes, renames and syncs.
NEEDS_SPACE = {"create", "write", "mkdir", "link", "symlink", "save", "put"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """When to do what. Without `at`, operations are only counted."""

    places: tuple[str, ...]
    """Folders, or prefixes of object stores; what lies elsewhere does not count."""
    log: str
    """A file elsewhere, which gets a line of JSON for the operation that is hit (or for every one)."""
    at: int | None = None
    """The operation to hit; the first one is 1."""
    how: How = "before"
    """Before it is executed, after it, or half-way through a write (other operations: before)."""
    action: Action = "kill"
    lasting: bool = False
    """Errors only: whether every operation from `at` on fails, as on a full disk."""

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        return cls(**{**values, "places": tuple(values["places"])})

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """A storage operation as the log has it."""

    number: int
    name: str
    path: str
    kind: str
    stack: list[str]
    how: str = ""
    action: str = ""

    @property
    def is_write(self) -> bool:
        return self.name in ("write", "save")

    def __str__(self) -> str:
        stack = "\n    ".join(self.stack[:6])
        return f"operation {self.number} ({self.how} {self.name} {self.path}, {self.kind})\n    {stack}"


class Injector:
    """Counts the operations of this process (not of its children) and carries out a plan."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._pid = os.getpid()
        self._count = 0
        # Held while an operation runs; an operation made of others counts as one.
        self._lock = threading.RLock()
        self._inside = threading.local()
        self._log = os.open(plan.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._write = os.write

    def counts(self, path: str) -> bool:
        """Whether an operation on this path is one of those counted, by the process and thread at hand."""
        return (
            os.getpid() == self._pid
            and not getattr(self._inside, "value", False)
            and any(path == place or path.startswith(f"{place}/") for place in self._plan.places)
        )

    def perform(
        self,
        name: str,
        path: str,
        execute: Callable[[], Any],
        tear: Callable[[], Any] | None = None,
        error: Callable[[OSError], Exception] = lambda error: error,
    ) -> Any:
        """What the operation returns, if it comes to that. `tear` does half of it."""
        if not self.counts(path):
            return execute()
        with self._lock, self._alone():
            hit = self._next(name, path)
            if hit:
                self._strike_before(name, tear, error)
            try:
                return execute()
            finally:
                # Also after one that fails, as a link to a name that is taken does.
                if hit:
                    self._strike_after()

    async def request(self, name: str, path: str, execute: Callable[[], Awaitable[Any]]) -> Any:
        """The same for an operation that is awaited; others may run meanwhile."""
        if not self.counts(path):
            return await execute()
        with self._lock:
            hit = self._next(name, path)
            if hit:
                self._strike_before(name, None, lambda error: error)
        try:
            return await execute()
        finally:
            if hit:
                self._strike_after()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        self._inside.value = True
        try:
            yield
        finally:
            self._inside.value = False

    def _next(self, name: str, path: str) -> bool:
        """Count one more; whether it is the one to hit."""
        self._count += 1
        plan = self._plan
        if plan.at is not None and (self._count < plan.at or (self._count > plan.at and not plan.lasting)):
            return False
        if plan.at is None or self._count == plan.at:
            stack = callers()
            kind = kind_of(name, path, stack)
            how, action = ("", "") if plan.at is None else (plan.how, plan.action)
            done = Operation(
                number=self._count, name=name, path=path, kind=kind, stack=stack, how=how, action=action
            )
            self._write(self._log, json.dumps(asdict(done)).encode() + b"\n")
        return plan.at is not None

    def _strike_before(
        self, name: str, tear: Callable[[], Any] | None, error: Callable[[OSError], Exception]
    ) -> None:
        plan = self._plan
        if plan.action in ("kill", "stop"):
            if plan.how == "torn" and tear is not None:
                tear()
            if plan.how != "after":
                self._signal()
        elif plan.action == "EIO" or name in NEEDS_SPACE:
            number = getattr(errno, plan.action)
            raise error(OSError(number, os.strerror(number)))

    def _strike_after(self) -> None:
        if self._plan.action in ("kill", "stop") and self._plan.how == "after":
            self._signal()

    def _signal(self) -> None:
        if self._plan.action == "stop":
            os.kill(self._pid, signal.SIGSTOP)
            return
        os.kill(self._pid, signal.SIGKILL)
        time.sleep(60)  # the signal is on its way, and nothing may happen before it is here


def read_log(path: os.PathLike[str] | str) -> list[Operation]:
    """The operations in a plan's log."""
    try:
        with open(path) as file:
            return [Operation(**json.loads(line)) for line in file]
    except FileNotFoundError:
        return []
