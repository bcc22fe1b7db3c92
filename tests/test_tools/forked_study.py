"""`bigscl study` whose commands are forks instead of launchers and interpreters.

Call it in a fork of the server: python -m tests.test_tools.forked_study OUT CONFIG ...
"""

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

from bigscl.tools.cli import main
from bigscl.tools.shared import running
from tests.fork_server import run_module
from tests.forked_ranks import Rank, forker


def module_words(words: list[str]) -> list[str]:
    """Return the module and arguments of a command of a study, with a launcher or without."""
    return words[words.index("-m", 2 if "launch" in words else 0) + 1 :]


if __name__ == "__main__":
    start = forker(run_module)

    def popen(words: list[str], *, stdout: Any, env: dict[str, str], **_: Any) -> Rank:
        return start([sys.executable, "-u", "-m", *module_words(words)], env, stdout and stdout.name)

    running.subprocess = SimpleNamespace(Popen=popen, STDOUT=subprocess.STDOUT)  # type: ignore[assignment]
    main(["study", *sys.argv[1:]])
