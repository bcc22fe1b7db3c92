"""The options of a training, for `bigscl train` and `python -m bigscl.train`."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bigscl.common.command_line import Settings

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
