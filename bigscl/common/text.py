"""Texts for people: names that come from files, reasons of errors, and sizes in bytes."""

from collections.abc import Iterable
from itertools import islice

MAX_NAMES = 10
MAX_REASON_CHARACTERS = 200


def printable(text: str, keep: str = "") -> str:
    """Return the text with every character that a terminal would obey or cannot show as a Python escape.

    Those are control characters, direction marks, lone surrogates and bytes that were not UTF-8. Characters
    in `keep` stay.
    """
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() or letter in keep else _escape(letter) for letter in text)


def _escape(character: str) -> str:
    # Python keeps a byte that is not UTF-8 as a lone surrogate.
    if 0xDC80 <= ord(character) <= 0xDCFF:
        return f"\\x{ord(character) - 0xDC00:02x}"
    return character.encode("unicode_escape").decode()


def first_few(names: Iterable[str], count: int, *, most: int = MAX_NAMES, join: str = ", ") -> str:
    """Return the first `most` of `count` names, printable, and the number of the others."""
    shown = join.join(printable(name) for name in islice(names, most))
    return shown if count <= most else f"{shown}{join}and {count - most:,} more"


def reason_of(error: BaseException) -> str:
    """Return the message of an exception as one short line."""
    said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    lines = said.strip().splitlines()
    text = lines[0] if lines else type(error).__name__
    if isinstance(error, KeyError):
        text = f"{text} is missing"
    return printable(text[:MAX_REASON_CHARACTERS])


def size(num_bytes: float) -> str:
    """Return a number of bytes with its unit, in powers of 1000: `5.9 MB`."""
    for unit in ("B", "KB", "MB", "GB"):
        if abs(num_bytes) < 999.5:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB"
