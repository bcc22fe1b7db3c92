"""Rows of different lengths, and the annotated positives of every row: all labels that the store needs."""

import hashlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bigscl.common.user_error import UserError


@dataclass(frozen=True, slots=True, eq=False)
class Ragged:
    """Rows of different lengths in two flat arrays: row n is `values[offsets[n]:offsets[n + 1]]`."""

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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Annotations:
    """Positives of all rows, compressed: those of row n are `classes[offsets[n]:offsets[n + 1]]`.

    Row n is sample `n % rows_per_shard` of shard `n // rows_per_shard`; rows past a shard's size are empty.
    """

    fingerprint: str
    """Of the data these annotations describe; a store opens only against the one it was made for."""
    num_classes: int
    rows_per_shard: int
    shard_sizes: NDArray[np.int64]
    offsets: NDArray[np.int64]
    classes: NDArray[np.int64]

    def __post_init__(self) -> None:
        rows = len(self.shard_sizes) * self.rows_per_shard
        if len(self.offsets) != rows + 1 or self.offsets[-1] != len(self.classes):
            raise UserError(
                f"annotations: offsets must have {rows + 1} entries ending in {len(self.classes)}, "
                f"found {len(self.offsets)} ending in {self.offsets[-1] if len(self.offsets) else 'nothing'}"
            )
        if len(self.shard_sizes) and self.shard_sizes.max() > self.rows_per_shard:
            raise UserError(
                f"annotations: a shard has {self.shard_sizes.max()} samples, "
                f"more than rows_per_shard {self.rows_per_shard}"
            )
        if len(self.classes) and not 0 <= self.classes.min() <= self.classes.max() < self.num_classes:
            raise UserError(
                f"annotations: classes span {self.classes.min()}..{self.classes.max()}, "
                f"expected 0..{self.num_classes - 1}"
            )

    @classmethod
    def of(
        cls, positives: Sequence[Collection[int]], num_classes: int, *, rows_per_shard: int = 1000
    ) -> "Annotations":
        """The annotations of a dataset that has no shards: sample n is row n.

        `positives` are the annotated classes of each sample; each `rows_per_shard` samples share a chunk.
        """
        if not len(positives) or rows_per_shard < 1:
            raise UserError(
                f"annotations: {len(positives)} samples, rows_per_shard {rows_per_shard}, expected at least 1"
            )
        rows = min(rows_per_shard, len(positives))
        num_shards = -(-len(positives) // rows)
        lengths = np.zeros(num_shards * rows, np.int64)
        lengths[: len(positives)] = [len(each) for each in positives]
        classes = np.array([number for each in positives for number in sorted(each)], np.int64)
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        sizes = np.full(num_shards, rows)
        sizes[-1] = len(positives) - rows * (num_shards - 1)
        digest = hashlib.sha256(f"{num_classes} {rows} {len(positives)}".encode())
        digest.update(offsets.astype("<i8").tobytes() + classes.astype("<i8").tobytes())
        return cls(
            fingerprint=digest.hexdigest(),
            num_classes=num_classes,
            rows_per_shard=rows,
            shard_sizes=sizes,
            offsets=offsets,
            classes=classes,
        )

    @property
    def num_samples(self) -> int:
        """How many rows are real samples."""
        return int(self.shard_sizes.sum())

    def of_shard(self, shard: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(position in shard, class) of every annotated positive of a shard."""
        first = shard * self.rows_per_shard
        offsets = self.offsets[first : first + self.rows_per_shard + 1]
        positions = np.repeat(np.arange(self.rows_per_shard), np.diff(offsets))
        return positions, self.classes[offsets[0] : offsets[-1]]

    def includes(self, rows: NDArray[np.int64], classes: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether each class is an annotated positive of its row; both have the same shape."""
        places, annotated = self.of_rows(rows.ravel())
        found = np.zeros(rows.size, bool)
        found[places[annotated == classes.ravel()[places]]] = True
        return found.reshape(rows.shape)

    def of_rows(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(place in `rows` [n], class) of every annotated positive of some rows."""
        return Ragged(self.offsets, self.classes).entries(rows)

    def counts(self) -> NDArray[np.int64]:
        """Annotated positives per class, over the whole dataset."""
        return np.bincount(self.classes, minlength=self.num_classes)
