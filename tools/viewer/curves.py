"""The curves of a run: what is new in its metrics.jsonl."""

import json
from pathlib import Path
from typing import Any

LARGEST_PART = 4_000_000


def curves_of(folder: Path | None, after: int) -> dict[str, Any]:
    """Return the lines from byte `after` on, and where the next ones will start.

    A file that is shorter than that was started again: then all lines, with `start` 0.
    """
    file = None if folder is None else folder / "metrics.jsonl"
    if file is None or not file.is_file():
        return {"start": 0, "next": 0, "lines": []}
    with file.open("rb") as opened:
        end = opened.seek(0, 2)
        start = after if after <= end else 0
        opened.seek(start)
        data = opened.read(LARGEST_PART)
    # The last line may still be written.
    whole = data[: data.rfind(b"\n") + 1]
    return {
        "start": start,
        "next": start + len(whole),
        "lines": [*filter(None, map(_numbers, whole.splitlines()))],
    }


def _numbers(line: bytes) -> dict[str, Any] | None:
    """Return the kind and the numbers of a line; None if a crash left it incomplete."""
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(values, dict) or not isinstance(values.get("kind"), str):
        return None
    numbers = {
        name: value
        for name, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    return {"kind": values["kind"], **numbers}
