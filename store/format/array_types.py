"""The arrays of a store, each defined once: where it exists, its shape, its values, how compaction keeps it.

A new array is an entry in `ARRAYS`: rows carry it by its name from the storage to the training device and
back. Its axes on the storage are slot, shard, position in the shard, and then those of `shape`.
"""

# Shapes: R rows of a shard, L classes, k kept classes, W side of a heatmap.

from abc import ABC, abstractmethod
from collections.abc import Callable
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
    num_classes: int
    last_epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredArray(ABC):
    """One array of a store; by default a single value for each row, in every layout, that starts at zero."""

    name: str
    exists: Callable[[StoreSpec, GroupSpec], bool] = lambda spec, group: True
    """Whether a group of this layout has the array."""
    shape: Callable[[StoreSpec, GroupSpec], tuple[int, ...]] = lambda spec, group: ()
    """The shape of one row."""
    chunk_rows: Callable[[StoreSpec, GroupSpec], int] = lambda spec, group: spec.rows_per_shard
    initialize: Callable[[Array, Start], None] = lambda values, start: None
    """Fills the zeros of a shard that was never written with its initial values."""
    compact: Callable[[Compaction], Array] | None = None
    """Returns the array after a compaction; by default it stays."""
    updated: bool = True
    """Whether training hands in new values."""
    rounded: bool = False
    """Whether the codec `uint8` rounds its values to a byte each."""

    @abstractmethod
    def dtype(self, spec: StoreSpec) -> np.dtype[np.generic]:
        """The type of the values."""

    @abstractmethod
    def invalid(self, values: Array, domain: Domain) -> NDArray[np.bool_]:
        """Which values, or which rows, are outside the array's domain."""

    @abstractmethod
    def expected(self, domain: Domain) -> str:
        """The array's domain in words."""

    def compacted(self, compaction: Compaction) -> Array:
        return compaction.rows[self.name] if self.compact is None else self.compact(compaction)


class Fractions(StoredArray):
    """float16 values in [0, 1]."""

    def dtype(self, spec: StoreSpec) -> np.dtype[np.generic]:
        return np.dtype(np.float16)

    def invalid(self, values: Array, domain: Domain) -> NDArray[np.bool_]:
        bits = values.view(np.uint16)
        # The maximum first: comparing every value would cost a third of the whole reading.
        if not bits.size or bits.max() <= ONE_BITS:
            return np.zeros(len(values), bool)
        return np.asarray(bits > ONE_BITS)

    def expected(self, domain: Domain) -> str:
        return "values in [0, 1]"


class Counts(StoredArray):
    def dtype(self, spec: StoreSpec) -> np.dtype[np.generic]:
        return np.dtype(np.uint8)

    def invalid(self, values: Array, domain: Domain) -> NDArray[np.bool_]:
        return np.asarray(values > MAX_COUNT)

    def expected(self, domain: Domain) -> str:
        return f"counts up to {MAX_COUNT}"


class ClassIds(StoredArray):
    """Classes of each row, ascending."""

    def dtype(self, spec: StoreSpec) -> np.dtype[np.generic]:
        return class_dtype(spec.num_classes)

    def invalid(self, values: Array, domain: Domain) -> NDArray[np.bool_]:
        rising = np.diff(values.astype(np.int64), axis=1, prepend=-1) > 0
        return np.asarray(~rising | (values >= domain.num_classes))

    def expected(self, domain: Domain) -> str:
        return f"class ids ascending within 0..{domain.num_classes - 1}"


class Epochs(StoredArray):
    """Epochs, or NEVER."""

    def dtype(self, spec: StoreSpec) -> np.dtype[np.generic]:
        return np.dtype(np.int32)

    def invalid(self, values: Array, domain: Domain) -> NDArray[np.bool_]:
        return np.asarray((values < NEVER) | (values > domain.last_epoch))

    def expected(self, domain: Domain) -> str:
        return f"epochs from -1 to {domain.last_epoch}, the snapshot's epoch"


def _set_given(values: Array, given: NDArray[np.bool_], classes: Array | None) -> None:
    """Set the values of given classes to 1; `classes` are those of the columns, if not all."""
    values[given if classes is None else np.take_along_axis(given, classes, 1)] = 1


def _set_classes(values: Array, classes: Array | None) -> None:
    assert classes is not None
    values[:] = classes


def _num_maps(spec: StoreSpec, group: GroupSpec) -> int:
    return spec.num_classes if group.top is None else group.top


def _compact_heatmaps(compaction: Compaction) -> Array:
    rows, classes = compaction.rows, compaction.classes
    if rows.heatmaps is not None:
        return rows.heatmaps_of(np.arange(len(rows))[:, None], classes)
    # They start at the score everywhere, at 1 for given classes.
    start = np.take_along_axis(rows.scores, classes, 1)
    start[np.take_along_axis(compaction.given, classes, 1)] = 1
    size = compaction.heatmap_size
    return np.ascontiguousarray(np.broadcast_to(start[:, :, None, None], (*classes.shape, size, size)))


def _compact_cell_visits(compaction: Compaction) -> Array:
    rows, size = compaction.rows, compaction.heatmap_size
    if "cell_visits" in rows:
        return rows["cell_visits"]
    # Without heatmaps so far, cells of the plain average have not been visited since their start. In the
    # debiased one a visit of the image counts as one of all its cells.
    visits = rows["sample_visits"] if compaction.debiased else np.zeros_like(rows["sample_visits"])
    return np.ascontiguousarray(np.broadcast_to(visits[:, None, None], (len(rows), size, size)))


# In the order in which they are written.
_ARRAYS: tuple[StoredArray, ...] = (
    # Running average of the predicted probability of each class, or of the highest ones.
    Fractions(
        name="scores",
        shape=lambda spec, group: (spec.top_scores or spec.num_classes,),
        initialize=lambda values, start: _set_given(values, start.given, start.score_classes),
    ),
    # The classes of each row whose scores are kept.
    ClassIds(
        name="score_classes",
        exists=lambda spec, group: spec.top_scores is not None,
        shape=lambda spec, group: (spec.top_scores or 0,),
        initialize=lambda values, start: _set_classes(values, start.score_classes),
    ),
    # Score of every class whose own score is not kept: the highest that was left out.
    Fractions(name="score_floor", exists=lambda spec, group: spec.top_scores is not None),
    # Running average of each class's score map, for all classes (dense) or the kept ones (topk).
    Fractions(
        name="heatmaps",
        exists=lambda spec, group: group.layout != "scores",
        shape=lambda spec, group: (_num_maps(spec, group), spec.heatmap_size, spec.heatmap_size),
        chunk_rows=lambda spec, group: min(
            spec.rows_per_shard, DENSE_CHUNK_ROWS if group.layout == "dense" else spec.rows_per_shard
        ),
        initialize=lambda values, start: _set_given(values, start.given, start.classes),
        compact=_compact_heatmaps,
        rounded=True,
    ),
    # Value by which expected positives of each class with a heatmap are ranked, in place of the score.
    Fractions(
        name="spatial_score",
        exists=lambda spec, group: group.spatial_score and group.layout != "scores",
        shape=lambda spec, group: (_num_maps(spec, group),),
        initialize=lambda values, start: _set_given(values, start.given, start.classes),
        # Without heatmaps so far it is the score.
        compact=lambda compaction: np.take_along_axis(compaction.rows.ranked_by(), compaction.classes, 1),
    ),
    # Visits of each heatmap cell since its initial value.
    Counts(
        name="cell_visits",
        exists=lambda spec, group: group.layout != "scores",
        shape=lambda spec, group: (spec.heatmap_size, spec.heatmap_size),
        compact=_compact_cell_visits,
    ),
    # The classes of each row that have a heatmap, where not all have.
    ClassIds(
        name="classes",
        exists=lambda spec, group: group.layout == "topk",
        shape=lambda spec, group: (group.top or 0,),
        initialize=lambda values, start: _set_classes(values, start.classes),
        compact=lambda compaction: compaction.classes.astype(class_dtype(compaction.rows.num_classes)),
        updated=False,
    ),
    # Visits of each sample.
    Counts(name="sample_visits"),
    # The last epoch that updated each row.
    Epochs(name="last_epoch", initialize=lambda values, start: values.fill(NEVER), updated=False),
)
ARRAYS = {array.name: array for array in _ARRAYS}


def class_dtype(num_classes: int) -> np.dtype[np.generic]:
    """The smallest type of class ids whose largest value is free to mean "missing"."""
    return np.dtype(np.uint16 if num_classes <= np.iinfo(np.uint16).max else np.uint32)


def fill_value(dtype: np.dtype[np.generic]) -> float | int:
    """The value of a missing chunk: it is outside the domain of every array of this type."""
    if dtype.kind == "f":
        return float("nan")
    limits = np.iinfo(np.dtype(dtype.str))
    return int(limits.min if dtype.kind == "i" else limits.max)
