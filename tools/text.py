"""Numbers and tables for people."""

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from bigscl.common.text import printable
from bigscl.common.text import size as size


def tell(facts: Any, text: str, as_json: bool) -> None:
    """Print the facts as JSON, or the text with control characters escaped."""
    print(json.dumps(facts) if as_json else printable(text, keep="\n\t"))


def counted(number: int, what: str) -> str:
    """Return `1 shard`, `2 shards`, `1,281 shards`."""
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def ranges(numbers: Sequence[int], most: int = 5) -> str:
    """Return rising numbers as `3, 16-31, 40`; after `most` spans, how many more there are."""
    parts: list[tuple[int, int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1] = (parts[-1][0], number)
        else:
            parts.append((number, number))
    told = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in parts[:most])
    left = sum(last - first + 1 for first, last in parts[most:])
    return f"{told} and {left:,} more" if left else told


def moment(seconds: float) -> str:
    """Return a time in UTC; the number of seconds itself if a damaged file has an impossible one."""
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, ValueError, OSError):
        return f"{seconds:g} s"


def table(heads: Sequence[str], rows: Sequence[Sequence[object]], indent: str = "  ") -> str:
    """Return columns under their headings; numbers are aligned right, all else left."""
    cells = [[printable(str(cell)) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(heads, *cells, strict=True)]
    right = [all(isinstance(row[place], int | float) for row in rows) for place in range(len(heads))]
    lines = []
    for line in [list(heads), *cells]:
        padded = [
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(line, widths, right, strict=True)
        ]
        lines.append((indent + "  ".join(padded)).rstrip())
    return "\n".join(lines)


def bars(labels: Sequence[str], counts: Sequence[int], width: int = 40, indent: str = "  ") -> str:
    """Return a histogram with horizontal bars."""
    most, room = max([*counts, 1]), max(map(len, labels), default=0)
    return "\n".join(
        f"{indent}{label.rjust(room)}  {'#' * -(-count * width // most)} {count:,}"
        for label, count in zip(labels, counts, strict=True)
    )
