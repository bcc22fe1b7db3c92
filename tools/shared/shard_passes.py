"""Passes over the shards of a store, in threads and with progress; the expected positives of a snapshot."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from bigscl.memory.snapshot_state import SnapshotState
from bigscl.selection.ranking import given_first, select
from bigscl.selection.thresholds import Thresholds
from bigscl.store import PASS_THREADS, Array, HeatmapStore, Ranked, SingleProcess, SnapshotLog, in_order
from bigscl.tools.shared.terminal import progress

Result = TypeVar("Result")


def pass_over(
    title: str,
    shards: Sequence[int],
    work: Callable[[int], Result],
    stores: Sequence[HeatmapStore] = (),
    threads: int = PASS_THREADS,
) -> Iterator[tuple[int, Result]]:
    """Yield (shard, `work(shard)`) in order, from threads; SnapshotMissing at the end if one was dropped."""
    with progress(title, len(shards), "shards") as advance:
        for shard, result in zip(shards, in_order(work, shards, threads), strict=True):
            yield shard, result
            advance(1, f"shard {shard}")
    for store in stores:
        check_retained(store)


def check_retained(store: HeatmapStore) -> None:
    """Raise SnapshotMissing if the snapshot was dropped: what was read may belong to a newer version."""
    SnapshotLog(store.backend).read(store.snapshot.id)


def scores_by_shard(title: str, store: HeatmapStore) -> Iterator[tuple[NDArray[np.int64], Array]]:
    """Yield (ids, scores) of all samples of each shard, read ahead by threads."""
    return _read_ahead(title, store, store.scores_by_shard)


def ranked_by_shard(title: str, store: HeatmapStore) -> Iterator[tuple[NDArray[np.int64], Ranked]]:
    """Yield (ids, what expected positives are ranked by) of all samples of each shard likewise."""
    return _read_ahead(title, store, store.ranked_by_shard)


def _read_ahead(
    title: str, store: HeatmapStore, read: Callable[[Sequence[int]], Iterator[Result]]
) -> Iterator[Result]:
    shards = range(store.spec.num_shards)
    return (result for _, result in pass_over(title, shards, lambda shard: next(read([shard])), [store]))


# Expected positives


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SnapshotThresholds(Thresholds):
    """Thresholds that belong to the scores of one snapshot, and where they come from."""

    recomputed: bool
    """Whether they were computed now from the snapshot's scores."""
    note: str
    """Where they come from, for people."""

    def facts(self) -> dict[str, Any]:
        return {"recomputed": self.recomputed, "note": self.note}


def expected_at(store: HeatmapStore) -> SnapshotThresholds:
    """Return the expected positives of the store's snapshot.

    At the end of an epoch they are those that the run selected. A snapshot in the middle of an epoch has the
    thresholds of the previous epoch, which do not belong to the rows updated since: then the same number of
    positives is selected from the current scores of all samples.
    """
    snapshot = store.snapshot
    state = SnapshotState.of(snapshot, store.spec.num_classes)
    thresholds, recomputed = state.selection, False
    if not thresholds.any:
        note = f"no expected positives were selected by snapshot {snapshot.id}, epoch {snapshot.epoch + 1}"
    elif state.within_epoch:
        thresholds, recomputed = _select_again(store, thresholds), True
        note = (
            f"snapshot {snapshot.id} was saved in the middle of epoch {snapshot.epoch + 1}: expected "
            f"positives were selected from its scores, since the run's last thresholds are of the end of "
            f"epoch {snapshot.epoch}"
        )
    else:
        note = f"expected positives as selected at the end of epoch {snapshot.epoch + 1}"
    return SnapshotThresholds(
        score=thresholds.score, tie_id=thresholds.tie_id, recomputed=recomputed, note=note
    )


def _select_again(store: HeatmapStore, thresholds: Thresholds) -> Thresholds:
    """Return thresholds of as many positives, by the snapshot's own scores."""
    assert thresholds.num_expected is not None
    chunks = ranked_by_shard("selecting", store)
    if thresholds.given_first:
        assert store.annotations is not None
        chunks = given_first(chunks, store.annotations)
    return select(chunks, thresholds.num_expected, SingleProcess())


def count_by_class(mask: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return how many samples each class has in `[n,L]`; fast if there are few."""
    return np.bincount(np.flatnonzero(mask) % mask.shape[1], minlength=mask.shape[1])


# float16

_AS_FLOAT32 = np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float32)


def to_float32(halves: Array) -> NDArray[np.float32]:
    """Return `halves.astype(np.float32)`, from a table of all 65,536 values: 2 ms per million, not 10."""
    return np.take(_AS_FLOAT32, np.ascontiguousarray(halves).view(np.uint16))
