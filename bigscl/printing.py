"""Names that come from files, as they may be printed: no control characters, and only some of thousands."""

from collections.abc import Iterable
from itertools import islice

MOST = 10


def printable(text: str, keep: str = "") -> str:
    """The text with all that a terminal would obey or cannot show written as escapes of Python's.

    That is control characters, marks of direction, lone surrogates and bytes that were not UTF-8. Characters
    in `keep` stay.
    """
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or one in keep else _escaped(one) for one in text)


def first_few(names: Iterable[str], count: int, *, most: int = MOST, join: str = ", ") -> str:
    """The first `most` of `count` names, printable, and how many more there are."""
    shown = join.join(printable(name) for name in islice(names, most))
    return shown if count <= most else f"{shown}{join}and {count - most:,} more"


def _escaped(one: str) -> str:
    # Python keeps a byte that is not UTF-8 as a lone surrogate.
    if 0xDC80 <= ord(one) <= 0xDCFF:
        return f"\\x{ord(one) - 0xDC00:02x}"
    return one.encode("unicode_escape").decode()
