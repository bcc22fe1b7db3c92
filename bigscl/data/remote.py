"""The bytes of an object behind http(s) or s3; a connection that breaks is resumed from the byte reached."""

import http.client
import io
import os
import re
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar
from urllib.parse import urlparse

from bigscl.store import CLIENT_OPTIONS, RETRY_CONFIG, cause_of, hint_for

# Tries in a row that bring not one byte. A server that has answered before is given more of them, about 20 s
# in all. One that never has, or that was waited for in vain, fails soon: 1,000 shards would each wait for it.
TRIES = 10
FIRST_TRIES = 5
FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 5.0
# What has come in of a part when the connection breaks is lost; the client's default is 10 MB.
PART_BYTES = 1 << 20
CONNECTION_ERRORS = (OSError, http.client.HTTPException)

T = TypeVar("T")
_answering: set[str] = set()


class Refused(OSError):
    """What no other try would change: no such object, no right to read it, or it is not the same any more."""


class Stream(Protocol):
    """Bytes as they come in."""

    def read(self, size: int, /) -> bytes:
        """At most `size` bytes; none at the end."""
        ...

    def close(self) -> None:
        """Let go of the connection."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An object from byte `start` on; `length` is that of the whole, `version` changes with its content."""

    stream: Stream
    start: int
    length: int | None
    version: str | None


# connect(position, version) asks for the bytes from `position` on, of this version only. A server that cannot
# do that may answer with the whole object.
Connect = Callable[[int, str | None], Answer]


class RemoteFile(io.RawIOBase):
    """An object read from front to back over connections that may break."""

    # Always: `_checksum` is that of the `_position` bytes that were handed out.

    def __init__(self, server: str, connect: Connect) -> None:
        self._server, self._connect = server, connect
        self._stream: Stream | None = None
        self._version: str | None = None
        self._position = self._checksum = self._failures = 0
        self.length: int | None = None
        self._patiently(self._open)

    def readable(self) -> bool:
        """It is."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill (a part of) the buffer; 0 at the end of the object."""
        data = self._patiently(lambda: self._read(len(buffer)))
        buffer[: len(data)] = data
        self._checksum = zlib.crc32(data, self._checksum)
        self._position += len(data)
        self._failures = 0
        return len(data)

    def close(self) -> None:
        """Close the connection."""
        if self._stream is not None:
            self._stream.close()
        self._stream = None
        super().close()

    def _patiently(self, operation: Callable[[], T]) -> T:
        while True:
            try:
                return operation()
            except CONNECTION_ERRORS as error:
                if self._stream is not None:
                    self._stream.close()
                self._stream = None
                self._pause_after(error)

    def _pause_after(self, error: Exception) -> None:
        """Wait before the next try; raises the error if there is none."""
        self._failures += 1
        if isinstance(error, Refused):
            raise error
        if self._failures >= (TRIES if self._server in _answering else FIRST_TRIES):
            _answering.discard(self._server)
            raise error
        time.sleep(min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2 ** (self._failures - 1)))

    def _read(self, size: int) -> bytes:
        if self._stream is None:
            self._open()
        assert self._stream is not None
        data = self._stream.read(size)
        if not data and self.length is not None and self._position < self.length:
            raise OSError(f"the connection was closed at byte {self._position} of {self.length}")
        return data

    def _open(self) -> None:
        answer = self._connect(self._position, self._version)
        self._stream = answer.stream
        _answering.add(self._server)
        if answer.start == 0:
            self._skip_what_was_read()
            self.length, self._version = answer.length, answer.version
        elif answer.start != self._position or answer.version not in (None, self._version):
            raise self._replaced()

    def _skip_what_was_read(self) -> None:
        """Read up to the byte reached; the bytes must be those that were handed out."""
        assert self._stream is not None
        left, checksum = self._position, 0
        while left:
            data = self._stream.read(min(left, 1 << 20))
            if not data:
                raise OSError(f"the connection was closed {left} bytes before byte {self._position}")
            left, checksum = left - len(data), zlib.crc32(data, checksum)
        if checksum != self._checksum:
            raise self._replaced()

    def _replaced(self) -> Refused:
        return Refused(f"it was replaced while it was read (at byte {self._position}); read it again")


def open_http(url: str) -> RemoteFile:
    """An object behind http or https."""
    return RemoteFile(urlparse(url).netloc, lambda position, version: _get(url, position, version))


def _get(url: str, position: int, version: str | None) -> Answer:
    # Without a version a range could be of another object: ask for the whole, and compare its beginning.
    headers = {"Range": f"bytes={position}-", "If-Range": version} if position and version else {}
    try:
        response = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=60)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code >= 500 or error.code in (408, 429):
            raise OSError(str(error)) from error
        raise Refused(str(error)) from error
    length = response.headers.get("Content-Length")
    part = re.match(r"bytes (\d+)-", response.headers.get("Content-Range", ""))
    return Answer(
        stream=response,
        start=int(part[1]) if part and response.status == 206 else 0,
        length=int(length) if length else None,
        version=_version(response.headers),
    )


def _version(headers: Any) -> str | None:
    """What a range may be conditional on: a strong entity tag, or else a date."""
    tag: str | None = headers.get("ETag")
    date: str | None = headers.get("Last-Modified")
    return date if tag is None or tag.startswith("W/") else tag


def s3_bucket(url: str) -> tuple[Any, str]:
    """(obstore store of the bucket, path in it); credentials and endpoint come from the environment."""
    import obstore.store

    bucket, _, path = url.removeprefix("s3://").partition("/")
    plain = os.environ.get("AWS_ENDPOINT_URL", "").startswith("http://")
    # A body that takes longer than the client's timeout is cut off, and resumed.
    options: Any = {**CLIENT_OPTIONS, "allow_http": plain}
    return obstore.store.S3Store(bucket, client_options=options, retry_config=RETRY_CONFIG), path


def open_s3(url: str) -> RemoteFile:
    """An object in a bucket."""
    bucket, path = s3_bucket(url)
    server = os.environ.get("AWS_ENDPOINT_URL", "s3")
    return RemoteFile(server, lambda position, version: _get_object(bucket, path, position, version))


def _get_object(bucket: Any, path: str, position: int, version: str | None) -> Answer:
    import obstore

    resumed = position > 0 and version is not None
    options: Any = {"range": {"offset": position}, "if_match": version} if resumed else {}
    found = _translated(lambda: obstore.get(bucket, path, options=options))
    return Answer(
        stream=_Parts(iter(found.stream(PART_BYTES))),
        start=position if resumed else 0,
        length=found.meta["size"],
        version=found.meta["e_tag"],
    )


def _translated(operation: Callable[[], T]) -> T:
    """What the operation gives back; its errors as OSError, in one line."""
    from obstore.exceptions import BaseError, PreconditionError

    try:
        return operation()
    except (BaseError, FileNotFoundError) as error:
        hint = hint_for(error)
        if isinstance(error, PreconditionError):
            raise Refused("it was replaced while it was read; read it again") from error
        if hint or isinstance(error, FileNotFoundError):
            raise Refused(". ".join(filter(None, (cause_of(error), hint)))) from error
        raise OSError(cause_of(error)) from error


class _Parts:
    """The parts of an object as a stream."""

    def __init__(self, parts: Iterator[Any]) -> None:
        self._parts, self._part = parts, memoryview(b"")

    def read(self, size: int) -> bytes:
        """At most `size` bytes; none at the end."""
        while not self._part and (part := _translated(lambda: next(self._parts, None))) is not None:
            self._part = memoryview(part)
        data, self._part = bytes(self._part[:size]), self._part[size:]
        return data

    def close(self) -> None:
        """Let go of the connection."""
        self._parts, self._part = iter(()), memoryview(b"")
