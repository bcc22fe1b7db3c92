"""Errors, one class for each reaction; a message says what was found, what was expected, and what to do."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager


class StoreError(Exception):
    """An error that a user can act on; a bug is an AssertionError instead."""


class NotAStore(StoreError):
    """Nothing, something else, or a store whose creation was interrupted: correct the path, or create it."""


class AlreadyExists(StoreError):
    """A store, or other data, is where one was to be created."""


class OtherFormat(StoreError):
    """Written by a newer bigscl (upgrade), or before its first release."""


class IndexMismatch(StoreError):
    """The store belongs to other data: use another path, or the shards it was made from."""


class BadFile(StoreError):
    """A small file of the store is invalid: it was damaged, or written by something else."""


class StorageFailed(StoreError):
    """The file system or server refused: fix it, then resume."""


@contextmanager
def storage_errors(place: str) -> Iterator[None]:
    """Raise errors of the file system as StorageFailed, with what to do next."""
    try:
        yield
    except OSError as error:
        raise storage_error(place, error) from error


def storage_error(what: str, error: OSError) -> StorageFailed:
    reason = error.strerror or str(error) or type(error).__name__
    if error.filename and str(error.filename) not in what:
        reason = f"{reason}: {error.filename}"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        hint = "Use another place, or ask for permission to write there."
        return StorageFailed(f"{what}: cannot be written to, or cannot be read ({reason}). {hint}")
    if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP):
        return StorageFailed(f"{what}: {reason}. Check the path, then run the same command again.")
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    hint = "Free some space" if full else "Fix the storage"
    return StorageFailed(f"{what}: {reason}. {hint}, then resume: the last commit is intact.")


class SnapshotMissing(StoreError):
    """The snapshot asked for is not, or is no longer, retained."""


class CommitConflict(StoreError):
    """Another process committed in between: two runs share one store."""


class LeaseHeld(StoreError):
    """Another run holds the store: wait for it, or break the lease if its holder is dead."""


class ChunkCorrupt(StoreError):
    """A chunk a snapshot names is missing or fails its checksum: roll back, or reset its samples."""


class BadValues(StoreError, ValueError):
    """NaN or out-of-range values were handed in; nothing of them was stored."""


class NoFreeSlot(StoreError):
    """Every slot of a shard is named by a retained snapshot: drop one, or create with more slots."""


class ReadOnly(StoreError):
    """A write to a store that is open for reading."""
