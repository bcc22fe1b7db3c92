"""Objects read from front to back, such as tars; broken connections are resumed from the byte reached."""

import io
import zlib
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any, TypeVar

from bigscl.store.backends.retries import RetryPolicy, cause_of
from bigscl.store.backends.schemes import Location, StorageOptions
from bigscl.store.errors import StoreError

# A tar that cannot be read is skipped, so a server is waited for less long than for a store. One that never
# answered, or that did not come back, fails soon: otherwise each of 1,000 shards would wait for it.
RETRY_SECONDS = 20.0
FIRST_CONTACT_SECONDS = 1.5
# What has come in of a part when the connection breaks is lost; the client's default is 10 MB.
PART_BYTES = 1 << 14
SKIP_BYTES = 1 << 20

T = TypeVar("T")
_patience: dict[str, RetryPolicy] = {}
"""By server, for all objects that are read from it."""


class ObjectReader(io.RawIOBase):
    """An object behind a URL. Errors are StoreErrors, in one line that names the URL."""

    # Invariant: `_checksum` is that of the `_position` bytes that were handed out.

    def __init__(self, url: str, options: StorageOptions | None = None) -> None:
        location = Location.parse(url, options)
        self._url, self._server = location.url, location.server
        self._client, self._key = location.object()
        self._patience = _patience.setdefault(
            location.server,
            RetryPolicy(
                location.url,
                location.credentials,
                retry_seconds=RETRY_SECONDS,
                first_contact_seconds=FIRST_CONTACT_SECONDS,
            ),
        )
        self._parts: Iterator[Any] | None = None
        self._part = memoryview(b"")
        self._condition: dict[str, Any] | None = None
        self._version: tuple[str | None, datetime] | None = None
        self._position = self._checksum = 0
        self.length = 0
        self._patiently(self._open)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill (a part of) the buffer; 0 at the end of the object."""
        data = self._patiently(lambda: self._read(len(buffer)))
        buffer[: len(data)] = data
        self._checksum = zlib.crc32(data, self._checksum)
        self._position += len(data)
        return len(data)

    def close(self) -> None:
        self._parts, self._part = None, memoryview(b"")
        super().close()

    def _patiently(self, operation: Callable[[], T]) -> T:
        def attempt() -> T:
            try:
                return operation()
            except Exception:
                self._parts, self._part = None, memoryview(b"")
                raise

        try:
            return self._patience.call("read it", attempt, self._url)
        except FileNotFoundError as error:
            raise StoreError(f"{self._url}: could not read it: {cause_of(error)}. Check the URL.") from error
        except StoreError:
            _patience.pop(self._server, None)
            raise

    def _read(self, size: int) -> bytes:
        if self._parts is None:
            self._open()
        data = self._next(size)
        if not data and self._position < self.length:
            raise ConnectionError(f"the connection was closed at byte {self._position} of {self.length}")
        return data

    def _next(self, size: int) -> bytes:
        """At most `size` bytes of the stream; none at its end."""
        assert self._parts is not None
        while not self._part and (part := next(self._parts, None)) is not None:
            self._part = memoryview(part)
        data, self._part = bytes(self._part[:size]), self._part[size:]
        return data

    def _open(self) -> None:
        if self._position and self._condition is not None and self._open_rest():
            return
        found = self._get({})
        self._skip_what_was_read()
        self.length = found.meta["size"]
        self._version = found.meta["e_tag"], found.meta["last_modified"]
        self._condition = _condition_of(*self._version)

    def _open_rest(self) -> bool:
        """Ask for the bytes from the position on; whether the server can do that."""
        from obstore.exceptions import NotSupportedError, PreconditionError

        assert self._condition is not None
        try:
            found = self._get({"range": {"offset": self._position}, **self._condition})
        except PreconditionError as error:
            raise self._replaced() from error
        except NotSupportedError:
            return False
        # Some servers ignore conditions.
        if (found.meta["e_tag"], found.meta["last_modified"]) != self._version:
            raise self._replaced()
        return True

    def _get(self, options: Any) -> Any:
        import obstore

        found = obstore.get(self._client, self._key, options=options)
        self._parts, self._part = iter(found.stream(PART_BYTES)), memoryview(b"")
        return found

    def _skip_what_was_read(self) -> None:
        """Read up to the byte reached; the bytes must be those that were handed out."""
        left, checksum = self._position, 0
        while left:
            data = self._next(min(left, SKIP_BYTES))
            if not data:
                raise ConnectionError(f"the connection was closed {left} bytes before byte {self._position}")
            left, checksum = left - len(data), zlib.crc32(data, checksum)
        if checksum != self._checksum:
            raise self._replaced()

    def _replaced(self) -> StoreError:
        return StoreError(
            f"{self._url}: it was replaced while it was read (at byte {self._position}). Read it again."
        )


def _condition_of(tag: str | None, modified: datetime) -> dict[str, Any] | None:
    """Return the condition of a range: a strong entity tag, or else a date; None where there is neither."""
    if tag is not None and not tag.startswith("W/"):
        return {"if_match": tag}
    # The client gives 1970 where the server names no date.
    return {"if_unmodified_since": modified} if modified.timestamp() > 0 else None


def list_objects(url: str, options: StorageOptions | None = None) -> list[str]:
    """Sorted URLs of all objects below a prefix that ends in '/', or in the whole bucket."""
    import obstore

    location = Location.parse(url, options)
    client = location.client()
    prefix = location.path.rstrip("/")

    def list_all() -> list[str]:
        return sorted(entry["path"] for page in obstore.list(client, prefix or None) for entry in page)

    names = RetryPolicy(location.url, location.credentials).call("list the shards", list_all)
    return [f"{location.scheme}://{location.bucket}/{name}" for name in names]
