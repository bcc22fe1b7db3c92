"""The files of a run: written whole or not at all, appended line by line, and errors that name them."""

import errno
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
OUTSIDE = (
    *FULL,
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO, errno.ESTALE),
    *(errno.ENOENT, errno.EEXIST, errno.EISDIR, errno.ENOTDIR, errno.ENOTEMPTY, errno.ENAMETOOLONG),
)
"""What the storage or its owner can be the cause of; any other error is a bug and keeps its traceback."""


def explain(error: OSError) -> str | None:
    """One line for people if the storage or its owner caused the error, None otherwise."""
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
def naming(path: Path) -> Iterator[None]:
    """Make every OSError of the block name the file: a failed `write` does not know its own."""
    try:
        yield
    except OSError as error:
        if error.errno is not None:
            error.filename = str(path)
        raise


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A temporary name to write to. The file gets its own name, synced, when the block ends well."""
    partial = path.with_name(f".{path.name}.partial")
    with naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield partial
            sync(partial)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
        sync(path.parent)


def write_whole(path: Path, content: str) -> None:
    """Write a text file; after a crash at any moment it holds the old text or the new one."""
    with written_whole(path) as partial:
        partial.write_text(content)


def sync(path: Path) -> None:
    """Return when a file's bytes, or a folder's names, will survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def append_lines(path: Path, lines: list[str]) -> None:
    """Append lines to a file; where a crash left half a line, they start after it on a line of their own."""
    with naming(path), path.open("ab+") as file:
        torn = False
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            torn = file.read(1) != b"\n"
        text = "".join(f"{line}\n" for line in lines)
        file.write((("\n" if torn else "") + text).encode())


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The objects in a file of one JSON object per line; lines that a crash left torn are skipped."""
    if not path.exists():
        return []
    found, torn = [], 0
    for line in path.read_bytes().split(b"\n"):
        value = _parse_object(line)
        if value is not None:
            found.append(value)
        elif line.strip():
            torn += 1
    if torn:
        logger.warning("%s: skipped %d lines that are not JSON objects, as a crash leaves them", path, torn)
    return found


def _parse_object(data: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def read_json_object(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None where it is empty, torn or something else."""
    return _parse_object(path.read_bytes())
