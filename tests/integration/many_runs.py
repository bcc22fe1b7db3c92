"""Calls the trainer once for each list of arguments in a file, and writes down how each call ended.

python -m tests.integration.many_runs CALLS.json RESULTS.json

Importing torch takes seconds and a small run a fraction of one: many short runs share a process.
"""

import contextlib
import gc
import io
import json
import sys
import traceback
from pathlib import Path

from accelerate.state import AcceleratorState, GradientState

from bigscl.train import main


def call(arguments: list[str]) -> dict[str, object]:
    """Exit code, output and errors of one call; a traceback where it ended in none."""
    output, errors = io.StringIO(), io.StringIO()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    code: object = None
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        try:
            code = main(arguments)
        except BaseException:
            traceback.print_exc()
    return {"code": code, "output": output.getvalue(), "errors": errors.getvalue()}


if __name__ == "__main__":
    # A run collects garbage between its phases, which takes long among all that the imports made.
    gc.freeze()
    calls = json.loads(Path(sys.argv[1]).read_text())
    Path(sys.argv[2]).write_text(json.dumps([call(arguments) for arguments in calls]))
