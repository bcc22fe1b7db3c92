"""The arrays of a store, each defined once: where it exists, its shape, its values, how compaction keeps it.

A new array is a class here and an entry in `ARRAYS`: rows carry it by its name from the storage to the
training device and back. Its axes on the storage are slot, shard, position in the shard, and then those of
`shape`.
"""

# Shapes: R rows of a shard, L classes, k kept classes, W side of a heatmap.

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bigscl.store.format.spec import MAX_COUNT, Array, GroupSpec, Rows, StoreSpec

# 16 rows measured best for dense chunks (2,400 images/s; 260 with 1 row, 800 with 64).
DENSE_CHUNK_ROWS = 16
NEVER = -1
# float16 1.0: bits of non-negative halves order like their values; NaN and negatives lie above.
ONE_BITS = np.float16(1).view(np.uint16)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Start:
    """Inputs of the initial values of a shard."""

    given: NDArray[np.bool_]
    """[R,L]"""
    classes: Array | None
    """[R,k] the kept classes; None where all classes have heatmaps, or none has."""
    score_classes: Array | None = None
    """[R,m] the classes whose scores are kept; None where all are."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Compaction:
    """Rows, and the classes of each row whose heatmaps are kept."""

    rows: Rows
    given: NDArray[np.bool_]
    """[R,L]"""
    classes: Array
    """[R,k]"""
    heatmap_size: int
    debiased: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Domain:
    """Inputs of the check that values are valid."""

    num_classes: int
    last_epoch: int


class StoredArray(ABC):
    """One array of a store; the methods of this class are those of an array that exists in every layout."""

    name: str
    updated: bool = False
    """Whether training hands in new values."""
    rounded: bool = False
    """Whether the codec `uint8` rounds its values to a byte each."""

    def exists(self, spec: StoreSpec, group: GroupSpec) -> bool:
        """Whether a group of this layout has the array."""
        return True

    def shape(self, spec: StoreSpec, group: GroupSpec) -> tuple[int, ...]:
        """The shape of one row; a single value by default."""
        return ()

    @abstractmethod
    def dtype(self, spec: StoreSpec) -> np.dtype[np.generic]:
        """The type of the values."""

    def chunk_rows(self, spec: StoreSpec, group: GroupSpec) -> int:
        return spec.rows_per_shard

    def initialize(self, values: Array, start: Start) -> None:
        """Fill the zeros of a shard that was never written with its initial values."""
        return  # most arrays start at zero

    @abstractmethod
    def invalid(self, values: Array, domain: Domain) -> NDArray[np.bool_]:
        """Which values, or which rows, are outside the array's domain."""

    @abstractmethod
    def expected(self, domain: Domain) -> str:
        """The array's domain in words."""

    def compacted(self, compaction: Compaction) -> Array:
        """The array after a compaction."""
        return compaction.rows[self.name]


class _Fractions(StoredArray):
    """float16 values in [0, 1]."""

    updated = True

    def dtype(self, spec: StoreSpec) -> np.dtype[np.generic]:
        return np.dtype(np.float16)

    def invalid(self, values: Array, domain: Domain) -> NDArray[np.bool_]:
        bits = values.view(np.uint16)
        # The maximum first: comparing every value would cost a third of the whole reading.
        if not bits.size or bits.max() <= ONE_BITS:
            return np.zeros(len(values), bool)
        outside: NDArray[np.bool_] = bits > ONE_BITS
        return outside

    def expected(self, domain: Domain) -> str:
        return "values in [0, 1]"


class Scores(_Fractions):
    """Running average of the predicted probability of each class, or of the highest ones."""

    name = "scores"

    def shape(self, spec: StoreSpec, group: GroupSpec) -> tuple[int, ...]:
        return (spec.top_scores or spec.num_classes,)

    def initialize(self, values: Array, start: Start) -> None:
        kept = start.given
        values[kept if start.score_classes is None else np.take_along_axis(kept, start.score_classes, 1)] = 1


class ScoreFloor(_Fractions):
    """Score of every class whose own score is not kept: the highest that was left out."""

    name = "score_floor"

    def exists(self, spec: StoreSpec, group: GroupSpec) -> bool:
        return spec.top_scores is not None


class Heatmaps(_Fractions):
    """Running average of each class's score map, for all classes (dense) or the kept ones (topk)."""

    name = "heatmaps"
    rounded = True

    def exists(self, spec: StoreSpec, group: GroupSpec) -> bool:
        return group.layout != "scores"

    def shape(self, spec: StoreSpec, group: GroupSpec) -> tuple[int, ...]:
        maps = spec.num_classes if group.top is None else group.top
        return (maps, spec.heatmap_size, spec.heatmap_size)

    def chunk_rows(self, spec: StoreSpec, group: GroupSpec) -> int:
        return min(spec.rows_per_shard, DENSE_CHUNK_ROWS) if group.layout == "dense" else spec.rows_per_shard

    def initialize(self, values: Array, start: Start) -> None:
        kept = start.given
        values[kept if start.classes is None else np.take_along_axis(kept, start.classes, 1)] = 1

    def compacted(self, compaction: Compaction) -> Array:
        rows, classes = compaction.rows, compaction.classes
        if rows.heatmaps is not None:
            return rows.heatmaps_of(np.arange(len(rows))[:, None], classes)
        # They start at the score everywhere, at 1 for given classes.
        start = np.take_along_axis(rows.scores, classes, 1)
        start[np.take_along_axis(compaction.given, classes, 1)] = 1
        size = compaction.heatmap_size
        return np.ascontiguousarray(np.broadcast_to(start[:, :, None, None], (*classes.shape, size, size)))


class SpatialScore(_Fractions):
    """Value by which expected positives of each class with a heatmap are ranked, in place of the score."""

    name = "spatial_score"

    def exists(self, spec: StoreSpec, group: GroupSpec) -> bool:
        return group.spatial_score and group.layout != "scores"

    def shape(self, spec: StoreSpec, group: GroupSpec) -> tuple[int, ...]:
        return (spec.num_classes if group.top is None else group.top,)

    def initialize(self, values: Array, start: Start) -> None:
        kept = start.given
        values[kept if start.classes is None else np.take_along_axis(kept, start.classes, 1)] = 1

    def compacted(self, compaction: Compaction) -> Array:
        # Without heatmaps so far it is the score.
        return np.take_along_axis(compaction.rows.ranked_by(), compaction.classes, 1)


class _Counters(StoredArray):
    """Numbers of visits."""

    updated = True

    def dtype(self, spec: StoreSpec) -> np.dtype[np.generic]:
        return np.dtype(np.uint8)

    def invalid(self, values: Array, domain: Domain) -> NDArray[np.bool_]:
        return np.asarray(values > MAX_COUNT)

    def expected(self, domain: Domain) -> str:
        return f"counts up to {MAX_COUNT}"


class CellVisits(_Counters):
    """Visits of each heatmap cell since its initial value."""

    name = "cell_visits"

    def exists(self, spec: StoreSpec, group: GroupSpec) -> bool:
        return group.layout != "scores"

    def shape(self, spec: StoreSpec, group: GroupSpec) -> tuple[int, ...]:
        return (spec.heatmap_size, spec.heatmap_size)

    def compacted(self, compaction: Compaction) -> Array:
        rows, size = compaction.rows, compaction.heatmap_size
        if "cell_visits" in rows:
            return rows["cell_visits"]
        # Without heatmaps so far, cells of the plain average have not been visited since their start. In the
        # debiased one a visit of the image counts as one of all its cells.
        visits = rows["sample_visits"] if compaction.debiased else np.zeros_like(rows["sample_visits"])
        return np.ascontiguousarray(np.broadcast_to(visits[:, None, None], (len(rows), size, size)))


class SampleVisits(_Counters):
    """Visits of each sample."""

    name = "sample_visits"


class Classes(StoredArray):
    """The kept classes of each row, ascending."""

    name = "classes"

    def exists(self, spec: StoreSpec, group: GroupSpec) -> bool:
        return group.layout == "topk"

    def shape(self, spec: StoreSpec, group: GroupSpec) -> tuple[int, ...]:
        assert group.top is not None
        return (group.top,)

    def dtype(self, spec: StoreSpec) -> np.dtype[np.generic]:
        return class_dtype(spec.num_classes)

    def initialize(self, values: Array, start: Start) -> None:
        values[:] = start.classes

    def invalid(self, values: Array, domain: Domain) -> NDArray[np.bool_]:
        rising = np.diff(values.astype(np.int64), axis=1, prepend=-1) > 0
        return np.asarray(~rising | (values >= domain.num_classes))

    def expected(self, domain: Domain) -> str:
        return f"class ids ascending within 0..{domain.num_classes - 1}"

    def compacted(self, compaction: Compaction) -> Array:
        return compaction.classes.astype(class_dtype(compaction.rows.num_classes))


class ScoreClasses(Classes):
    """The classes of each row whose scores are kept, ascending."""

    name = "score_classes"
    updated = True

    def exists(self, spec: StoreSpec, group: GroupSpec) -> bool:
        return spec.top_scores is not None

    def shape(self, spec: StoreSpec, group: GroupSpec) -> tuple[int, ...]:
        assert spec.top_scores is not None
        return (spec.top_scores,)

    def initialize(self, values: Array, start: Start) -> None:
        values[:] = start.score_classes

    def compacted(self, compaction: Compaction) -> Array:
        return compaction.rows[self.name]


class LastEpoch(StoredArray):
    """The last epoch that updated each row."""

    name = "last_epoch"

    def dtype(self, spec: StoreSpec) -> np.dtype[np.generic]:
        return np.dtype(np.int32)

    def initialize(self, values: Array, start: Start) -> None:
        values[:] = NEVER

    def invalid(self, values: Array, domain: Domain) -> NDArray[np.bool_]:
        return np.asarray((values < NEVER) | (values > domain.last_epoch))

    def expected(self, domain: Domain) -> str:
        return f"epochs from -1 to {domain.last_epoch}, the snapshot's epoch"


# In the order in which they are written.
ARRAYS: dict[str, StoredArray] = {
    array.name: array
    for array in (
        Scores(),
        ScoreClasses(),
        ScoreFloor(),
        Heatmaps(),
        SpatialScore(),
        CellVisits(),
        Classes(),
        SampleVisits(),
        LastEpoch(),
    )
}


def class_dtype(num_classes: int) -> np.dtype[np.generic]:
    """The smallest type of class ids whose largest value is free to mean "missing"."""
    return np.dtype(np.uint16 if num_classes <= np.iinfo(np.uint16).max else np.uint32)


def fill_value(dtype: np.dtype[np.generic]) -> float | int:
    """The value of a missing chunk: it is outside the domain of every array of this type."""
    if dtype.kind == "f":
        return float("nan")
    limits = np.iinfo(np.dtype(dtype.str))
    return int(limits.min if dtype.kind == "i" else limits.max)
