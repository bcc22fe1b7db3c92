"""Runs of the trainer in forks of one process, killed or failing at the n-th call of a function.

python -m tests.integration.forks

Reads one request per line, answers with one line each. Importing torch takes seconds and a small run a
fraction of one; a fork that is killed leaves what a killed job leaves: a lease, half a folder, no cleanup.
"""

import errno
import functools
import importlib
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent


class Forks:
    """The process that forks, as a test sees it."""

    def __init__(self, folder: Path) -> None:
        self._log = folder / "forks.log"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.integration.forks", str(self._log)],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __call__(self, *arguments: object, kill: str = "", full: str = "") -> tuple[int, str]:
        """(exit code, output) of a run. `kill` and `full` name a moment: `module:function before|after n`."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = {"arguments": [str(word) for word in arguments], "kill": kill, "full": full}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        code = int(self._process.stdout.readline())
        output = self._log.read_text()
        if kill:
            assert code == -signal.SIGKILL, f"{kill}: never came\n{output}"
        return code, output

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def inject(moment: str, act: Callable[[], object]) -> None:
    """Act at the n-th call of a function, before or after it is done."""
    target, when, number = moment.split()
    module, _, path = target.partition(":")
    owner: Any = importlib.import_module(module)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    function, calls = getattr(owner, name), iter(range(1, 10**9))

    @functools.wraps(function)
    def acting(*arguments: Any, **options: Any) -> Any:
        due = next(calls) == int(number)
        if due and when == "before":
            act()
        result = function(*arguments, **options)
        if due and when == "after":
            act()
        return result

    setattr(owner, name, acting)


def fail_as_full() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def serve(log: str) -> None:
    from bigscl.train import main

    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            code = 1
            file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(file, 1)
            os.dup2(file, 2)
            try:
                if request["kill"]:
                    inject(request["kill"], lambda: os.kill(os.getpid(), signal.SIGKILL))
                if request["full"]:
                    inject(request["full"], fail_as_full)
                code = main(request["arguments"])
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    serve(sys.argv[1])
