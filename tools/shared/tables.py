"""Tables as CSV, JSON lines or Parquet, written batch by batch and atomically."""

import csv
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bigscl.common.files import atomic_write, load_pyarrow
from bigscl.common.user_error import UserError

Columns = Mapping[str, type]
"""Names and types of the columns: int, float, str or bool; in Parquet also list, of integers."""
Batch = Mapping[str, NDArray[Any]]
"""Columns of equal length, strings as objects; NaN means no value."""
Write = Callable[[Batch], None]

# Readers of Parquet work by row group: a group per shard would make thousands of small ones.
ROWS_PER_GROUP = 2**17


@contextmanager
def table_writer(path: Path, columns: Columns) -> Iterator[Write]:
    """Yield `write(batch)`, to call for each batch; the suffix of the path gives the format."""
    writers = {".csv": _csv, ".jsonl": _jsonl, ".parquet": _parquet}
    if path.suffix not in writers:
        raise UserError(f"{path}: tables are written as {', '.join(writers)}")
    with atomic_write(path) as partial, writers[path.suffix](partial, columns) as write:
        yield write


@contextmanager
def _csv(path: Path, columns: Columns) -> Iterator[Write]:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        yield lambda batch: writer.writerows(zip(*(_values(batch[name]) for name in columns), strict=True))


def _values(column: NDArray[Any]) -> list[Any]:
    """Return plain values, with None for NaN."""
    if column.dtype.kind != "f":
        return list(column.tolist())
    values = column.astype(object)
    values[np.isnan(column)] = None
    return list(values)


@contextmanager
def _jsonl(path: Path, columns: Columns) -> Iterator[Write]:
    line = "{" + ", ".join(f"{json.dumps(name)}: %s" for name in columns) + "}\n"
    with path.open("w") as file:
        yield lambda batch: file.writelines(
            map(line.__mod__, zip(*(_as_json(batch[name]) for name in columns), strict=True))
        )


def _as_json(column: NDArray[Any]) -> list[str]:
    """Return each value as JSON. Most columns repeat a few values, so each is encoded once."""
    distinct, places = np.unique(column, return_inverse=True)
    encoded = np.array([json.dumps(value) for value in _values(distinct)], dtype=object)
    return list(encoded[places])


@contextmanager
def _parquet(path: Path, columns: Columns) -> Iterator[Write]:
    pyarrow, parquet = load_pyarrow(".parquet", ".csv or .jsonl")
    types = {int: pyarrow.int64(), float: pyarrow.float64(), str: pyarrow.string(), bool: pyarrow.bool_()}
    types[list] = pyarrow.list_(types[int])
    schema = pyarrow.schema([(name, types[kind]) for name, kind in columns.items()])
    waiting: list[Any] = []

    def write_group() -> None:
        writer.write_table(pyarrow.concat_tables(waiting), row_group_size=ROWS_PER_GROUP)
        waiting.clear()

    def write(batch: Batch) -> None:
        arrays = [pyarrow.array(batch[name], types[kind], from_pandas=True) for name, kind in columns.items()]
        waiting.append(pyarrow.table(arrays, schema=schema))
        if sum(len(table) for table in waiting) >= ROWS_PER_GROUP:
            write_group()

    with parquet.ParquetWriter(path, schema) as writer:
        yield write
        if waiting:
            write_group()
