"""Ask a run to save and exit."""

import time
from pathlib import Path
from typing import Annotated

import typer

from bigscl.common.command_line import AsJson
from bigscl.tools.shared.terminal import print_result
from bigscl.training.options import StopFile

POLL_SECONDS = 0.5


def command(
    run: Annotated[Path, typer.Argument(help="Folder of the run.", show_default=False)],
    wait: Annotated[
        float, typer.Option(min=0, max=86_400, help="Seconds to wait until the run has been saved.")
    ] = 0.0,
    cancel: Annotated[bool, typer.Option("--cancel", help="Take a request back.")] = False,
    as_json: AsJson = False,
) -> None:
    """Ask a run to finish its step, commit, save and exit with code 0, wherever it runs.

    The request is a file in the run's folder, which all nodes share: it works where a signal does not reach
    the ranks, or would kill the launcher. No scheduler starts a run again that ended with code 0. If the run
    is not training, its next start removes the file.
    Exit code 1 if the run is not saved within --wait seconds.

    Example: bigscl stop runs/imagenet_resnet50_scl --wait 300
    """
    if not (run / "run.json").exists():
        raise typer.BadParameter(f"{run}: not the folder of a run: it has no run.json.", param_hint="run")
    file = StopFile(run)
    if cancel:
        file.clear()
        print_result({"run": str(run), "requested": False}, f"{run}: the request is taken back", as_json)
        return
    file.request()
    # The run removes the file after it has saved.
    deadline = time.monotonic() + wait
    while file.path.exists() and time.monotonic() < deadline:
        time.sleep(min(POLL_SECONDS, wait))
    saved = not file.path.exists()
    state = "is saved" if saved else "will save and exit after its step, if it is training"
    print_result({"run": str(run), "requested": True, "saved": saved}, f"{run}: {state}", as_json)
    if wait and not saved:
        raise typer.Exit(1)
