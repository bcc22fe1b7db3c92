"""Rehearse a run, or check this machine or cluster."""

from pathlib import Path
from typing import Annotated

import typer

from bigscl.common.command_line import AsJson, Settings
from bigscl.common.failures import report_to_launcher
from bigscl.common.user_error import UserError
from bigscl.tools.shared.open_store import StorageFlags
from bigscl.tools.shared.terminal import print_result


def command(
    config: Annotated[
        Path | None,
        typer.Argument(metavar="CONFIG", help="YAML file of the run. Default: check the environment only."),
    ] = None,
    settings: Settings = None,
    steps: Annotated[int, typer.Option(min=1, max=100_000, help="Timed steps of each type of epoch.")] = 40,
    processes: Annotated[
        int | None,
        typer.Option(
            min=1, max=100_000, help="Processes of the run, for the end of an epoch. Default: as here."
        ),
    ] = None,
    place: Annotated[
        str | None,
        typer.Option(help="Without a CONFIG: where the store will be, a path or s3://bucket/prefix."),
    ] = None,
    *,
    storage: StorageFlags,
    as_json: AsJson = False,
) -> None:
    """Rehearse a run: train a few dozen steps on this hardware, the run's own data and its storage.

    Without a config: check versions, devices, backends and free disk; under a launcher, that all processes
    share the place of the store.

    Prints images/s and what bounds them, peak memory, differences of this device from a CPU reference in each
    precision, and hours and bytes of the whole run. All of it happens in a folder beside the run's, which is
    removed; the run itself is not touched. Exit code 1 if there are problems.

    Start both as you will start the training:

    accelerate launch --config_file configs/accelerate/8gpu.yaml -m bigscl preflight CONFIG

    Example: bigscl preflight configs/quickstart_scl.yaml --steps 20
    """
    if config is None:
        if processes is not None:
            raise UserError("--processes: only with a CONFIG, whose epochs it is about")
        _check_environment(place, storage, as_json)
        return
    if place is not None or storage != StorageFlags():
        raise UserError("--place, --endpoint, --region, --anonymous: only without a CONFIG, which has them")
    from bigscl.config import load_config
    from bigscl.tools.shared.rehearsal_report import rehearsal_text, rehearse

    run = load_config(config, settings or [], to_train=True)
    facts = rehearse(run, steps, processes)
    if facts is None:  # another rank reports
        return
    print_result(facts, rehearsal_text(facts), as_json)
    if facts["problems"]:
        # Torch's launcher prints it as the last thing.
        report_to_launcher("bigscl preflight: problems found\n" + "\n".join(facts["problems"]))
        raise typer.Exit(1)


def _check_environment(place: str | None, storage: StorageFlags, as_json: bool) -> None:
    from bigscl.preflight.environment import check_environment, environment_text

    facts = check_environment(place, storage.options)
    if facts is not None:
        print_result(facts, environment_text(facts), as_json)
        if facts["problems"]:
            raise typer.Exit(1)
