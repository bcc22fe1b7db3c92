"""The `bigscl` command: finds the verb and imports its file."""

import importlib
from typing import Any

import typer

from bigscl.common.command_line import HELP, make_command, run

# Each verb is a function `command` in the file tools/<verb>.py, or an `app` of sub-commands. Only the verb
# that is called is imported, and a verb imports torch only inside the function that needs it, so that
# `bigscl show` answers at once. The groups are in the order in which a project uses them.
GROUPS = {
    "Data": {
        "shards": "Write a dataset as tar shards.",
        "index": "Scan tar shards once and write their index.",
        "configs": "List the configs that come with bigscl, and copy them.",
    },
    "Train": {
        "quickstart": "Run the whole system in minutes, offline.",
        "plan": "Estimate disk space, RAM and I/O of a run.",
        "preflight": "Rehearse a run, or check this machine or cluster.",
        "train": "Train a classifier from a config, or resume it.",
        "stop": "Ask a run to save and exit.",
        "study": "Train and compare configs over several seeds.",
    },
    "Evaluate": {
        "evaluate": "Evaluate a run, a checkpoint or published weights.",
        "score": "Make the report of saved predictions.",
        "compare": "Compare the predictions of several runs.",
        "publish": "Write a run's network for others: weights, card, ONNX.",
    },
    "Look": {
        "view": "Look at runs in the browser, while they train or after.",
        "show": "Show a store, or its memory of a sample.",
        "render": "Draw samples with their heatmaps.",
        "review": "List doubtful labels, ask people, use their answers.",
        "export": "Write found labels, scores or heatmaps to files.",
        "diff": "Compare two snapshots, or two stores of the same data.",
    },
    "Store": {
        "verify": "Check every byte of a store.",
        "repair": "Reset the damaged rows of a store.",
        "compact": "Make a store smaller.",
        "unlock": "Break the lease of a dead run.",
    },
}
VERBS = {verb: text for verbs in GROUPS.values() for verb, text in verbs.items()}


class Verbs(typer.core.TyperGroup):
    """A group whose commands are files, imported when they are called."""

    _listing = False

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the list of verbs, without importing them."""
        self._listing = True
        super().format_help(ctx, formatter)

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all verbs."""
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the verb, imported now; None if there is no such verb."""
        if cmd_name not in VERBS:
            return None
        if self._listing:
            panel = next(name for name, verbs in GROUPS.items() if cmd_name in verbs)
            return typer.core.TyperCommand(cmd_name, help=VERBS[cmd_name], rich_help_panel=panel)
        module = importlib.import_module(f"bigscl.tools.{cmd_name}")
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
        from importlib.metadata import version

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
