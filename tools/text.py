"""Numbers and tables as people read them."""

from collections.abc import Sequence
from datetime import UTC, datetime

from bigscl.printing import printable


def size(num_bytes: float) -> str:
    """Bytes with a unit, in powers of 1000 as disks are sold: `5.9 MB`."""
    for unit in ("B", "KB", "MB", "GB"):
        if abs(num_bytes) < 999.5:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB"


def counted(number: int, what: str) -> str:
    """`1 shard`, `2 shards`, `1,281 shards`."""
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def moment(seconds: float) -> str:
    """A point in time."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")


def table(heads: Sequence[str], rows: Sequence[Sequence[object]], indent: str = "  ") -> str:
    """Columns under their heads; numbers to the right, all else to the left."""
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
    """A histogram on its side."""
    most, room = max([*counts, 1]), max(map(len, labels), default=0)
    return "\n".join(
        f"{indent}{label.rjust(room)}  {'#' * -(-count * width // most)} {count:,}"
        for label, count in zip(labels, counts, strict=True)
    )
