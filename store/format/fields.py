"""Reading small JSON files: every field is checked, and a bad one is named with its file.

A sealed file has a digest of its own values: one that was changed by anything but its writer is refused.
"""

import base64
import json
import zlib
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError

from bigscl.store.errors import BadFile

Kind = TypeVar("Kind")
LARGEST = 2**53
"""Integers up to here survive every JSON reader."""
SEAL = "crc32"
"""The field with the digest of all others."""
Whole = Annotated[int, Field(strict=True, ge=0, le=LARGEST)]
Small = Annotated[int, Field(strict=True, ge=0, le=2**31)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Flag = Annotated[bool, Field(strict=True)]


def seal(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values with their digest, which `seal_fault` compares."""
    # As a reader will have them: tuples become lists, and keys strings.
    plain: dict[str, Any] = json.loads(json.dumps({**values, SEAL: None}))
    return {**plain, SEAL: _digest(plain)}


def seal_fault(values: Mapping[str, Any]) -> str | None:
    """Return what is wrong with the digest of a file's values; None if they are those that were written."""
    found = values.get(SEAL)
    if found is None:
        return f"has no digest of its values ({SEAL}): damaged, or written by an earlier revision"
    expected = _digest(values)
    if found != expected:
        return f"damaged: its values have the digest {expected}, its field {SEAL} says {_short(found)}"
    return None


def _digest(values: Mapping[str, Any]) -> str:
    rest = {name: value for name, value in values.items() if name != SEAL}
    return f"{zlib.crc32(_canonical(rest)):08x}"


def _canonical(values: Mapping[str, Any]) -> bytes:
    return json.dumps(values, sort_keys=True, separators=(",", ":")).encode()


def sealed_text(values: Mapping[str, Any]) -> bytes:
    """Return what `seal` gives as JSON, in one pass over large tables of plain values."""
    text = _canonical(values)
    return text[:-1] + _end(zlib.crc32(text))


def _end(digest: int) -> bytes:
    return f',"{SEAL}":"{digest:08x}"}}'.encode()


def _is_sealed_text(data: bytes) -> bool:
    """Return whether these are bytes of `sealed_text`, without parsing them."""
    length = len(_end(0))
    return data[-length:] == _end(zlib.crc32(b"}", zlib.crc32(memoryview(data)[:-length])))


def as_table(numbers: Any) -> bytes:
    return np.asarray(numbers, "<i8").tobytes()


def numbers_of(table: bytes) -> NDArray[np.int64]:
    """Return the numbers that `as_table` wrote; ValueError if it did not."""
    return np.frombuffer(table, "<i8").astype(np.int64, copy=False)


def to_table(table: bytes) -> str:
    """Return a table as text, base64: 300,000 numbers take milliseconds."""
    return base64.b64encode(table).decode()


def from_table(text: str) -> bytes:
    """Return the table that `to_table` wrote; ValueError if it did not."""
    return base64.b64decode(text, validate=True)


def _to_bytes(table: object) -> bytes:
    return from_table(table) if isinstance(table, str) else b""


Table = Annotated[bytes, BeforeValidator(_to_bytes)]
"""A table that is text in JSON."""


def read_object(data: bytes, place: str, remedy: str, *path: str, sealed: bool = True) -> dict[str, Any]:
    """Return the JSON object in a file, at a path within; BadFile unless it is what was written."""
    try:
        values: Any = json.loads(data)
    except (ValueError, RecursionError) as error:
        nothing = "is empty" if not data else "holds only NUL bytes" if not data.strip(b"\0") else None
        raise BadFile(f"{place}: {nothing or f'is not JSON ({error})'}. {remedy}") from None
    for name in path:
        values = values.get(name) if isinstance(values, dict) else None
    if not isinstance(values, dict):
        found = f"found {_short(values)}, expected a JSON object"
        raise BadFile(f"{': '.join([place, *path])}: {found}. {remedy}")
    if sealed and not _is_sealed_text(data) and (fault := seal_fault(values)):
        raise BadFile(f"{place}: {fault}. {remedy}")
    return values


def to_dataclass(kind: type[Kind], values: Mapping[str, Any], place: str, remedy: str) -> Kind:
    """Return JSON values as a dataclass, checked by its types; fields of later versions are ignored."""
    try:
        parsed: Kind = _adapter(cast(Any, kind)).validate_python(values)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        name, said = ".".join(map(str, first["loc"])), first["msg"]
        found = "found nothing" if first["type"] == "missing" else f"found {_short(first['input'])}"
        raise BadFile(f"{place}: {name}: {found}: {said[0].lower()}{said[1:]}. {remedy}") from None
    return parsed


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _short(value: object) -> str:
    if isinstance(value, int) and abs(value) > LARGEST:
        return "a number beyond 2**53"
    text = ascii(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
