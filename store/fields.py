"""Reading small JSON files: every field is checked, and a bad one is named with its file."""

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from bigscl.store.errors import BadFile

LARGEST = 2**53
"""Integers up to here survive every JSON reader."""


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
        fine = isinstance(values, list) and all(_is_integer(value, low, high) for value in values)
        fine = fine and (count is None or len(values or ()) == count)
        many = "" if count is None else f"{count} "
        return tuple(self._take(name, fine, f"a list of {many}whole numbers from {low} to {high}"))

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
