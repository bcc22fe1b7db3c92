"""Damaged copies of valid files, for tests that let a parser fail only with this project's own errors.

@fuzzed(200)
@given(mutated(valid_bytes))
def test_a_damaged_index_is_refused_by_name(content): ...
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from bigscl.common.text import printable

# Bytes that mean something to many formats: ends of strings, markers, signs, quotes, brackets, nesting.
TELLING = (
    b"\0",
    b"\0" * 8,
    b"\xff",
    b"\xff" * 8,
    b"\x80",
    b"\x7f\xff\xff\xff",
    b"-1",
    b"9" * 20,
    b"[",
    b"{",
    b'"',
    b"\n",
)
# `FUZZ=20 pytest ...` tries twenty times as many examples.
FACTOR = int(os.environ.get("FUZZ", "1"))


def fuzzed(examples: int) -> Callable[[Any], Any]:
    """Settings of a fuzz test: the same examples each time, without deadlines or a database of failures."""
    return settings(
        max_examples=examples * FACTOR,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )


@contextmanager
def allowing(*errors: type[Exception], naming: object = "", most: int = 20_000) -> Iterator[None]:
    """Let the block end well, or in one of these errors with a short, printable message that has `naming`."""
    try:
        yield
        return
    except errors as error:
        message = str(error)
    assert str(naming) in message
    assert len(message) <= most
    assert printable(message, keep="\n") == message


@st.composite
def mutated(draw: st.DrawFn, *valid: bytes, most: int = 4) -> bytes:
    """One of the valid contents after one to `most` damages: bytes flipped, put in, deleted, cut off."""
    content = draw(st.sampled_from(valid))
    for _ in range(draw(st.integers(1, most))):
        content = draw(st.sampled_from(DAMAGES))(draw, content)
    return content


def _place(draw: st.DrawFn, content: bytes) -> int:
    return draw(st.integers(0, len(content)))


def _flip(draw: st.DrawFn, content: bytes) -> bytes:
    at = _place(draw, content)
    if at == len(content):
        return content
    return content[:at] + bytes([content[at] ^ draw(st.integers(1, 255))]) + content[at + 1 :]


def _insert(draw: st.DrawFn, content: bytes) -> bytes:
    at = _place(draw, content)
    return content[:at] + draw(st.sampled_from(TELLING) | st.binary(max_size=8)) + content[at:]


def _overwrite(draw: st.DrawFn, content: bytes) -> bytes:
    at, put = _place(draw, content), draw(st.sampled_from(TELLING) | st.binary(max_size=8))
    return content[:at] + put + content[at + len(put) :]


def _delete(draw: st.DrawFn, content: bytes) -> bytes:
    at = _place(draw, content)
    return content[:at] + content[at + draw(st.integers(1, 64)) :]


def _cut(draw: st.DrawFn, content: bytes) -> bytes:
    return content[: _place(draw, content)]


def _zero(draw: st.DrawFn, content: bytes) -> bytes:
    """A stretch of NULs, as a file system leaves it after a power cut."""
    at, count = _place(draw, content), draw(st.integers(1, 512))
    return content[:at] + b"\0" * min(count, len(content) - at) + content[at + count :]


def _repeat(draw: st.DrawFn, content: bytes) -> bytes:
    at, count = _place(draw, content), draw(st.integers(1, 64))
    return content[: at + count] + content[at:]


DAMAGES = (_flip, _insert, _overwrite, _delete, _cut, _zero, _repeat)
