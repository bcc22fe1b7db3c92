"""The annotated positives of every row: all that the store needs of the labels."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


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
            raise ValueError(
                f"annotations: offsets must have {rows + 1} entries ending in {len(self.classes)}, "
                f"found {len(self.offsets)} ending in {self.offsets[-1] if len(self.offsets) else 'nothing'}"
            )
        if len(self.shard_sizes) and self.shard_sizes.max() > self.rows_per_shard:
            raise ValueError(
                f"annotations: a shard has {self.shard_sizes.max()} samples, "
                f"more than rows_per_shard {self.rows_per_shard}"
            )
        if len(self.classes) and not 0 <= self.classes.min() <= self.classes.max() < self.num_classes:
            raise ValueError(
                f"annotations: classes span {self.classes.min()}..{self.classes.max()}, "
                f"expected 0..{self.num_classes - 1}"
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

    def counts(self) -> NDArray[np.int64]:
        """Annotated positives per class, over the whole dataset."""
        return np.bincount(self.classes, minlength=self.num_classes)
