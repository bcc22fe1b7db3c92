"""Files of a run and files of others: atomic writing, JSON lines, tables, and errors that name the file."""

import csv
import errno
import importlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from bigscl.common.text import printable, reason_of
from bigscl.common.user_error import UserError

logger = logging.getLogger(__name__)

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
OUTSIDE = (
    *FULL,
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO, errno.ESTALE),
    *(errno.ENOENT, errno.EEXIST, errno.EISDIR, errno.ENOTDIR, errno.ENOTEMPTY, errno.ENAMETOOLONG),
)
"""Errors of the disk, of paths and of permissions. Any other error is a bug and keeps its traceback."""


# Errors


class BadFile(UserError):
    """A file cannot be used; the message names it and says what was found, what was expected, what to do."""


@contextmanager
def parse_errors(path: str | Path, what: str, remedy: str) -> Iterator[None]:
    """Turn every exception of a library into BadFile: `<path>: not <what> (<reason>). <remedy>`.

    Put only the library's call and the first check of its result inside: a bug of ours would be reported as a
    bad file.
    """
    try:
        yield
    except BadFile:
        raise
    except Exception as error:  # A broken file can make a library raise anything.
        raise BadFile(f"{printable(str(path))}: not {what} ({reason_of(error)}). {remedy}") from error


def explain(error: OSError) -> str | None:
    """Return one line for people if the disk, a path or a permission caused the error, None otherwise."""
    if isinstance(error, FileNotFoundError) and error.errno is None:
        return str(error)  # one of our own, with a message
    if error.errno not in OUTSIDE:
        return None
    where = f"{error.filename}: " if error.filename is not None else ""
    if error.errno in FULL:
        return (
            f"{where}could not be written: {error.strerror}. Free some space, then run the same command "
            f"again: what was saved before is intact."
        )
    return f"{where}{error.strerror}. Check the path and its permissions, then run the same command again."


@contextmanager
def name_os_errors(path: Path, temporary: Path | None = None) -> Iterator[None]:
    """Make OSErrors of the block name the file: a failed `write` names none, others the temporary file.

    An error that names another file, such as one that is read in the block, stays as it is.
    """
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename in (None, temporary, str(temporary)):
            error.filename = str(path)
        raise


# Writing


@contextmanager
def atomic_write(path: Path, *, suffix: str = "partial") -> Iterator[Path]:
    """Yield a temporary path to write to; it is synced and renamed to `path` if the block succeeds.

    Processes that may write the same file at the same time need a `suffix` each.
    """
    partial = path.with_name(f".{path.name}.{suffix}")
    with name_os_errors(path, partial):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield partial
            sync(partial)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
        sync(path.parent)


def write_text(path: Path, content: str) -> None:
    """Write a text file atomically: after a crash at any moment it holds the old text or the new one."""
    with atomic_write(path) as partial:
        partial.write_text(content)


def sync(path: Path) -> None:
    """Return when a file's bytes, or a folder's names, will survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def append_lines(path: Path, lines: list[str]) -> None:
    """Append lines to a file. If a crash left an incomplete last line, start on a new line after it."""
    with name_os_errors(path), path.open("ab+") as file:
        torn = False
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            torn = file.read(1) != b"\n"
        text = "".join(f"{line}\n" for line in lines)
        file.write((("\n" if torn else "") + text).encode())


# Reading


def existing_folder(path: Path) -> Path:
    """Return the path, or the nearest folder above it that exists."""
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())


def free_bytes(place: str) -> int | None:
    """Return the free bytes at a path that may not exist yet; None for an object store."""
    return None if "://" in place else shutil.disk_usage(existing_folder(Path(place))).free


def machine_ram_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a file with one JSON object per line; skip lines that a crash left incomplete."""
    if not path.exists():
        return []
    rows, torn = [], 0
    for line in path.read_bytes().split(b"\n"):
        value = _parse_object(line)
        if value is not None:
            rows.append(value)
        elif line.strip():
            torn += 1
    if torn:
        logger.warning("%s: skipped %d lines that are not JSON objects, as a crash leaves them", path, torn)
    return rows


def read_json_object(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file; None if the file is empty, incomplete or holds something else."""
    return _parse_object(path.read_bytes())


def _parse_object(data: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


# Folders: they appear whole and vanish whole, whatever moment a crash falls into


@contextmanager
def atomic_folder(path: Path, check: Callable[[], object] = lambda: None) -> Iterator[Path]:
    """Yield a temporary folder to fill; it is synced and renamed to `path` if the block succeeds.

    An older folder at `path` is replaced. `check` is called right before the renaming and may raise: then
    everything stays as it was.
    """
    repair_folder(path)
    partial, old = _hidden(path, "partial"), _hidden(path, "old")
    try:
        with name_os_errors(path, partial):
            partial.mkdir(parents=True)
        yield partial
        for each in (*sorted(partial.rglob("*")), partial):
            with name_os_errors(path / each.relative_to(partial), each):
                sync(each)
        check()
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    if path.exists():
        _rename(path, old)
    _rename(partial, path)
    sync(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def repair_folder(path: Path) -> None:
    """Complete or undo what a crash interrupted: afterwards the folder is there whole, or gone."""
    old = _hidden(path, "old")
    if old.exists() and not path.exists():
        _rename(old, path)  # the crash fell between the two renames
    for leftover in (_hidden(path, "partial"), old, _hidden(path, "removed")):
        shutil.rmtree(leftover, ignore_errors=True)


def remove_folder(path: Path) -> None:
    """Remove a folder with all of its files, from one moment to the next."""
    removed = _hidden(path, "removed")
    shutil.rmtree(removed, ignore_errors=True)
    with name_os_errors(path):
        _rename(path, removed)
        sync(path.parent)
    shutil.rmtree(removed, ignore_errors=True)


def rename_folder(path: Path, name: Path) -> None:
    shutil.rmtree(name, ignore_errors=True)
    _rename(path, name)


def find_folder(path: Path) -> Path:
    """Return where to read the folder: at its path, or under the old folder's name while it is replaced."""
    old = _hidden(path, "old")
    return old if old.is_dir() and not path.is_dir() else path


def _rename(folder: Path, name: Path) -> None:
    """Rename a folder; tests kill the process before and after every call."""
    folder.rename(name)


def _hidden(path: Path, what: str) -> Path:
    return path.with_name(f".{path.name}.{what}")


# Tables (CSV, TSV, JSON lines, Parquet), and lists of class names


def load_pyarrow(path: object, instead: str) -> tuple[Any, Any]:
    """Return pyarrow and pyarrow.parquet; UserError, with what to use `instead`, if they are missing."""
    try:
        return importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise UserError(f"{path}: needs pyarrow: pip install pyarrow; or use {instead}") from None


LONGEST_NUMBER = 9
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


class ClassNumbers:
    """Numbers of classes, which files give by name or number; a name comes first."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._numbers = {name: number for number, name in enumerate(names)}

    def __contains__(self, name: str) -> bool:
        return name in self._numbers

    def of(self, label: Any, where: str) -> int:
        """Return the number of a class; BadFile, with where it was, if there is none."""
        text = "" if isinstance(label, bool) or not isinstance(label, str | int) else str(label)
        if text in self._numbers:
            return self._numbers[text]
        number = int(text) if text.isascii() and text.isdecimal() and len(text) <= LONGEST_NUMBER else -1
        if not 0 <= number < len(self._names):
            raise BadFile(
                f"{printable(where)}: unknown class {label!r:.60}, expected one of {len(self._names)} names, "
                f"as {self._names[0]!r}, or a number of 0 to {len(self._names) - 1}"
            )
        return number
