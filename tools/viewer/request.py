"""A request and its reply: parameters that are checked, and replies."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, urlencode

from bigscl.common.user_error import UserError

MAX_FIELDS = 50
MAX_TEXT = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The answer to a request."""

    body: bytes = b""
    type: str = "application/json"
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    parts: Iterator[bytes] | None = None
    """In place of a body, if that would be too large to be made at once."""


def as_json(value: Any, status: int = 200) -> Reply:
    """Return a value as the answer; what is not a number is sent as null."""
    return Reply(body=json.dumps(_finite(value)).encode(), status=status)


def _finite(value: Any) -> Any:
    """Return the value without infinities and NaN, which JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


class Parameters:
    """The parameters of a request, each checked when it is read."""

    def __init__(self, query: str) -> None:
        try:
            self._values = dict(parse_qsl(query, max_num_fields=MAX_FIELDS, errors="surrogateescape"))
        except ValueError:
            raise UserError(f"parameters: more than {MAX_FIELDS}") from None

    def without(self, name: str) -> str:
        return urlencode({key: value for key, value in self._values.items() if key != name}, errors="replace")

    def text(self, name: str) -> str:
        """Return a short text; empty if it is not given."""
        value = self._values.get(name, "")
        if len(value) > MAX_TEXT:
            raise UserError(f"{name}: {len(value)} letters, expected at most {MAX_TEXT}")
        return value

    def integer(self, name: str, low: int, high: int, default: int | None = None) -> int:
        number = self.optional_integer(name, low, high)
        if number is None and default is None:
            raise UserError(f"{name}: is missing")
        return number if number is not None else default  # type: ignore[return-value]

    def optional_integer(self, name: str, low: int, high: int) -> int | None:
        """Return a number of this range; None if it is not given."""
        value = self.text(name)
        if not value:
            return None
        number = int(value) if value.isascii() and value.isdecimal() and len(value) < 20 else low - 1
        if not low <= number <= high:
            raise UserError(f"{name}: {value!r:.40}, expected {low} to {high}")
        return number

    def share(self, name: str, default: float) -> float:
        value = self.text(name)
        try:
            number = float(value) if value else default
        except ValueError:
            number = math.nan
        if not 0 <= number <= 1:
            raise UserError(f"{name}: {value!r:.40}, expected 0 to 1")
        return number

    def answer(self, name: str) -> bool | None:
        """Return whether it is `yes` or `no`; None if it is not given."""
        word: bool | None = self.choice(name, {"": None, "yes": True, "no": False})
        return word

    def choice(self, name: str, values: dict[str, Any]) -> Any:
        word = self.text(name)
        if word not in values:
            raise UserError(f"{name}: {word!r:.40}, expected one of {', '.join(filter(None, values))}")
        return values[word]
