"""Find samples by id, by key, or by shard and key; and classes by name or number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from bigscl.common.text import printable
from bigscl.common.user_error import UserError
from bigscl.memory.snapshot_state import SnapshotState
from bigscl.store import MAX_COUNT, HeatmapStore, StoreSpec

if TYPE_CHECKING:
    from bigscl.data.index import Index


def find_samples(wanted: Sequence[str], spec: StoreSpec, index: Index | None) -> NDArray[np.int64]:
    """Return the ids of these samples, in their order. A key has precedence over an equal id."""
    return np.array([_find(name, spec, index) for name in wanted], dtype=np.int64)


def _find(name: str, spec: StoreSpec, index: Index | None) -> int:
    if index is not None:
        rows = rows_named(name, index)
        if len(rows) > 1:
            names = ", ".join(index.name(row) for row in rows[:3])
            raise UserError(f"sample {name!r}: is in several shards: {names}. Give shard and key, or the id.")
        if len(rows):
            return int(rows[0])
    if not name.isdecimal():
        where = "add --shards PATTERN to find it by key"
        if index is not None:
            where = f"there is no such key: keys look like {printable(index.key(int(index.ids()[0])))!r}"
        raise UserError(f"sample {name!r}: not an id, and {where}.")
    number = int(name)
    shard, position = divmod(number, spec.rows_per_shard)
    if shard >= spec.num_shards or position >= spec.shard_sizes[shard]:
        raise UserError(
            f"sample {name}: no such id. There are {spec.num_samples} samples in {spec.num_shards} shards of "
            f"{spec.rows_per_shard} ids each; the last id is {last_id(spec)}."
        )
    return number


def rows_named(name: str, index: Index) -> list[int]:
    """Return the rows with this key, or the one with this shard and key."""
    rows = _rows_with_key(name, index)
    shard, _, key = name.rpartition("/")
    if not rows and shard:
        rows = [row for row in _rows_with_key(key, index) if index.name(row) == name]
    return rows


def answer_key(sample: int, index: Index) -> str:
    """Return how answers and files of labels name a sample: its key, with its shard if several have it."""
    key = index.key(sample)
    return index.name(sample) if len(_rows_with_key(key, index)) > 1 else key


def _rows_with_key(key: str, index: Index) -> list[int]:
    wanted = np.frombuffer(key.encode(errors="surrogateescape"), np.uint8)
    rows = np.flatnonzero(index.keys.lengths == len(wanted)) if len(wanted) else np.empty(0, np.int64)
    # One comparison per letter, so that a million keys are not decoded to find one.
    for position, letter in enumerate(wanted):
        rows = rows[index.keys.values[index.keys.offsets[rows] + position] == letter]
    return [int(row) for row in rows]


def last_id(spec: StoreSpec) -> int:
    shard = max(number for number, size in enumerate(spec.shard_sizes) if size)
    return shard * spec.rows_per_shard + spec.shard_sizes[shard] - 1


def name_of(sample: int, index: Index | None) -> str:
    """Return the name of a sample for people: its shard and key, or its id."""
    return f"sample {sample}" if index is None else index.name(sample)


def class_name(number: int, index: Index | None) -> str:
    return f"class {number}" if index is None else printable(index.class_names[number])


def find_class(name: str, index: Index) -> int:
    """Return the number of a class, given by name or number. A name has precedence over an equal number."""
    if name in index.class_names:
        return index.class_names.index(name)
    if name.isdecimal() and int(name) < index.num_classes:
        return int(name)
    near = [printable(known) for known in index.class_names if name.lower() in known.lower()][:3]
    hint = (
        f"Did you mean {', '.join(near)}?"
        if near
        else f"There are {index.num_classes}, the first is {printable(index.class_names[0])!r}."
    )
    raise UserError(f"class {name!r}: no such class. {hint}")


def next_epoch(store: HeatmapStore) -> int:
    """Return the first epoch that the store's snapshot has not finished."""
    return SnapshotState.of(store.snapshot, store.spec.num_classes).next_epoch


def initial_share(store: HeatmapStore) -> float:
    """Return the weight of the initial value in the stored scores after the finished epochs."""
    start, visits = store.initial_values, np.array([min(next_epoch(store), MAX_COUNT)])
    return 0.0 if start is None else float(start.remaining(visits)[0])
