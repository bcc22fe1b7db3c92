"""Where rows live and what they start as: pure functions of the specs."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bigscl.store.annotations import Annotations
from bigscl.store.errors import BadValues, NoFreeSlot
from bigscl.store.spec import Array, GroupSpec, Rows, StoreSpec

# 16 rows measured best for dense chunks (2,400 images/s; 260 with 1 row, 800 with 64).
DENSE_CHUNK_ROWS = 16
NEVER = -1
MAX_COUNT = 254
# float16 1.0: bits of non-negative halves order like their values; NaN and negatives lie above.
ONE_BITS = np.float16(1).view(np.uint16)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayPlan:
    """One Zarr array of a group. Its fill value lies outside its domain, so a missing chunk shows."""

    name: str
    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    dtype: np.dtype[np.generic]
    fill: float | int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row in one slot."""
        return int(np.prod(self.shape[3:], dtype=np.int64)) * self.dtype.itemsize


def class_dtype(num_classes: int) -> np.dtype[np.uint16] | np.dtype[np.uint32]:
    """The smallest type of class ids whose largest value is free to mean "missing"."""
    return np.dtype(np.uint16) if num_classes <= np.iinfo(np.uint16).max else np.dtype(np.uint32)


def array_plans(spec: StoreSpec, group: GroupSpec) -> tuple[ArrayPlan, ...]:
    """Every array of a group, in the order they are written."""
    rows, side = spec.rows_per_shard, spec.heatmap_size
    classes = class_dtype(spec.num_classes)
    maps = spec.num_classes if group.layout == "dense" else group.top
    map_rows = min(rows, DENSE_CHUNK_ROWS) if group.layout == "dense" else rows

    def plan(
        name: str,
        tail: tuple[int, ...],
        dtype: type | np.dtype[np.generic],
        fill: float,
        chunk_rows: int = rows,
    ) -> ArrayPlan:
        shape = (group.num_slots, spec.num_shards, rows, *tail)
        return ArrayPlan(
            name=name, shape=shape, chunks=(1, 1, chunk_rows, *tail), dtype=np.dtype(dtype), fill=fill
        )

    plans = [plan("scores", (spec.num_classes,), np.float16, float("nan"))]
    if group.layout != "scores":
        assert maps is not None
        plans.append(plan("heatmaps", (maps, side, side), np.float16, float("nan"), map_rows))
        if group.counts:
            plans.append(plan("counts", (side, side), np.uint8, MAX_COUNT + 1))
    if group.layout == "topk":
        assert group.top is not None
        plans.append(plan("classes", (group.top,), classes, int(np.iinfo(classes).max)))
    plans.append(plan("visited", (), np.int32, int(np.iinfo(np.int32).min)))
    return tuple(plans)


def shard_bytes(spec: StoreSpec, group: GroupSpec) -> int:
    """Bytes of one version of one shard, uncompressed."""
    return spec.rows_per_shard * sum(plan.row_bytes for plan in array_plans(spec, group))


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


def annotated_mask(shape: tuple[int, ...], positions: Array, positives: Array) -> NDArray[np.bool_]:
    """True at the annotated (row, class) pairs."""
    mask = np.zeros(shape, dtype=bool)
    mask[positions, positives] = True
    return mask


def choose_classes(scores: Array, annotated: NDArray[np.bool_], top: int) -> NDArray[np.int64]:
    """The `top` columns of highest score per row, ascending; annotated ones always, ties to the lowest."""
    num_columns = scores.shape[1]
    if top >= num_columns:
        return np.broadcast_to(np.arange(num_columns), scores.shape).copy()
    # 32 bits where the keys fit: numpy partitions them four times as fast as it argpartitions 64.
    dtype = np.uint32 if (int(ONE_BITS) + 2) * num_columns < 2**32 else np.uint64
    bits: Array = np.where(annotated, ONE_BITS + 1, scores.view(np.uint16)).astype(dtype)
    # Unique keys (score, then lowest column), so that the partition has no ties to break.
    keys = bits * dtype(num_columns) + np.arange(num_columns - 1, -1, -1, dtype=dtype)
    best = np.partition(keys, num_columns - top, axis=1)[:, num_columns - top :]
    chosen: NDArray[np.int64] = (num_columns - 1 - best % dtype(num_columns)).astype(np.int64)
    return np.sort(chosen, axis=1)


def initial_shard(spec: StoreSpec, group: GroupSpec, annotations: Annotations, shard: int) -> Rows:
    """A shard that was never written: 1 for annotated positives, 0 for the rest, never visited."""
    positions, positives = annotations.of_shard(shard)
    arrays = {plan.name: np.zeros(plan.shape[2:], plan.dtype) for plan in array_plans(spec, group)}
    arrays["visited"][:] = NEVER
    arrays["scores"][positions, positives] = 1
    if group.layout == "dense":
        arrays["heatmaps"][positions, positives] = 1
    if group.layout == "topk":
        assert group.top is not None
        chosen = choose_classes(arrays["scores"], arrays["scores"] == 1, group.top)
        arrays["classes"][:] = chosen
        arrays["heatmaps"][np.take_along_axis(arrays["scores"], chosen, axis=1) == 1] = 1
    return Rows(**arrays)


def check_values(ids: NDArray[np.int64], name: str, values: Array, shape: tuple[int, ...]) -> None:
    """Refuses anything but float16 in [0, 1] of the right shape, naming the first bad sample."""
    expected = (len(ids), *shape)
    if values.dtype != np.float16 or values.shape != expected:
        raise BadValues(f"{name}: got {values.dtype} {values.shape}, expected float16 {expected}")
    bits = values.view(np.uint16)
    if bits.size and bits.max() > ONE_BITS:
        bad = (bits > ONE_BITS).reshape(len(ids), -1)
        first = int(bad.any(axis=1).argmax())
        value = values.reshape(len(ids), -1)[first, bad[first].argmax()]
        raise BadValues(
            f"{name} of sample {ids[first]}: found {value}, expected values in [0, 1]. "
            f"{int(bad.any(axis=1).sum())} of {len(ids)} samples of this batch are bad; nothing was stored. "
            f"Look for a diverging loss."
        )
