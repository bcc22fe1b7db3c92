"""Rows of different lengths, kept in two flat arrays."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class Ragged:
    """Row n is `values[offsets[n]:offsets[n + 1]]`."""

    offsets: NDArray[np.int64]
    values: NDArray[Any]

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]]) -> "Ragged":
        """Return the rows of a list of lists of numbers."""
        values = np.array([value for row in rows for value in row], np.uint32)
        return cls.from_lengths(np.array([len(row) for row in rows], np.int64), values)

    @classmethod
    def of_bytes(cls, rows: Sequence[bytes]) -> "Ragged":
        """Return the rows of a list of byte strings."""
        values = np.frombuffer(b"".join(rows), np.uint8)
        return cls.from_lengths(np.array([len(row) for row in rows], np.int64), values)

    @classmethod
    def from_lengths(cls, lengths: NDArray[Any], values: NDArray[Any]) -> "Ragged":
        """Return consecutive rows of the given lengths."""
        return cls(np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]), values)

    @classmethod
    def concatenate(cls, parts: Iterable["Ragged"], dtype: type[np.generic]) -> "Ragged":
        """Return the rows of all parts, one after the other."""
        parts = list(parts)
        lengths = np.concatenate([np.empty(0, np.int64), *(part.lengths for part in parts)])
        return cls.from_lengths(
            lengths, np.concatenate([np.empty(0, dtype), *(part.values for part in parts)])
        )

    @property
    def lengths(self) -> NDArray[np.int64]:
        """The number of values of each row."""
        return np.diff(self.offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> NDArray[Any]:
        return self.values[self.offsets[row] : self.offsets[row + 1]]

    def entries(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[Any]]:
        """Return (place in `rows`, value) of every value of the chosen rows."""
        first, lengths = self.offsets[rows], self.offsets[rows + 1] - self.offsets[rows]
        places = np.repeat(np.arange(len(rows)), lengths)
        within = np.arange(len(places)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        return places, self.values[first[places] + within]

    def spread(self, rows: NDArray[np.int64], num_rows: int) -> "Ragged":
        """Return these rows at the ascending places `rows` of `num_rows`; the other rows are empty."""
        lengths = np.zeros(num_rows, np.int64)
        lengths[rows] = self.lengths
        return Ragged.from_lengths(lengths, self.values)
