"""Parts of a store: values that are written once and never change."""

from collections.abc import ItemsView, Iterator, KeysView, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, Literal, Self, get_args

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from bigscl.common.user_error import UserError
from bigscl.store.errors import BadFile
from bigscl.store.format.fields import Flag, Small, Whole, to_dataclass

FORMAT = 2
FEATURES = {"packed": ["sample_visits", "last_epoch"]}
"""Parts of the format that every store has and a reader must know of, by name, with their parameters."""
SPARSE_SCORES = "sparse_scores"
"""A part that some stores have; its parameter is the number of classes whose scores a row keeps."""
GENERATIONS = 1024
"""Writers, one after the other, that have slots of their own before the first one's are used again."""

MAX_COUNT = 254
"""Visits are counted up to here; 255 marks a missing chunk."""

Layout = Literal["dense", "topk", "scores"]
Codec = Literal["none", "blosc", "zstd", "uint8"]
Array = NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSpec:
    """Settings that stay the same for the whole life of a store."""

    fingerprint: str
    num_classes: Small
    heatmap_size: Annotated[int, Field(strict=True, ge=1, le=2**15)]
    rows_per_shard: Small
    shard_sizes: tuple[Small, ...]
    history_samples: tuple[Whole, ...] = ()
    top_scores: Small | None = None
    """Classes per row whose scores are kept, the highest; None: all."""

    @property
    def num_shards(self) -> int:
        """Tar shards, and so versions that a snapshot names."""
        return len(self.shard_sizes)

    @property
    def num_rows(self) -> int:
        """Rows of the arrays, those past the end of smaller shards included."""
        return self.num_shards * self.rows_per_shard

    @property
    def num_samples(self) -> int:
        return sum(self.shard_sizes)

    def sample_ids(self, shard: int) -> NDArray[np.int64]:
        first = shard * self.rows_per_shard
        return np.arange(first, first + self.shard_sizes[shard], dtype=np.int64)

    def to_json(self) -> dict[str, Any]:
        values = asdict(self)
        top_scores = values.pop("top_scores")
        sparse = {} if top_scores is None else {SPARSE_SCORES: top_scores}
        return {"format": FORMAT, "features": {**FEATURES, **sparse}, **values}

    @classmethod
    def from_json(cls, values: Mapping[str, Any], place: str, remedy: str) -> Self:
        """The spec that `to_json` wrote, checked."""
        top_scores = values.get("features", {}).get(SPARSE_SCORES)
        spec = to_dataclass(cls, {**values, "top_scores": top_scores}, place, remedy)
        last = max(spec.history_samples, default=0), max(spec.shard_sizes, default=0)
        fits = last[0] <= max(0, spec.num_rows - 1) and last[1] <= spec.rows_per_shard
        if not fits or spec.num_classes < 1 or not 1 <= (top_scores or 1) <= max(1, spec.num_classes - 1):
            raise BadFile(f"{place}: its numbers of rows, samples and classes do not fit together. {remedy}")
        return spec


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSpec:
    """How one array group holds the memory."""

    name: str = "arrays-000"
    layout: Layout = "dense"
    top: Small | None = None
    """Classes kept per row; only for `topk`."""
    slots: Annotated[int, Field(strict=True, le=2**15)] = 3
    """Versions of a shard that one writer can keep."""
    generations: Annotated[int, Field(strict=True, le=2**15)] = GENERATIONS
    """Writers that have slots of their own."""
    codec: Codec = "none"
    checksum: Flag = True
    debiased: Flag = False
    """Whether the first visit replaces the initial values."""
    spatial_score: Flag = False
    """Whether expected positives are ranked by spatial scores, not by the scores."""

    def __post_init__(self) -> None:
        if self.layout not in get_args(Layout):
            raise UserError(f"layout: {self.layout!r}, expected one of {', '.join(get_args(Layout))}")
        if self.codec not in get_args(Codec):
            raise UserError(f"codec: {self.codec!r}, expected one of {', '.join(get_args(Codec))}")
        if (self.layout == "topk") != (self.top is not None):
            raise UserError(f"top: {self.top!r} with layout {self.layout!r}; set it for topk, and only there")
        if self.top is not None and self.top < 1:
            raise UserError(f"top: {self.top}, expected at least 1")
        if self.slots < 2:
            raise UserError(f"slots: {self.slots}, expected at least 2: one that is kept, one to write to")
        if self.generations < 1:
            raise UserError(f"generations: {self.generations}, expected at least 1")

    @property
    def num_slots(self) -> int:
        """Length of the arrays' slot axis; what nobody wrote takes no space."""
        return self.slots * self.generations

    def slots_of(self, generation: int) -> range:
        first = generation % self.generations * self.slots
        return range(first, first + self.slots)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


NOT_KEPT = np.float16(-1)
"""Ranks below every score: a class whose score a row does not keep is never expected."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KeptScores:
    """The highest scores of rows, in a store that keeps no others."""

    num_classes: int
    classes: Array
    """[N, m], ascending in each row."""
    values: Array
    """float16 [N, m]"""
    floors: Array
    """float16 [N]: the score of every other class."""

    def spread(self, rest: Array | np.float16) -> Array:
        """Return [N, L]: the kept values in their places, and `rest` (of each row) in all others."""
        values = np.empty((len(self.classes), self.num_classes), self.values.dtype)
        values[:] = np.reshape(rest, (-1, 1))
        np.put_along_axis(values, self.classes.astype(np.int64), self.values, 1)
        return values


Ranked = Array | KeptScores
"""What expected positives are ranked by, of some rows: float16 [N, L], or what is kept of it."""


class Rows:
    """Arrays of some samples by their names, with the same rows in the same order.

    Like a data frame: `rows["last_epoch"]` is an array, `len(rows)` is the number of samples. The rows of a
    store have every array of its layout, an update those that training changes.
    """

    __slots__ = ("_arrays", "_num_classes")

    def __init__(self, num_classes: int | None = None, /, **arrays: Array) -> None:
        """`num_classes` is L. Rows that keep all scores have it from them."""
        self._arrays = arrays
        self._num_classes = num_classes

    def __len__(self) -> int:
        return len(next(iter(self._arrays.values())))

    def __getitem__(self, name: str) -> Array:
        return self._arrays[name]

    def __contains__(self, name: object) -> bool:
        return name in self._arrays

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def get(self, name: str) -> Array | None:
        return self._arrays.get(name)

    def keys(self) -> KeysView[str]:
        return self._arrays.keys()

    def items(self) -> ItemsView[str, Array]:
        return self._arrays.items()

    def replace(self, **arrays: Array) -> "Rows":
        return Rows(self._num_classes, **{**self._arrays, **arrays})

    def take(self, positions: Array | slice) -> "Rows":
        return Rows(
            self._num_classes,
            **{name: np.ascontiguousarray(array[positions]) for name, array in self.items()},
        )

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self._arrays.values())

    @property
    def num_classes(self) -> int:
        return self._num_classes or int(self._arrays["scores"].shape[1])

    @property
    def kept_scores(self) -> KeptScores | None:
        if "score_classes" not in self:
            return None
        return KeptScores(
            num_classes=self.num_classes,
            classes=self["score_classes"],
            values=self["scores"],
            floors=self["score_floor"],
        )

    @property
    def scores(self) -> Array:
        """[N, L]. Where only the highest are kept they are a copy, with the floor in place of all others."""
        kept = self.kept_scores
        return self._arrays["scores"] if kept is None else kept.spread(kept.floors)

    def with_scores(self, scores: Array) -> "Rows":
        """Return the same rows with these scores of all classes, [N, L]."""
        sparse = ("scores", "score_classes", "score_floor")
        return Rows(scores=scores, **{name: array for name, array in self.items() if name not in sparse})

    @property
    def heatmaps(self) -> Array | None:
        """[N, L or k, W, W]; None where only scores are kept."""
        return self.get("heatmaps")

    @property
    def classes(self) -> Array | None:
        """[N, k]: the classes that have heatmaps; None where all have, or none."""
        return self.get("classes")

    def kept_classes(self) -> Array:
        """The classes of each row that have a heatmap: [N, L or k], ascending."""
        if self.heatmaps is None:
            return np.empty((len(self), 0), np.int64)
        if self.classes is None:
            return np.broadcast_to(np.arange(self.num_classes), (len(self), self.num_classes))
        return self.classes

    def ranked(self) -> Ranked:
        """Return what ranks expected positives: the spatial score if a class has it, else the score."""
        kept, spatial = self.kept_scores, self.get("spatial_score")
        if kept is None:
            return self._ranked_classes()
        if spatial is None or self.classes is None:
            return kept
        equal = kept.classes[:, :, None] == self.classes[:, None]
        values = np.take_along_axis(spatial, equal.argmax(2), 1)
        return replace(kept, values=np.where(equal.any(2), values, kept.values))

    def ranked_by(self) -> Array:
        """Return the same as [N,L]; NOT_KEPT stands for classes that are not ranked."""
        ranked = self.ranked()
        return ranked.spread(NOT_KEPT) if isinstance(ranked, KeptScores) else ranked

    def _ranked_classes(self) -> Array:
        spatial = self.get("spatial_score")
        if spatial is None or self.classes is None:
            return self.scores if spatial is None else spatial
        values = self.scores.copy()
        np.put_along_axis(values, self.classes.astype(np.int64), spatial, 1)
        return values

    def heatmaps_of(self, places: Array, classes: Array) -> Array:
        """The heatmaps [..., W, W] of classes of rows, both broadcast; zeros where none is kept."""
        if self.heatmaps is None:
            raise UserError("heatmaps: this store holds scores only so far, no heatmaps")
        if self.classes is None:
            return np.asarray(self.heatmaps[places, classes])
        equal = self.classes[places] == np.asarray(classes)[..., None]
        found: Array = self.heatmaps[places, equal.argmax(axis=-1)]
        found[~equal.any(axis=-1)] = 0
        return found
