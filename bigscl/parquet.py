"""Parquet files need pyarrow, which the base installation does not have."""

import importlib
from typing import Any

from bigscl.user_error import UserError


def load_pyarrow(place: object, instead: str) -> tuple[Any, Any]:
    """Return the modules pyarrow and pyarrow.parquet; UserError if they are missing.

    `place` is the file to read or write, `instead` the formats that need no pyarrow.
    """
    try:
        return importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise UserError(f"{place}: needs pyarrow: pip install pyarrow; or use {instead}") from None
