"""Damaged rows of a shard, and the values that they are reset to."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from bigscl.store import (
    Answered,
    Array,
    HeatmapStore,
    Problem,
    Rows,
    Snapshot,
    StoreSpec,
    answered_shard,
    initial_shard,
)

STAMPS = "last_epoch"
INITIAL = "their initial values"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Source:
    """An older version of a shard, with the rows that are damaged in it."""

    snapshot: Snapshot
    damaged: NDArray[np.bool_]


def damaged_rows(spec: StoreSpec, shard: int, problems: Sequence[Problem]) -> NDArray[np.bool_]:
    """Return which rows of a shard have a problem in any array."""
    bad = np.zeros(spec.rows_per_shard, bool)
    for problem in problems:
        bad[np.asarray(problem.samples, np.int64) - shard * spec.rows_per_shard] = True
    return bad


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RepairedShard:
    """The rows of a shard that has no damage any more."""

    rows: Rows
    reset: dict[str, list[int]]
    """The reset samples by the origin of their values."""
    answered: Answered
    """The answers of the snapshot; `late` is that of the values which the rows have now."""


def repaired_shard(
    store: HeatmapStore,
    at: Snapshot,
    shard: int,
    problems: Sequence[Problem],
    sources: Sequence[Source],
    answered: Answered,
) -> RepairedShard:
    """Return the repaired rows of a shard, with all answers of people that the snapshot has.

    A damaged row is taken from the first source in which it is intact. It keeps its visit stamp, so that the
    current epoch does not visit it twice; a lost stamp becomes the snapshot's epoch for the same reason.
    """
    spec = store.spec
    assert store.annotations is not None
    initial = dict(initial_shard(spec, store.group, store.annotations, shard))
    values = [problem for problem in problems if problem.array != STAMPS]
    lost = damaged_rows(spec, shard, values)
    origins = {INITIAL: lost.copy()}
    replacement = {name: array.copy() for name, array in initial.items()}
    for source in sources:
        name = f"their values of snapshot {source.snapshot.id}"
        origins[name] = origins[INITIAL] & ~source.damaged
        origins[INITIAL] &= source.damaged
        older = Rows(**_readable(store, source.snapshot, shard, initial))
        is_about = _is_about(answered, spec, shard, origins[name])
        since, changes = answered.since(
            Answered.at(source.snapshot), stored=is_about, heatmaps=store.group.layout != "scores"
        )
        answered = replace(answered, late=np.where(is_about, since.late, answered.late))
        older = answered_shard(older, shard, since.take(changes), store.annotations)
        _copy(dict(older), replacement, origins[name])
    # Initial values have the answers from their start.
    is_about = _is_about(answered, spec, shard, origins[INITIAL])
    answered = replace(answered, late=answered.late & ~is_about)
    rows = _readable(store, at, shard, initial)
    lost_stamps = damaged_rows(spec, shard, [problem for problem in problems if problem.array == STAMPS])
    stamps = np.where(lost_stamps, at.epoch, rows[STAMPS]).astype(rows[STAMPS].dtype)
    _copy(replacement, rows, lost)
    rows[STAMPS] = stamps
    beyond = np.arange(spec.rows_per_shard) >= spec.shard_sizes[shard]
    _copy(initial, rows, beyond)
    origins["stamps of the snapshot's epoch"] = lost_stamps & ~lost
    reset = {
        name: (shard * spec.rows_per_shard + np.flatnonzero(found)).tolist()
        for name, found in origins.items()
        if found.any()
    }
    return RepairedShard(rows=Rows(**rows), reset=reset, answered=answered)


def _is_about(answered: Answered, spec: StoreSpec, shard: int, rows: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return which of the answers are about these rows of a shard."""
    in_shard: NDArray[np.bool_] = answered.rows // spec.rows_per_shard == shard
    return in_shard & rows[answered.rows % spec.rows_per_shard]


def _copy(source: dict[str, Array], target: dict[str, Array], rows: NDArray[np.bool_]) -> None:
    for name, array in target.items():
        array[rows] = source[name][rows]


def _readable(store: HeatmapStore, at: Snapshot, shard: int, initial: dict[str, Array]) -> dict[str, Array]:
    """Return the arrays of a version, with initial values where a chunk cannot be read.

    `verify` has named the rows of those chunks, and they are reset.
    """
    assert at.group == store.group.name
    return store.arrays.readable(shard, at.slots[shard], initial)
