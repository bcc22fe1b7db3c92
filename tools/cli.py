"""The `bigscl` command: finds the verb and imports its file."""

import importlib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import typer

from bigscl.common.command_line import HELP, make_command, run

# Each verb is a function `command` in tools/verbs/<verb>.py, or an `app` of sub-commands; the first line of
# the file is its help. Only the verb that is called is imported, and it imports modules with torch when it
# runs, so that `--help` and `bigscl show` answer at once. The groups are in the order in which a project
# uses them.
GROUPS = {
    "Data": ("shards", "index", "configs"),
    "Train": ("quickstart", "plan", "preflight", "train", "stop", "study"),
    "Evaluate": ("evaluate", "report", "compare", "publish"),
    "Look": ("view", "show", "render", "review", "export", "diff"),
    "Store": ("verify", "repair", "compact", "unlock"),
}
VERBS = tuple(verb for verbs in GROUPS.values() for verb in verbs)


def help_of(verb: str) -> str:
    """Return the first line of a verb's file, which is not imported."""
    with (Path(__file__).parent / "verbs" / f"{verb}.py").open(encoding="utf-8") as file:
        return file.readline().strip().strip('"')


class Verbs(typer.core.TyperGroup):
    """A group whose commands are files, imported when they are called."""

    _listing = False

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the list of verbs, without importing them."""
        self._listing = True
        super().format_help(ctx, formatter)

    def list_commands(self, ctx: Any) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the verb, imported now; None if there is no such verb."""
        if cmd_name not in VERBS:
            return None
        if self._listing:
            panel = next(name for name, verbs in GROUPS.items() if cmd_name in verbs)
            return typer.core.TyperCommand(cmd_name, help=help_of(cmd_name), rich_help_panel=panel)
        module = importlib.import_module(f"bigscl.tools.verbs.{cmd_name}")
        if hasattr(module, "app"):
            group = typer.main.get_command(module.app)
            group.name = cmd_name
            return group
        return make_command(module.command, cmd_name, getattr(module, "several", ()))


app = typer.Typer(
    cls=Verbs,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": list(HELP)},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"bigscl {version('bigscl')}")
        raise typer.Exit


@app.callback()
def bigscl(
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
    ),
) -> None:
    """Train multi-label classifiers from single-label datasets, and manage their heatmap stores."""


def main(arguments: list[str] | None = None) -> None:
    """Run one verb and exit: 0 fine, 1 problems found, 2 wrong usage or an error of the outside world."""
    raise SystemExit(run(typer.main.get_command(app), arguments, "bigscl"))


if __name__ == "__main__":
    main()
