"""Rows of table files (CSV, TSV, JSON lines, Parquet), and lists of class names."""

import csv
import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from bigscl.common.files import load_pyarrow, parse_errors
from bigscl.common.user_error import UserError

Row = Mapping[str, Any]
CheckColumns = Callable[[list[str]], object]
"""Raises UserError if a file lacks columns; called with those of the file, or of each line of JSON."""


def read_table(path: Path, check: CheckColumns, expected: str) -> list[Row]:
    """Return the rows of a table; BadFile names the line that is wrong and the `expected` columns."""
    if path.suffix not in READERS:
        raise UserError(f"{path}: tables are read from {', '.join(READERS)}")
    if not path.is_file():
        raise FileNotFoundError(f"{path}: not there, expected a table ({', '.join(READERS)})")
    with parse_errors(path, "a table", f"Expected {expected}."):
        return list(READERS[path.suffix](path, check))


def _csv(path: Path, check: CheckColumns, *, delimiter: str = ",") -> Iterator[Row]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file, strict=True, delimiter=delimiter)
        check(list(reader.fieldnames or ()))
        for row in reader:
            if None in row or None in row.values():
                raise UserError(f"line {reader.line_num} has another number of columns than the first line")
            yield row


def _jsonl(path: Path, check: CheckColumns) -> Iterator[Row]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise UserError("no object")
                check(list(row))
            except ValueError as error:
                raise UserError(f"line {number}: {error}") from None
            yield row


def _parquet(path: Path, check: CheckColumns) -> Iterator[Row]:
    _, parquet = load_pyarrow(path, ".csv or .jsonl")
    table = parquet.read_table(path)
    check(table.column_names)
    rows: list[Row] = table.to_pylist()
    yield from rows


READERS: dict[str, Callable[[Path, CheckColumns], Iterator[Row]]] = {
    ".csv": _csv,
    ".tsv": partial(_csv, delimiter="\t"),
    ".jsonl": _jsonl,
    ".parquet": _parquet,
}


def read_class_names(path: Path) -> list[str]:
    """Return the names in a text file with one on each line; UserError if two are the same."""
    with parse_errors(path, "a list of class names", "Give a text file with one name per line."):
        names = path.read_text().splitlines()
    if not names or len(set(names)) < len(names) or not all(names):
        raise UserError(f"{path}: expected a different name on each line, found {len(names)} lines")
    return names
