"""Digests of versions, computed from the checksums in the chunks, at no extra cost.

A chunk ends in its CRC-32C. The digest of an array of a version is the CRC-32 over those four bytes of each
of its chunks, in order.
"""

import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from zarr.abc.store import ByteRequest, Store
from zarr.core.buffer import Buffer, BufferPrototype
from zarr.storage import WrapperStore

CHECKSUM_BYTES = 4
# Zarr moves chunks in a thread of its own, which runs each call in its caller's context.
_seen: ContextVar[dict[str, bytes] | None] = ContextVar("chunk checksums", default=None)


class WatchedStore(WrapperStore[Store]):
    """A Zarr store that notes the last bytes of every whole chunk that passes through it."""

    async def get(
        self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        """The bytes of a chunk."""
        value = await self._store.get(key, prototype, byte_range)
        if value is not None and byte_range is None:
            _note(key, value)
        return value

    async def set(self, key: str, value: Buffer) -> None:
        """Store a chunk."""
        await self._store.set(key, value)
        _note(key, value)


def _note(key: str, value: Buffer) -> None:
    seen = _seen.get()
    if seen is not None:
        seen[key] = value[-CHECKSUM_BYTES:].to_bytes()


@contextmanager
def watched() -> Iterator[dict[str, bytes]]:
    """The checksums of the chunks that this thread reads or writes in the block, by key."""
    seen: dict[str, bytes] = {}
    token = _seen.set(seen)
    try:
        yield seen
    finally:
        _seen.reset(token)


def digest(checksums: Iterable[bytes]) -> int:
    """The digest of an array of a version, from the checksums of its chunks in order."""
    return zlib.crc32(b"".join(checksums))
