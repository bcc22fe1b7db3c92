"""Objects that are closed at the end of a `with` block."""

from types import TracebackType
from typing import Self


class Closing:
    """Calls `close` at the end of a `with` block, also after an error."""

    def close(self) -> None:
        """Release what the object holds."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
