"""Reading small JSON files: every field is checked, and a bad one is named with its file.

A sealed file has a digest of its own values: one that was changed by anything but its writer is refused.
"""

import base64
import contextlib
import json
import math
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bigscl.store.errors import BadFile

LARGEST = 2**53
"""Integers up to here survive every JSON reader."""
SEAL = "crc32"
"""The field with the digest of all others."""


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
    """Return JSON of values that are as a reader will have them, with their digest at its end.

    It is what `seal` gives, in one pass over large tables.
    """
    text = _canonical(values)
    return text[:-1] + _end(zlib.crc32(text))


def _end(digest: int) -> bytes:
    return f',"{SEAL}":"{digest:08x}"}}'.encode()


def _is_sealed_text(data: bytes) -> bool:
    """Return whether these are bytes of `sealed_text`, without parsing them."""
    length = len(_end(0))
    return data[-length:] == _end(zlib.crc32(b"}", zlib.crc32(memoryview(data)[:-length])))


def as_table(numbers: Any) -> bytes:
    """Return whole numbers as int64, little-endian."""
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


class Fields:
    """The fields of one JSON object; taking one checks it, or raises BadFile with the file's name."""

    def __init__(self, values: Any, place: str, remedy: str) -> None:
        self._place = place
        self._remedy = remedy
        if not isinstance(values, dict):
            raise self.bad(f"found {_short(values)}, expected a JSON object")
        self._values: dict[str, Any] = values

    @classmethod
    def parse(cls, data: bytes, place: str, remedy: str) -> "Fields":
        """The object in a file's bytes."""
        try:
            values = json.loads(data)
        except (ValueError, RecursionError) as error:
            nothing = "is empty" if not data else "holds only NUL bytes" if not data.strip(b"\0") else None
            raise BadFile(f"{place}: {nothing or f'is not JSON ({error})'}. {remedy}") from None
        return cls(values, place, remedy)

    @classmethod
    def parse_sealed(cls, data: bytes, place: str, remedy: str) -> "Fields":
        """The object in a file's bytes, if its values are those that were written."""
        fields = cls.parse(data, place, remedy)
        return fields if _is_sealed_text(data) else fields.sealed()

    def sealed(self) -> "Fields":
        """The same fields, if they are those that were written."""
        if fault := seal_fault(self._values):
            raise self.bad(fault)
        return self

    def bad(self, what: str) -> BadFile:
        """The error for this file."""
        return BadFile(f"{self._place}: {what}. {self._remedy}")

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def is_null(self, name: str) -> bool:
        """Whether a field is there and null."""
        return name in self._values and self._values[name] is None

    def _take(self, name: str, fine: bool, expected: str) -> Any:
        if not fine:
            found = _short(self._values[name]) if name in self._values else "nothing"
            raise self.bad(f"{name}: found {found}, expected {expected}")
        return self._values[name]

    def integer(self, name: str, low: int, high: int = LARGEST) -> int:
        """A whole number within bounds."""
        value = self._values.get(name)
        return int(self._take(name, _is_integer(value, low, high), f"a whole number from {low} to {high}"))

    def number(self, name: str) -> float:
        """A finite number."""
        value = self._values.get(name)
        fine = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        return float(self._take(name, fine, "a finite number"))

    def text(self, name: str) -> str:
        """A string."""
        return str(self._take(name, isinstance(self._values.get(name), str), "a string"))

    def flag(self, name: str) -> bool:
        """True or false."""
        return bool(self._take(name, isinstance(self._values.get(name), bool), "true or false"))

    def integers(self, name: str, low: int, high: int = LARGEST, count: int | None = None) -> tuple[int, ...]:
        """A list of whole numbers within bounds; `count` of them, if given."""
        values = self._values.get(name)
        # By the set of their types: 300,000 slots of a snapshot are not asked one by one.
        fine = isinstance(values, list) and set(map(type, values)) <= {int}
        fine = fine and (not values or (min(values) >= low and max(values) <= high))
        fine = fine and (count is None or len(values or ()) == count)
        many = "" if count is None else f"{count} "
        return tuple(self._take(name, fine, f"a list of {many}whole numbers from {low} to {high}"))

    def table(self, name: str, low: int, high: int, count: int) -> bytes:
        """A table of so many whole numbers within bounds, as `as_table`."""
        table, numbers = b"", np.empty(0, np.int64)
        with contextlib.suppress(TypeError, ValueError):
            table = from_table(self._values[name])
            numbers = numbers_of(table)
        fine = len(numbers) == count and bool(((numbers >= low) & (numbers <= high)).all())
        self._take(name, fine, f"base64 of {count} whole numbers (int64) from {low} to {high}")
        return table

    def mapping(self, name: str) -> Mapping[str, Any]:
        """A JSON object, unchecked inside."""
        values: Mapping[str, Any] = self._take(
            name, isinstance(self._values.get(name), dict), "a JSON object"
        )
        return values

    def optional(self, name: str) -> "Fields":
        """The fields of an object in this one; none if it is not there."""
        return self.inside(name) if name in self._values else Fields({}, self._place, self._remedy)

    def inside(self, name: str) -> "Fields":
        """The fields of an object in this one."""
        return Fields(self._values.get(name), f"{self._place}: {name}", self._remedy)


def _is_integer(value: object, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _short(value: object) -> str:
    if isinstance(value, int) and abs(value) > LARGEST:
        return "a number beyond 2**53"
    text = ascii(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
