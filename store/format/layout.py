"""Where rows are stored, their initial values and their compaction: pure functions of the specs."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from bigscl.common.user_error import UserError
from bigscl.store.errors import BadValues, NoFreeSlot
from bigscl.store.format.annotations import Annotations
from bigscl.store.format.array_types import (
    ARRAYS,
    ONE_BITS,
    Compaction,
    Domain,
    Start,
    StoredArray,
    fill_value,
)
from bigscl.store.format.quantize import from_bytes, to_bytes
from bigscl.store.format.spec import GENERATIONS, Array, Codec, GroupSpec, Rows, StoreSpec

PACKED = ("sample_visits", "last_epoch")
"""Small arrays that are stored together, as the bytes of one array: in this order, which shows its fill."""
PACKED_NAME = "samples"


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayPlan:
    """An array of a group. Its fill value lies outside its domain, so that a missing chunk shows."""

    name: str
    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    dtype: np.dtype[np.generic]
    rounded: bool = False
    """Whether its values are stored as levels of one byte, see `store/format/quantize.py`."""
    parts: tuple["ArrayPlan", ...] = ()
    """The arrays that it packs: each row has their bytes, one after the other, little-endian."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(part.name for part in self.parts) or (self.name,)

    def to_stored(self, rows: Rows) -> Array:
        """Return the values that are written to the storage for these rows."""
        if not self.parts:
            return to_bytes(rows[self.name]) if self.rounded else rows[self.name]
        columns = [rows[part.name].astype(part.dtype.newbyteorder("<"), order="C") for part in self.parts]
        return np.concatenate([column.view(np.uint8).reshape(len(column), -1) for column in columns], axis=1)

    def from_stored(self, values: Array) -> dict[str, Array]:
        """Return the arrays of rows, by name, from the values on the storage."""
        if not self.parts:
            return {self.name: from_bytes(values) if self.rounded else values}
        ends = np.cumsum([part.row_bytes for part in self.parts])[:-1]
        columns = zip(self.parts, np.split(values, ends, axis=1), strict=True)
        return {
            part.name: np.frombuffer(column.tobytes(), part.dtype.newbyteorder("<")).astype(part.dtype)
            for part, column in columns
        }

    @property
    def stored_dtype(self) -> np.dtype[np.generic]:
        """The type of its values on the storage."""
        return np.dtype(np.uint8) if self.rounded else self.dtype

    @property
    def fill(self) -> float | int:
        """The value of chunks that were never written, on the storage."""
        return fill_value(self.stored_dtype)

    @property
    def row_bytes(self) -> int:
        return int(np.prod(self.shape[3:], dtype=np.int64)) * self.dtype.itemsize

    @property
    def stored_row_bytes(self) -> int:
        """Bytes of one row on the storage, before compression."""
        return self.row_bytes // self.dtype.itemsize * self.stored_dtype.itemsize


def array_plans(spec: StoreSpec, group: GroupSpec) -> tuple[ArrayPlan, ...]:
    outer = (group.num_slots, spec.num_shards, spec.rows_per_shard)
    return tuple(
        ArrayPlan(
            name=array.name,
            shape=(*outer, *array.shape(spec, group)),
            chunks=(1, 1, array.chunk_rows(spec, group), *array.shape(spec, group)),
            dtype=array.dtype(spec),
            rounded=array.rounded and group.codec == "uint8",
        )
        for array in ARRAYS.values()
        if array.exists(spec, group)
    )


def stored_plans(spec: StoreSpec, group: GroupSpec) -> tuple[ArrayPlan, ...]:
    """Every Zarr array of a group, in the order in which they are written: small arrays are packed."""
    plans = array_plans(spec, group)
    parts = tuple(plan for plan in plans if plan.name in PACKED)
    width, outer = sum(part.row_bytes for part in parts), parts[0]
    packed = ArrayPlan(
        name=PACKED_NAME,
        shape=(*outer.shape, width),
        chunks=(*outer.chunks, width),
        dtype=np.dtype(np.uint8),
        parts=parts,
    )
    return (*(plan for plan in plans if plan not in parts), packed)


def shard_bytes(spec: StoreSpec, group: GroupSpec) -> int:
    """Bytes of one version of one shard in RAM."""
    return spec.rows_per_shard * sum(plan.row_bytes for plan in array_plans(spec, group))


def stored_bytes(spec: StoreSpec, group: GroupSpec) -> int:
    """Bytes of one version of one shard on the storage, at most; compressed chunks take less."""
    return spec.rows_per_shard * sum(plan.stored_row_bytes for plan in array_plans(spec, group))


def split_by_shard(
    ids: NDArray[np.int64], rows_per_shard: int
) -> Iterator[tuple[int, NDArray[np.int64], NDArray[np.int64]]]:
    """(shard, positions in it, places in `ids`) for each shard that holds any of the ids."""
    shards = ids // rows_per_shard
    order = np.argsort(shards, kind="stable")
    starts = np.flatnonzero(np.diff(shards[order], prepend=-1))
    for places in np.split(order, starts[1:]):
        if len(places):
            yield int(shards[places[0]]), ids[places] % rows_per_shard, places


def free_slot(shard: int, named: Iterable[Sequence[int]], ours: range) -> int:
    """The lowest of our slots of a shard that none of these snapshots' slot tables names."""
    taken = {slots[shard] for slots in named}
    for slot in ours:
        if slot not in taken:
            return slot
    raise NoFreeSlot(
        f"shard {shard}: all {len(ours)} slots are named by retained snapshots. "
        f"Drop a snapshot, or create the store with more slots."
    )


def choose_classes(scores: Array, given: NDArray[np.bool_], top: int) -> NDArray[np.int64]:
    """The `top` columns of highest score per row, ascending; given labels always, ties to the lowest."""
    num_columns = scores.shape[1]
    if top >= num_columns:
        return np.broadcast_to(np.arange(num_columns), scores.shape).copy()
    # 32 bits where the keys fit: numpy partitions them four times as fast as it argpartitions 64.
    dtype = np.uint32 if (int(ONE_BITS) + 2) * num_columns < 2**32 else np.uint64
    bits: Array = np.where(given, ONE_BITS + 1, scores.view(np.uint16)).astype(dtype)
    # Unique keys (score, then lowest column), so that the partition has no ties to break.
    keys = bits * dtype(num_columns) + np.arange(num_columns - 1, -1, -1, dtype=dtype)
    best = np.partition(keys, num_columns - top, axis=1)[:, num_columns - top :]
    chosen: NDArray[np.int64] = (num_columns - 1 - best % dtype(num_columns)).astype(np.int64)
    return np.sort(chosen, axis=1)


def initial_shard(spec: StoreSpec, group: GroupSpec, annotations: Annotations, shard: int) -> Rows:
    """A shard that was never written: 1 for given labels, 0 for the rest, never visited."""
    plans = array_plans(spec, group)
    given = annotations.of_shard(shard)
    chosen = None if group.top is None else _first_classes(annotations, shard, group.top)
    scored = None if spec.top_scores is None else _first_classes(annotations, shard, spec.top_scores)
    values: dict[str, Array] = {plan.name: np.zeros(plan.shape[2:], plan.dtype) for plan in plans}
    for name, array in values.items():
        ARRAYS[name].initialize(array, Start(given=given, classes=chosen, score_classes=scored))
    return Rows(spec.num_classes, **values)


def _first_classes(annotations: Annotations, shard: int, count: int) -> NDArray[np.int64]:
    """Return `count` classes of each row of a shard, ascending: its given labels, then the lowest others."""
    # As `choose_classes` of scores that are all equal, which takes half a second at 21,000 classes.
    size, rows = annotations.rows_per_shard, shard * annotations.rows_per_shard
    lengths = annotations.given.lengths[rows : rows + size]
    indices, classes = annotations.given.entries(rows + np.arange(size))
    given = np.full((size, int(lengths.max(initial=0))), annotations.num_classes, np.int64)
    given[indices, np.arange(len(indices)) - np.repeat(np.cumsum(lengths) - lengths, lengths)] = classes
    others = np.tile(np.arange(min(count + given.shape[1], annotations.num_classes)), (size, 1))
    in_reach = classes < others.shape[1]
    others[indices[in_reach], classes[in_reach]] = annotations.num_classes
    candidates = np.concatenate([given, others], axis=1)
    order = np.argsort(candidates == annotations.num_classes, axis=1, kind="stable")[:, :count]
    return np.sort(np.take_along_axis(candidates, order, 1), axis=1)


def check_update(spec: StoreSpec, group: GroupSpec, ids: NDArray[np.int64], update: Rows) -> None:
    """Refuse values of wrong arrays, types or shapes, or outside their domain; names the first bad sample."""
    wanted = {plan.name: plan for plan in array_plans(spec, group) if ARRAYS[plan.name].updated}
    if update.keys() != wanted.keys():
        raise BadValues(
            f"update of a {group.layout} store: expected {sorted(wanted)}, found {sorted(update)}"
        )
    for name, plan in wanted.items():
        expected = (len(ids), *plan.shape[3:])
        if update[name].dtype != plan.dtype or update[name].shape != expected:
            raise BadValues(
                f"{name}: got {update[name].dtype} {update[name].shape}, expected {plan.dtype} {expected}"
            )
        _check_domain(ids, ARRAYS[name], update[name], Domain(num_classes=spec.num_classes, last_epoch=-1))


def _check_domain(ids: NDArray[np.int64], array: StoredArray, values: Array, domain: Domain) -> None:
    bad = array.invalid(values, domain)
    if bad.any():
        bad = bad.reshape(len(ids), -1)
        first = int(bad.any(axis=1).argmax())
        value = values.reshape(len(ids), -1)[first, bad[first].argmax()]
        raise BadValues(
            f"{array.name} of sample {ids[first]}: found {value}, expected {array.expected(domain)}. "
            f"{int(bad.any(axis=1).sum())} of {len(ids)} samples of this batch are bad; nothing was stored. "
            f"Look for a diverging loss."
        )


# Compaction: from heatmaps of all classes (or none yet) to those of the k strongest classes of each image


def check_top(annotations: Annotations, top: int, name: str = "top") -> None:
    """Refuse a number of kept classes that would lose given labels."""
    if not 1 <= top <= annotations.num_classes:
        raise UserError(f"{name}: {top}, expected 1 to {annotations.num_classes}, the number of classes")
    most = int(annotations.given.lengths.max(initial=0))
    if most > top:
        row = int(annotations.given.lengths.argmax())
        raise UserError(
            f"{name}: {top} would lose given labels: sample {row} has {most}. Choose at least {most}."
        )


def compacted_group(
    old: GroupSpec, generation: int, top: int, slots: int | None, codec: Codec | None
) -> GroupSpec:
    """The array group that a writer's compaction makes; slots and codec stay as they are by default."""
    if old.top is not None and top > old.top:
        raise UserError(f"top: {top}, but only {old.top} classes per image are there")
    return replace(
        old,
        # A number that no other writer chooses, even one that was frozen in a compaction of its own.
        name=f"arrays-{int(old.name.split('-')[1]) + generation:03d}",
        generations=GENERATIONS,
        layout="topk",
        top=top,
        slots=slots or old.slots,
        codec=codec or old.codec,
    )


def compact_rows(rows: Rows, given: NDArray[np.bool_], spec: StoreSpec, group: GroupSpec) -> Rows:
    """The same rows in the layout of `group`, with heatmaps of the `top` highest-scoring classes of each row.

    Given labels are always kept. Rows with heatmaps of some classes keep the strongest of those.
    """
    assert group.top is not None
    # The classes to choose from: those with a heatmap so far, or those whose scores are kept.
    choice = rows.get("score_classes") if rows.classes is None else rows.classes
    scores, among = rows.scores, given
    if choice is not None:
        scores, among = (np.take_along_axis(array, choice.astype(np.int64), 1) for array in (scores, given))
    classes: Array = choose_classes(scores, among, group.top)
    if choice is not None:
        classes = np.take_along_axis(choice, classes, 1)
    compaction = Compaction(
        rows=rows, given=given, classes=classes, heatmap_size=spec.heatmap_size, debiased=group.debiased
    )
    arrays = [array for array in ARRAYS.values() if array.exists(spec, group)]
    return Rows(spec.num_classes, **{array.name: array.compacted(compaction) for array in arrays})
