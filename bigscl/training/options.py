"""Options of a training, and the file by which users ask it to stop."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bigscl.common.command_line import Settings
from bigscl.common.files import write_text

if TYPE_CHECKING:
    from bigscl.config import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingOptions:
    """Train a multi-label classifier as the YAML file CONFIG says.

    Any setting of the config can be given on the command line, as --data.batch_size 16. Run the same command
    again to resume. Start one process per GPU with accelerate:

    accelerate launch -m bigscl.train configs/quickstart_scl.yaml --run runs/mine --data.batch_size 16

    Example: bigscl train configs/quickstart_scl.yaml --run runs/mine
    """

    config: Annotated[
        Path, typer.Argument(metavar="CONFIG", help="YAML file of the run, or the name of a packaged one.")
    ]
    settings: Settings = None
    resume: Annotated[
        str,
        typer.Option(
            metavar="auto|never|CHECKPOINT",
            help="auto: resume from the newest checkpoint in the run's folder, if there is one; never: "
            "refuse to; or the folder of a checkpoint.",
        ),
    ] = "auto"
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print all settings with comments, and exit.")
    ] = False

    def load(self) -> "Config":
        """Return the config with the settings of the command line."""
        from bigscl.config import load_config

        return load_config(self.config, self.settings or [], to_train=not self.print_config)


# Requests to stop


LARGEST_SHARE = 0.01
"""Of the time of a run that may be spent on looking: a shared file system takes milliseconds for a look."""


class StopFile:
    """The request of `bigscl stop`, as the run sees it."""

    def __init__(self, run: Path) -> None:
        self.path = run / "stop"
        self._next_look = 0.0

    def request(self) -> None:
        """Ask the run to finish its step, save, and exit."""
        write_text(self.path, time.strftime("asked to stop at %Y-%m-%d %H:%M:%S UTC\n", time.gmtime()))

    def is_requested(self) -> bool:
        """Whether somebody asked, as of the last look."""
        began = time.monotonic()
        if began < self._next_look:
            return False
        found = self.path.exists()
        ended = time.monotonic()
        self._next_look = ended + (ended - began) / LARGEST_SHARE
        return found

    def clear(self) -> None:
        """Remove a request that was met, or that an earlier run has left."""
        self.path.unlink(missing_ok=True)
