"""Find samples by id, by key, or by shard and key; and classes by name or number."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from bigscl.common.text import printable
from bigscl.common.user_error import UserError
from bigscl.memory.snapshot_state import SnapshotState
from bigscl.store import HeatmapStore, Snapshot, StoreSpec
from bigscl.tools.shared.open_store import Data
from bigscl.tools.shared.shard_passes import pass_over, to_float32

if TYPE_CHECKING:
    from bigscl.data.index import Index


def find_samples(wanted: Sequence[str], spec: StoreSpec, index: "Index | None") -> NDArray[np.int64]:
    """Return the ids of these samples, in their order. A key has precedence over an equal id."""
    return np.array([_find(name, spec, index) for name in wanted], dtype=np.int64)


def _find(name: str, spec: StoreSpec, index: "Index | None") -> int:
    if index is not None:
        rows = _rows_of(name, index)
        if len(rows) > 1:
            names = ", ".join(index.name(row) for row in rows[:3])
            raise UserError(f"sample {name!r}: is in several shards: {names}. Give shard and key, or the id.")
        if len(rows):
            return int(rows[0])
    if not name.isdecimal():
        where = "add --shards PATTERN to find it by key" if index is None else "there is no such key"
        raise UserError(f"sample {name!r}: not an id, and {where}.")
    number = int(name)
    shard, position = divmod(number, spec.rows_per_shard)
    if shard >= spec.num_shards or position >= spec.shard_sizes[shard]:
        raise UserError(
            f"sample {name}: no such id. There are {spec.num_samples} samples in {spec.num_shards} shards of "
            f"{spec.rows_per_shard} ids each; the last id is {last_id(spec)}."
        )
    return number


def _rows_of(name: str, index: "Index") -> list[int]:
    """Return the rows with this key, or the one with this shard and key."""
    rows = _rows_with_key(name, index)
    shard, _, key = name.rpartition("/")
    if not rows and shard:
        rows = [row for row in _rows_with_key(key, index) if index.name(row) == name]
    return rows


def answer_key(sample: int, index: "Index") -> str:
    """Return how answers and files of labels name a sample: its key, with its shard if several have it."""
    key = index.key(sample)
    return index.name(sample) if len(_rows_with_key(key, index)) > 1 else key


def _rows_with_key(key: str, index: "Index") -> list[int]:
    wanted = np.frombuffer(key.encode(errors="surrogateescape"), np.uint8)
    rows = np.flatnonzero(index.keys.lengths == len(wanted)) if len(wanted) else np.empty(0, np.int64)
    # One comparison per letter, so that a million keys are not decoded to find one.
    for place, letter in enumerate(wanted):
        rows = rows[index.keys.values[index.keys.offsets[rows] + place] == letter]
    return [int(row) for row in rows]


def last_id(spec: StoreSpec) -> int:
    """Return the largest sample id."""
    shard = max(number for number, size in enumerate(spec.shard_sizes) if size)
    return shard * spec.rows_per_shard + spec.shard_sizes[shard] - 1


def name_of(sample: int, index: "Index | None") -> str:
    """Return the name of a sample for people: its shard and key, or its id."""
    return f"sample {sample}" if index is None else index.name(sample)


def class_name(number: int, index: "Index | None") -> str:
    """Return the name of a class for people."""
    return f"class {number}" if index is None else printable(index.class_names[number])


def find_class(name: str, index: "Index") -> int:
    """Return the number of a class, given by name or number. A name has precedence over an equal number."""
    if name in index.class_names:
        return index.class_names.index(name)
    if name.isdecimal() and int(name) < index.num_classes:
        return int(name)
    near = [printable(known) for known in index.class_names if name.lower() in known.lower()][:3]
    hint = (
        f"Did you mean {', '.join(near)}?"
        if near
        else f"There are {index.num_classes} classes, numbered from 0."
    )
    raise UserError(f"class {name!r}: no such class. {hint}")


# Samples to look at

Choice = Literal["random", "tracked", "most-changed", "confident"]
ScoredSamples = tuple[NDArray[np.int64], NDArray[np.float32]]


def choose_samples(
    store: HeatmapStore, data: Data, choice: Choice, count: int, number: int | None, seed: int
) -> NDArray[np.int64]:
    """Return the ids of up to `count` samples, the most interesting first; of class `number` if given."""
    if choice == "tracked":
        return _tracked(store, data, count, number)
    if choice == "random":
        return _random(data, count, number, seed)
    ranked = _confident if choice == "confident" else _changes
    return _best(ranked(store, data, number))[:count]


def _largest(values: NDArray[np.float32], number: int | None) -> NDArray[np.float32]:
    """Return the largest value of each sample over the classes, or its value of one class."""
    return values.max(axis=1) if number is None else values[:, number]


def _tracked(store: HeatmapStore, data: Data, count: int, number: int | None) -> NDArray[np.int64]:
    ids = np.array(store.spec.history_samples, np.int64)
    if not len(ids):
        raise UserError(
            f"{store.backend.url}: has no tracked samples (store.history_samples of its run is 0)"
        )
    return ids[_with_class(data, ids, number)][:count]


def _random(data: Data, count: int, number: int | None, seed: int) -> NDArray[np.int64]:
    ids = data.index.ids()
    ids = ids[_with_class(data, ids, number)]
    return np.sort(np.random.default_rng(seed).choice(ids, min(count, len(ids)), replace=False))


def _with_class(data: Data, ids: NDArray[np.int64], number: int | None) -> NDArray[np.bool_]:
    """Return which samples are annotated with the class; all, if no class is given."""
    if number is None:
        return np.ones(len(ids), bool)
    positives = data.annotations.classes == number
    rows = np.searchsorted(data.annotations.offsets, np.flatnonzero(positives), side="right") - 1
    found = np.isin(ids, rows)
    if not found.any():
        raise UserError(f"--class: no sample is annotated with {data.index.class_names[number]!r}")
    return found


def _confident(store: HeatmapStore, data: Data, number: int | None) -> Iterator[ScoredSamples]:
    """Yield the highest score of a class that is not annotated, for each sample, shard by shard."""

    def work(shard: int) -> ScoredSamples:
        ids, scores = next(store.scores_by_shard([shard]))
        return ids, _largest(np.where(data.annotated(ids), -1, to_float32(scores)), number)

    shards = range(store.spec.num_shards)
    return (found for _, found in pass_over("searching confident samples", shards, work, [store]))


def _changes(store: HeatmapStore, data: Data, number: int | None) -> Iterator[ScoredSamples]:
    """Yield the change of the scores since the previous snapshot, for the shards that changed."""
    older = snapshot_before(store)
    if older is None:
        raise UserError(
            f"{store.backend.url}: snapshot {store.snapshot.id} is the oldest one, so there is no "
            f"change to show. Use another --choose."
        )
    before = HeatmapStore(store.backend, store.spec, older, data.annotations)
    changed = [
        shard
        for shard, (new, old) in enumerate(zip(store.snapshot.slots, older.slots, strict=True))
        if (store.snapshot.group, new) != (older.group, old)
    ]

    def work(shard: int) -> ScoredSamples:
        (ids, now), (_, then) = (next(one.scores_by_shard([shard])) for one in (store, before))
        return ids, _largest(np.abs(to_float32(now) - to_float32(then)), number)

    return (found for _, found in pass_over("searching changed samples", changed, work, [store, before]))


def snapshot_before(store: HeatmapStore) -> Snapshot | None:
    """Return the retained snapshot before the store's own that has another state; None if there is none."""
    at = store.snapshot
    # Opening the store for writing creates a snapshot of the same state: no change.
    same = (at.group, at.slots)
    older = [one for one in store.snapshots() if one.id < at.id and (one.group, one.slots) != same]
    return older[-1] if older else None


def _best(ranked: Iterator[ScoredSamples]) -> NDArray[np.int64]:
    """Return all ids by falling value; equal values by id."""
    parts = list(ranked)
    if not parts:
        return np.empty(0, np.int64)
    ids, values = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return ids[np.lexsort((ids, -values))]


def next_epoch(store: HeatmapStore) -> int:
    """Return the first epoch that the store's snapshot has not finished."""
    return SnapshotState.of(store.snapshot, store.spec.num_classes).next_epoch
