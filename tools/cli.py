"""The `bigscl` command: finds the verb, imports its file, and turns users' mistakes into one line."""

import importlib
import sys
from typing import Any

import typer

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


def main(arguments: list[str] | None = None) -> Any:
    """Run one verb; a user's mistake ends in one clear line on stderr and exit code 2."""
    from store.errors import StoreError

    try:
        return app(args=arguments)
    except (StoreError, ValueError, OSError) as error:
        message = str(error)
    except Exception as error:
        if not type(error).__module__.startswith("obstore"):
            raise
        reason = str(error).splitlines()[0]
        message = f"the object store: {reason}. Check bucket, --endpoint, --region and credentials."
    from bigscl.printing import printable

    print(f"bigscl: {printable(message, keep=chr(10))}", file=sys.stderr)
    raise SystemExit(2)


if __name__ == "__main__":
    main()
