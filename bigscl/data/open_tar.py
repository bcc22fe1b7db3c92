"""The bytes of a tar, wherever it lies: on a file system, in an object store, behind http(s), or piped."""

import gzip
import io
import os
import subprocess
import zlib
from collections.abc import Callable
from typing import Any, Protocol

from bigscl.common.url_secrets import AGAIN, lacks_command, public, with_secret
from bigscl.store import SCHEMES, ObjectReader, StoreError

GZIP_MAGIC = b"\x1f\x8b"
# What a connection, a compressed stream or a disk may raise while it is read.
READ_ERRORS = (OSError, EOFError, zlib.error, StoreError)


class Unreadable(Exception):
    """A sample or a shard cannot be read; the message says why."""


class Readable(Protocol):
    """A stream of bytes."""

    def read(self, size: int, /) -> bytes:
        """At most `size` bytes; none at the end."""
        ...

    def close(self) -> None:
        """Let go of what is read."""
        ...


class Shard(Protocol):
    """The bytes of an open tar, decompressed."""

    stored_bytes: int | None
    """Its length as it lies in storage, where that is known."""
    end: int | None
    """Its length as it is read, once that is known."""

    def read_at(self, offset: int, size: int) -> bytearray:
        """`size` bytes from `offset` on; raises Unreadable where there are fewer."""
        ...

    def close(self) -> None:
        """Let go of the file or connection."""
        ...


class LocalShard:
    """A plain tar on a file system."""

    def __init__(self, path: str) -> None:
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115
        self.stored_bytes: int | None = os.fstat(self._file.fileno()).st_size
        self.end: int | None = self.stored_bytes

    def read_at(self, offset: int, size: int) -> bytearray:
        """`size` bytes from `offset` on, wherever the last read was."""
        assert self.end is not None
        # Before anything is allocated: a damaged index or tar may ask for any number of bytes.
        if offset < 0 or size < 0 or offset + size > self.end:
            raise Unreadable(f"the tar ends at byte {self.end}, inside {size} bytes from {offset}")
        data = bytearray(size)
        num_read = 0
        try:
            self._file.seek(offset)
            while num_read < size and (count := self._file.readinto(memoryview(data)[num_read:])):
                num_read += count
        except OSError as error:
            raise Unreadable(f"{error.strerror or error} in {size} bytes from {offset}") from error
        if num_read < size:
            raise Unreadable(f"the tar ends at byte {offset + num_read}, inside {size} bytes from {offset}")
        return data

    def close(self) -> None:
        self._file.close()


class StreamedShard:
    """A tar that is read from front to back: compressed, remote, or the output of a command.

    Going back opens it again.
    """

    def __init__(self, open_stream: Callable[[], tuple[Readable, int | None]]) -> None:
        self._open = open_stream
        self._position = 0
        self._stream: Readable | None
        self._stream, self.stored_bytes = self._open()
        self.end: int | None = None

    def read_at(self, offset: int, size: int) -> bytearray:
        """`size` bytes from `offset` on, skipping what lies before."""
        reason = "it ends there"
        # A tar that is known to end earlier is not read to its end again for each sample.
        if self.end is None or offset + size <= self.end:
            try:
                data = self._try_read(offset, size)
                if len(data) == size:
                    return data
            except READ_ERRORS as error:
                reason = str(error) or type(error).__name__
            self.end = self._position
            self.close()
        raise Unreadable(f"the tar breaks off inside {size} bytes from {offset}: {reason}")

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
        self._stream = None

    def _try_read(self, offset: int, size: int) -> bytearray:
        if self._stream is None or offset < self._position:
            self.close()
            self._position = 0
            self._stream, self.stored_bytes = self._open()
        while self._position < offset and self._read(min(offset - self._position, 1 << 20)):
            pass
        return self._read(size)

    def _read(self, size: int) -> bytearray:
        assert self._stream is not None
        data = bytearray()
        while len(data) < size and (part := self._stream.read(size - len(data))):
            data += part
        self._position += len(data)
        return data


def open_shard(url: str, *, allow_pipe: bool = False) -> Shard:
    """A tar opened for reading; plain local ones can be read at any place at no cost."""
    kind = scheme(url)
    try:
        if kind == "pipe":
            if not allow_pipe:
                raise Unreadable(f"{public(url)}: runs a command; say that pipes are allowed if you trust it")
            if lacks_command(url):
                raise Unreadable(f"{url}: its command is not known here. {AGAIN}")
            return StreamedShard(lambda: _open_pipe(url))
        if kind:
            return StreamedShard(lambda: _open_object(url))
        if _is_gzip(url):
            return StreamedShard(lambda: (gzip.open(url), os.path.getsize(url)))
        return LocalShard(url)
    except StoreError as error:
        raise Unreadable(str(error)) from error
    except READ_ERRORS as error:
        raise Unreadable(f"{public(url)}: cannot be opened: {error}") from error


def scheme(url: str) -> str:
    """`pipe`, or the scheme of an object's URL, such as `https` or `s3`; empty for a path."""
    if url.startswith("pipe:"):
        return "pipe"
    kind, separator, _ = url.partition("://")
    return kind if separator and kind in SCHEMES else ""


def _is_gzip(path: str) -> bool:
    with open(path, "rb") as file:
        return file.read(2) == GZIP_MAGIC


def _open_object(url: str) -> tuple[Readable, int | None]:
    reader = ObjectReader(url)
    return _decompressed(io.BufferedReader(reader)), reader.length


class _Pipe(io.RawIOBase):
    """The output of a command, which ends when it is closed."""

    def __init__(self, command: str) -> None:
        self._process = subprocess.Popen(command, shell=True, stdout=subprocess.PIPE)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        assert self._process.stdout is not None
        return self._process.stdout.readinto1(buffer)  # type: ignore[attr-defined, no-any-return]

    def close(self) -> None:
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._process.wait()
        super().close()


def _open_pipe(url: str) -> tuple[Readable, int | None]:
    return _decompressed(io.BufferedReader(_Pipe(with_secret(url).removeprefix("pipe:")))), None


class _Gunzip(gzip.GzipFile):
    """A decompressed stream that closes the one below it."""

    def __init__(self, stream: io.BufferedReader) -> None:
        super().__init__(fileobj=stream)
        self._compressed = stream

    def close(self) -> None:
        super().close()
        self._compressed.close()


def _decompressed(stream: io.BufferedReader) -> Readable:
    return _Gunzip(stream) if stream.peek(2)[:2] == GZIP_MAGIC else stream
