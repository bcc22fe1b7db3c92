"""A process that has done the imports, and forks a child for each call it is asked for.

python -m tests.fork_server MODULE ...

It reads one request per line and answers each with one line, all in JSON. It never starts a thread, so its
children are as good as new processes. Each child leads a process group.
"""

import contextlib
import gc
import importlib
import json
import os
import runpy
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

from tests.forked_ranks import fork_ranks

STORE_ERROR, OS_ERROR = 3, 4
"""Exit codes of a child that ended with an error of the store's own, or with one of the system's."""


LAUNCHERS = ("accelerate.commands.launch", "torch.distributed.run")


def run_module(name: str, *arguments: str) -> None:
    """Do what `python -m name arguments` does; the ranks of a launcher are forks, too."""
    if name in LAUNCHERS:
        fork_ranks(run_module)
    if "torch" in sys.modules:
        # A fork has lost the threads of torch's pool. Whoever uses it next makes another pool, and two
        # threads that do so at once abort the process ("Invalid thread pool!").
        torch = sys.modules["torch"]
        torch.set_num_threads(torch.get_num_threads())
    sys.argv = [name, *arguments]
    # What was imported before would be the same module twice, which runpy warns of.
    sys.modules.pop(name, None)
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def call(request: dict[str, Any]) -> int:
    """Return the exit code of the call that a child was asked for."""
    module, function = request["target"].split(":")
    target = getattr(importlib.import_module(module), function)
    if request["plan"] is not None:
        from tests.faults.hooks import arm
        from tests.faults.injector import Plan

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
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        print(error.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1


def become_child(request: dict[str, Any]) -> None:
    """Carry out the request and end the process with its exit code; never returns."""
    os.setpgid(0, 0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    output, errors = (
        os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666) for name in ("output", "errors")
    )
    for source, target in ((nothing, 0), (output, 1), (errors, 2)):
        os.dup2(source, target)
    os.environ.update(request["environment"])
    code = call(request)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class Server:
    """The children by their process ids."""

    def __init__(self) -> None:
        self._alive: dict[int, bool] = {}
        """Whether the process group of a child is killed when the child ends."""

    def start(self, request: dict[str, Any]) -> int:
        """Return the process id of a new child."""
        pid = os.fork()
        if pid == 0:
            become_child(request)
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)
        self._alive[pid] = request["kill_group"]
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
        if self._alive.pop(pid):
            kill_group(pid)
        return (
            (pid, "signal", os.WTERMSIG(status))
            if os.WIFSIGNALED(status)
            else (pid, "exit", os.WEXITSTATUS(status))
        )

    def kill_all(self) -> None:
        """End all children and their groups."""
        for pid in self._alive:
            kill_group(pid)


def kill_group(pid: int) -> None:
    """End all processes of a child's group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def main(modules: list[str]) -> None:
    for name in modules:
        importlib.import_module(name)
    if "bigscl.train" in modules:
        from bigscl.config import load_config

        # What the first config of a process costs: schemas, and a search for plug-ins.
        load_config(Path("quickstart_an"))
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
