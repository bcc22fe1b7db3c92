"""Files of others: whatever is wrong with one ends in an error of ours that names it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bigscl.printing import printable

LONGEST_REASON = 200


class BadFile(ValueError):
    """A file cannot be used; the message names it and says what was found, expected, and what to do."""


@contextmanager
def parsing(path: str | Path, what: str, remedy: str) -> Iterator[None]:
    """Turn all that a library raises over a file into BadFile: `<path>: not <what> (<reason>). <remedy>`.

    Only a library's call and the first look at its result belong inside: a bug of ours would look like a bad
    file.
    """
    try:
        yield
    except BadFile:
        raise
    except Exception as error:  # Libraries raise whatever a broken file makes them trip over.
        raise BadFile(f"{printable(str(path))}: not {what} ({reason_of(error)}). {remedy}") from error


def reason_of(error: BaseException) -> str:
    """What an exception says, in one short line."""
    said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    lines = said.strip().splitlines()
    text = lines[0] if lines else type(error).__name__
    if isinstance(error, KeyError):
        text = f"{text} is missing"
    return printable(text[:LONGEST_REASON])
