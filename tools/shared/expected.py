"""Expected positives of a snapshot: thresholds that belong to its scores, even in the middle of an epoch."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bigscl.memory.snapshot_state import SnapshotState
from bigscl.selection.ranking import given_first, select
from bigscl.selection.thresholds import Thresholds
from bigscl.store import HeatmapStore, SingleProcess
from bigscl.tools.shared.shard_passes import ranked_by_shard


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SnapshotThresholds(Thresholds):
    """Thresholds that belong to the scores of one snapshot, and where they come from."""

    recomputed: bool
    """Whether they were computed now from the snapshot's scores."""
    note: str
    """Where they come from, for people."""

    def facts(self) -> dict[str, Any]:
        """Return what a command prints about them with --json."""
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
        note = f"no expected positives were selected by snapshot {snapshot.id}, epoch {snapshot.epoch}"
    elif state.within_epoch:
        thresholds, recomputed = _select_again(store, thresholds), True
        note = (
            f"snapshot {snapshot.id} was saved in the middle of epoch {snapshot.epoch}: expected positives "
            f"were selected from its scores, since the run's last thresholds are of the end of epoch "
            f"{snapshot.epoch - 1}"
        )
    else:
        note = f"expected positives as selected at the end of epoch {snapshot.epoch}"
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
