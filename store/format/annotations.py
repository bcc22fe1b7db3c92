"""Rows of different lengths, and the given labels of every row: all labels that the store needs."""

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
        """Return (index into `rows`, value) of every value of the chosen rows."""
        first, lengths = self.offsets[rows], self.offsets[rows + 1] - self.offsets[rows]
        indices = np.repeat(np.arange(len(rows)), lengths)
        within = np.arange(len(indices)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        return indices, self.values[first[indices] + within]

    def spread(self, rows: NDArray[np.int64], num_rows: int) -> "Ragged":
        """Return `num_rows` rows: these at the ascending positions `rows`, the others empty."""
        lengths = np.zeros(num_rows, np.int64)
        lengths[rows] = self.lengths
        return Ragged.from_lengths(lengths, self.values)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Annotations:
    """Given labels of all rows: the classes of row n are `given[n]`, ascending.

    Row n is sample `n % rows_per_shard` of shard `n // rows_per_shard`; rows past a shard's size are empty.
    """

    fingerprint: str
    """Digest of the data these labels describe; a store opens only against the one it was made for."""
    num_classes: int
    rows_per_shard: int
    shard_sizes: NDArray[np.int64]
    given: Ragged

    def __post_init__(self) -> None:
        rows, offsets, classes = self.num_rows, self.given.offsets, self.given.values
        if len(offsets) != rows + 1 or offsets[-1] != len(classes):
            raise UserError(
                f"annotations: offsets must have {rows + 1} entries ending in {len(classes)}, "
                f"found {len(offsets)} ending in {offsets[-1] if len(offsets) else 'nothing'}"
            )
        if len(self.shard_sizes) and self.shard_sizes.max() > self.rows_per_shard:
            raise UserError(
                f"annotations: a shard has {self.shard_sizes.max()} samples, "
                f"more than rows_per_shard {self.rows_per_shard}"
            )
        if len(classes) and not 0 <= classes.min() <= classes.max() < self.num_classes:
            raise UserError(
                f"annotations: classes span {classes.min()}..{classes.max()}, "
                f"expected 0..{self.num_classes - 1}"
            )

    @classmethod
    def of(
        cls, given: Sequence[Collection[int]], num_classes: int, *, rows_per_shard: int = 1000
    ) -> "Annotations":
        """Return the annotations of a dataset that has no shards: sample n is row n.

        `given` are the labelled classes of each sample; each `rows_per_shard` samples share a chunk.
        """
        if not len(given) or rows_per_shard < 1:
            raise UserError(
                f"annotations: {len(given)} samples, rows_per_shard {rows_per_shard}, expected at least 1"
            )
        rows = min(rows_per_shard, len(given))
        num_shards = -(-len(given) // rows)
        lengths = np.zeros(num_shards * rows, np.int64)
        lengths[: len(given)] = [len(classes) for classes in given]
        values = np.array([number for classes in given for number in sorted(classes)], np.int64)
        labels = Ragged.from_lengths(lengths, values)
        sizes = np.full(num_shards, rows)
        sizes[-1] = len(given) - rows * (num_shards - 1)
        digest = hashlib.sha256(f"{num_classes} {rows} {len(given)}".encode())
        digest.update(labels.offsets.astype("<i8").tobytes() + values.astype("<i8").tobytes())
        return cls(
            fingerprint=digest.hexdigest(),
            num_classes=num_classes,
            rows_per_shard=rows,
            shard_sizes=sizes,
            given=labels,
        )

    @property
    def num_rows(self) -> int:
        """The number of rows, those past a shard's size included."""
        return len(self.shard_sizes) * self.rows_per_shard

    @property
    def num_samples(self) -> int:
        """The number of rows that are samples."""
        return int(self.shard_sizes.sum())

    def of_shard(self, shard: int) -> NDArray[np.bool_]:
        """Return which classes are given labels of each row of a shard, [R,L]."""
        return self.of_rows(shard * self.rows_per_shard + np.arange(self.rows_per_shard))

    def of_rows(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which classes are given labels of these rows, [n,L]."""
        mask = np.zeros((len(rows), self.num_classes), bool)
        mask[self.given.entries(rows)] = True
        return mask

    def is_given(self, rows: NDArray[np.int64], classes: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return whether each class is a given label of its row; both have the same shape."""
        indices, given = self.given.entries(rows.ravel())
        mask = np.zeros(rows.size, bool)
        mask[indices[given == classes.ravel()[indices]]] = True
        return mask.reshape(rows.shape)

    def counts(self) -> NDArray[np.int64]:
        """Return the number of given labels of each class, over the whole dataset."""
        return np.bincount(self.given.values, minlength=self.num_classes)
