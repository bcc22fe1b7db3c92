"""The `bigscl` command: finds the verb, imports its file, and turns users' mistakes into one line."""

import importlib
import sys
from typing import Any

import typer

from bigscl.text import printable
from bigscl.tools.errors import explain

# Click, or the part of it that comes with typer, raises it for a command line that cannot be parsed.
UsageError: Any = typer.BadParameter.__mro__[1]

# Each verb is a function `command` in the file tools/<verb>.py, or an `app` of sub-commands. Only the verb
# that is called is imported, and a verb imports torch only inside the function that needs it, so that
# `bigscl show` answers at once.
VERBS: tuple[str, ...] = (
    "quickstart",
    "study",
    "index",
    "shards",
    "plan",
    "doctor",
    "score",
    "compare",
    "show",
    "render",
    "export",
    "diff",
    "verify",
    "repair",
    "compact",
    "unlock",
)


class Verbs(typer.core.TyperGroup):
    """A group whose commands are files, imported when they are asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in VERBS:
            return None
        module = importlib.import_module(f"tools.{cmd_name}")
        if hasattr(module, "app"):
            return typer.main.get_command(module.app)
        verb = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        settings = getattr(module, "context_settings", None)
        verb.command(name=cmd_name, context_settings=settings)(module.command)
        return typer.main.get_command(verb)


app = typer.Typer(
    cls=Verbs,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
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
    """Train multi-label classifiers from single-label datasets; look after their heatmap store."""


def main(arguments: list[str] | None = None) -> None:
    """Run one verb and exit: 2 and one line on stderr after a user's or the outside world's error."""
    try:
        code = app(args=arguments, prog_name="bigscl", standalone_mode=False)
    except UsageError as error:
        code = _report_usage(error)
    except Exception as error:
        message = explain(error)
        if message is None:  # a bug keeps its traceback
            raise
        print(f"bigscl: {printable(message, keep=chr(10))}", file=sys.stderr)
        code = 2
    raise SystemExit(code or 0)


def _report_usage(error: Any) -> int:
    """Print what is wrong with the command line; a call without any argument gets the help."""
    message = error.format_message()
    if "\n" in message:
        error.show()
    elif message:  # without one, the help has been printed
        command = "bigscl" if error.ctx is None else error.ctx.command_path
        told = printable(message.rstrip("."))
        print(f"{command}: {told}. See `{command} --help`.", file=sys.stderr)
    return int(error.exit_code)


if __name__ == "__main__":
    main()
