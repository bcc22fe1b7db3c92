"""Tables as CSV, JSON lines or Parquet, written batch by batch; a file appears whole or not at all."""

import csv
import importlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Columns = Mapping[str, type]
"""Names and types: int, float, str or bool. Any value may be None."""
Record = tuple[Any, ...]
Write = Callable[[Sequence[Record]], None]


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A name to write to: the file gets its own when the block ends well, and is removed when it does not."""
    partial = path.with_name(f".{path.name}.partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def table_writer(path: Path, columns: Columns) -> Iterator[Write]:
    """Gives `write(records)`, as often as there are batches; the suffix says which format."""
    writers = {".csv": _csv, ".jsonl": _jsonl, ".parquet": _parquet}
    if path.suffix not in writers:
        raise ValueError(f"{path}: tables are written as {', '.join(writers)}")
    with written_whole(path) as partial, writers[path.suffix](partial, columns) as write:
        yield write


@contextmanager
def _csv(path: Path, columns: Columns) -> Iterator[Write]:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        yield writer.writerows


@contextmanager
def _jsonl(path: Path, columns: Columns) -> Iterator[Write]:
    with path.open("w") as file:
        yield lambda records: file.writelines(
            json.dumps(dict(zip(columns, record, strict=True))) + "\n" for record in records
        )


@contextmanager
def _parquet(path: Path, columns: Columns) -> Iterator[Write]:
    try:
        pyarrow = importlib.import_module("pyarrow")
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise ValueError(".parquet: needs pyarrow: pip install pyarrow; or write .csv or .jsonl") from None
    types = {int: pyarrow.int64(), float: pyarrow.float64(), str: pyarrow.string(), bool: pyarrow.bool_()}
    schema = pyarrow.schema([(name, types[kind]) for name, kind in columns.items()])
    with parquet.ParquetWriter(path, schema) as writer:

        def write(records: Sequence[Record]) -> None:
            arrays = [list(column) for column in zip(*records, strict=True)] or [[] for _ in columns]
            writer.write_table(pyarrow.table(dict(zip(columns, arrays, strict=True)), schema=schema))

        yield write
