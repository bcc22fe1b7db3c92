"""Helpers of all commands: options that are declared once, and the end of a command in an exit code.

Neither torch nor zarr is imported here, so that `--help` answers at once.
"""

import difflib
import inspect
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, fields, is_dataclass
from typing import Annotated, Any, NoReturn, get_type_hints

import typer

from bigscl.common.failures import (
    SECONDS_FOR_THE_FIRST,
    end_in_launch,
    exit_now,
    explain,
    in_a_group,
    lost_other_ranks,
    report_to_launcher,
)
from bigscl.common.text import printable
from bigscl.common.url_secrets import hide, hide_in_logs, take_words

# Click, or the copy of it inside typer, raises this for a command line that it cannot parse.
UsageError: Any = typer.BadParameter.__mro__[1]
HELP = ("-h", "--help")
INTERRUPTED = 130

_SETTINGS = typer.Argument(
    metavar="--section.key value", show_default=False, help="Settings that replace those of CONFIG."
)
Settings = Annotated[list[str] | None, _SETTINGS]
"""Overrides of a config: all words of the command line that are not options of the command."""
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def rank_of_this_process() -> int:
    """Return the rank that the launcher gave to this process; known before torch is set up."""
    return int(os.environ.get("RANK", "0"))


def first_on_this_machine() -> bool:
    """Return whether this process speaks for its machine."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


# Options


def with_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with each parameter that is a dataclass replaced by its fields: shared options."""
    hints = get_type_hints(function, include_extras=True)
    own = inspect.signature(function).parameters
    groups = {name: hints[name] for name in own if is_dataclass(hints[name])}
    parameters: list[inspect.Parameter] = []
    for name, parameter in own.items():
        if name in groups:
            parameters += _parameters_of(groups[name])
        else:
            parameters.append(_keyword(name, parameter.default, hints[name]))

    def call(**values: Any) -> Any:
        given = {
            name: group(**{field.name: values[field.name] for field in fields(group)})
            for name, group in groups.items()
        }
        return function(**given, **{name: values[name] for name in own if name not in groups})

    call.__name__, call.__module__ = function.__name__, function.__module__
    # Of a command with a single group of options, the group says what the command does.
    call.__doc__ = next(iter(groups.values())).__doc__ if len(own) == len(groups) == 1 else function.__doc__
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return call


def _parameters_of(group: type[Any]) -> Iterator[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    for field in fields(group):
        default = inspect.Parameter.empty if field.default is MISSING else field.default
        yield _keyword(field.name, default, hints[field.name])


def _keyword(name: str, default: Any, hint: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)


class Command(typer.core.TyperCommand):
    """A command in which `--option a b c` may stand for `--option a --option b --option c`."""

    several: tuple[str, ...] = ()
    """The options for which it may. A shell writes a glob this way."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words after the options in `several` were repeated for each of their values."""
        return super().parse_args(ctx, list(_repeated(args, self.several)))


def _repeated(words: Iterable[str], options: tuple[str, ...]) -> Iterator[str]:
    current, values = None, 0
    for word in words:
        if word.startswith("-"):
            current, values = (word if word in options else None), 0
        elif current is not None:
            if values:
                yield current
            values += 1
        yield word


def make_command(function: Callable[..., Any], name: str, several: tuple[str, ...] = ()) -> Command:
    call = with_options(function)
    hints = get_type_hints(call, include_extras=True).values()
    takes_settings = any(_SETTINGS in getattr(hint, "__metadata__", ()) for hint in hints)
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    context = {"help_option_names": list(HELP), "ignore_unknown_options": takes_settings}
    app.command(name=name, cls=Command, context_settings=context)(call)
    command = typer.main.get_command(app)
    assert isinstance(command, Command)
    command.several = several
    return command


# The end of a command


class _Start:
    """Whether this process is still in the part of its work that all ranks do alike."""

    is_over = False


def start_is_over() -> None:
    """Let each rank report its own errors from now on. Before, all meet the same, and one reports."""
    _Start.is_over = True


def run(command: Any, arguments: list[str] | None, program: str) -> int:
    """Run a command and return its exit code: 2 after an error of the user's, with one line on stderr."""
    return end_in_launch(_run(command, arguments, program))


def _run(command: Any, arguments: list[str] | None, program: str) -> int:
    _Start.is_over = False
    # Of a notebook or another project; pictures are written without any backend.
    os.environ.pop("MPLBACKEND", None)
    # From here on nothing but url_secrets has the secrets in URLs, not even trackers that note sys.argv.
    hide_in_logs()
    sys.argv[1:] = take_words(sys.argv[1:])
    words = sys.argv[1:] if arguments is None else take_words(arguments)
    if {*HELP} & {*words} and not first_on_this_machine():
        return 0
    try:
        return command.main(args=words, prog_name=program, standalone_mode=False) or 0
    except UsageError as error:
        _say(_usage(error))
        return int(error.exit_code)
    except typer.Abort:
        return INTERRUPTED
    except Exception as error:
        reason = explain(error)
        if in_a_group():
            _leave_group(error, reason, program)
        if reason is not None:
            _say(_line(program, reason))
            return 2
        text = "".join(traceback.format_exception(error))
        if hide(text) == text:
            raise
        print(hide(text), file=sys.stderr)
        return 1


def _line(program: str, reason: str) -> str:
    return f"{program}: {printable(hide(reason), keep=chr(10))}"


def _leave_group(error: Exception, reason: str | None, program: str) -> NoReturn:
    """End this rank, and through the launcher the others, with the reason as the last thing printed."""
    reports = _Start.is_over or first_on_this_machine()
    # An error of the start is usually that of all ranks: the launcher ends this one when the first has
    # reported it. If this rank is still here after a while, it is the only one that knows.
    if lost_other_ranks(error) or not reports:
        time.sleep(SECONDS_FOR_THE_FIRST)
    whole = "".join(traceback.format_exception(error))
    text = hide(whole) if reason is None else _line(program, reason)
    sys.stderr.write(f"{text}\n")  # in one piece: other ranks may write, too
    if _Start.is_over or not reports:
        report_to_launcher(text)
    exit_now(1 if reason is None else 2)


def _say(message: str) -> None:
    if message and (_Start.is_over or first_on_this_machine()):
        print(message, file=sys.stderr)


def _usage(error: Any) -> str:
    """Return what is wrong with the command line; a call without any argument gets the help."""
    message: str = hide(error.format_message())
    if "\n" in message or not message:  # without a message, the help has been printed
        return message
    command = "bigscl" if error.ctx is None else error.ctx.command_path
    if (unknown := re.match(r"No such command '(.*)'", message)) and error.ctx is not None:
        near = difflib.get_close_matches(unknown[1], error.ctx.command.list_commands(error.ctx), n=1)
        message = f"{message.rstrip('.')}; did you mean {near[0]}?" if near else message
    ended = message if message.endswith("?") else f"{message.rstrip('.')}."
    return f"{command}: {printable(ended)} See `{command} --help`."
