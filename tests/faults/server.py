"""A process that has done the imports, and forks a child for each call asked of it.

python -m tests.faults.server MODULE ...

It reads a request a line and answers each with a line, all in JSON. It never starts a thread, so its children
are as good as new processes; a child leads a process group, which is killed when the child ends.
"""

import contextlib
import gc
import importlib
import json
import os
import signal
import sys
import traceback
from typing import Any

from tests.faults.hooks import arm
from tests.faults.injector import Plan

STORE_ERROR, OS_ERROR = 3, 4
"""Exit codes of a child that ended with an error of the store's own, or with one of the system's."""


def call(request: dict[str, Any]) -> int:
    """The exit code of what a child was asked to do."""
    module, function = request["target"].split(":")
    target = getattr(importlib.import_module(module), function)
    if request["plan"] is not None:
        arm(Plan.from_json(request["plan"]))
    from bigscl.store import StoreError

    try:
        return target(*request["arguments"]) or 0
    except StoreError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return STORE_ERROR
    except OSError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return OS_ERROR
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
        return 1


def become_child(request: dict[str, Any]) -> None:
    """Never returns."""
    os.setpgid(0, 0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.environ.update(request["environment"])
    code = call(request)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class Server:
    """The children by their process ids."""

    def __init__(self) -> None:
        self._alive: set[int] = set()

    def start(self, request: dict[str, Any]) -> int:
        pid = os.fork()
        if pid == 0:
            become_child(request)
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)
        self._alive.add(pid)
        return pid

    def look(self, request: dict[str, Any]) -> list[tuple[int, str, int]]:
        """(pid, `exit`, `signal` or `stopped`, number) of those that changed since the last look."""
        return [event for pid in request["pids"] if (event := self._look(pid)) is not None]

    def _look(self, pid: int) -> tuple[int, str, int] | None:
        found, status = os.waitpid(pid, os.WNOHANG | os.WUNTRACED)
        if found == 0:
            return None
        if os.WIFSTOPPED(status):
            return pid, "stopped", os.WSTOPSIG(status)
        self.kill_group(pid)
        self._alive.discard(pid)
        return (
            (pid, "signal", os.WTERMSIG(status))
            if os.WIFSIGNALED(status)
            else (pid, "exit", os.WEXITSTATUS(status))
        )

    @staticmethod
    def kill_group(pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)

    def kill_all(self) -> None:
        for pid in self._alive:
            self.kill_group(pid)


def main(modules: list[str]) -> None:
    for name in modules:
        importlib.import_module(name)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    # Children collect garbage, which takes long among all that the imports made.
    gc.freeze()
    server = Server()
    try:
        for line in iter(sys.stdin.readline, ""):
            request = json.loads(line)
            answer: Any = server.start(request) if request["do"] == "start" else server.look(request)
            print(json.dumps(answer), flush=True)
    finally:
        server.kill_all()
    # Libraries complain about leaks when the interpreter is taken apart.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
