"""Zarr metadata as plain files, written so that the files of two creators cannot mix."""

from collections.abc import Callable, Iterable, Mapping

from bigscl.store.backends.backend import Backend, MemoryBackend
from bigscl.store.errors import AlreadyExists


def described(build: Callable[[Backend], None]) -> dict[str, bytes]:
    """The metadata files that `build` creates, by key."""
    scratch = MemoryBackend("memory://description")
    build(scratch)
    return {key: scratch.read(key) or b"" for key, _ in scratch.sizes("")}


def present(backend: Backend, keys: Iterable[str]) -> dict[str, bytes]:
    """The content of those files that are there."""
    found = {key: backend.read(key) for key in keys}
    return {key: data for key, data in found.items() if data is not None}


def write_metadata(backend: Backend, files: Mapping[str, bytes], leftovers: Mapping[str, bytes]) -> None:
    """Write files that are not there, and put them in place of leftovers of an interrupted creation.

    Nothing is deleted, and a file that is neither ours nor the leftover that was seen is another creator's: a
    creator that was frozen and thawed can change nothing of what its successor made.
    """
    for key, data in files.items():
        try:
            backend.create(key, data)
        except AlreadyExists:
            found = backend.read(key)
            if found == data:
                continue
            if found is None or leftovers.get(key) != found or not backend.swap(key, found, data):
                raise AlreadyExists(
                    f"{backend.url}/{key}: another process creates a store here. Choose another place, or "
                    f"use the store when it is finished."
                ) from None
