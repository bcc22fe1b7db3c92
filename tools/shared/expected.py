"""Expected positives of a snapshot: cuts that belong to its scores, even in the middle of an epoch."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bigscl.memory.snapshot_state import SnapshotState
from bigscl.selection.ranking import Cuts, named_first, rank
from bigscl.store import Array, HeatmapStore, SingleProcess
from bigscl.tools.shared.shard_passes import ranked_by_shard


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Expected:
    """A cut per class that belongs to the scores of one snapshot, and where it comes from."""

    tau: NDArray[np.float16]
    last_id: NDArray[np.int64]
    recomputed: bool
    """Whether the cut was computed now from the snapshot's scores."""
    note: str
    """Where the cut comes from, for people."""

    def of(self, scores: Array, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return `[n,L]`: of which classes each sample is an expected positive, by `Rows.ranked_by`.

        The same cut as `bigscl.selection.selection`, without torch, which takes seconds to import.
        """
        # The bits of scores in 0 to 1 have the order of the scores; numpy compares float16 23 times slower.
        bits, tau = np.ascontiguousarray(scores).view(np.uint16), self.tau.view(np.uint16)
        expected: NDArray[np.bool_] = bits > tau
        on_the_cut = bits == tau
        if on_the_cut.any():
            expected |= on_the_cut & (ids[:, None] <= self.last_id)
        return expected

    @property
    def any(self) -> bool:
        """Whether there are any expected positives."""
        return bool((self.last_id >= 0).any())

    def same_as(self, other: "Expected") -> bool:
        """Return whether both are the same cut."""
        return np.array_equal(self.tau, other.tau) and np.array_equal(self.last_id, other.last_id)

    def to_json(self) -> dict[str, Any]:
        """Return what a command prints about it with --json."""
        return {"recomputed": self.recomputed, "note": self.note}


def expected_at(store: HeatmapStore) -> Expected:
    """Return the expected positives of the store's snapshot.

    At the end of an epoch they are those that the run selected. A snapshot in the middle of an epoch has the
    cuts of the previous epoch, which do not belong to the rows updated since: then the same number of
    positives is selected from the current scores of all samples.
    """
    snapshot = store.snapshot
    state = SnapshotState.of(snapshot, store.spec.num_classes)
    cuts, recomputed = state.selection, False
    if not cuts.any:
        note = f"no expected positives were selected by snapshot {snapshot.id}, epoch {snapshot.epoch}"
    elif state.within_epoch:
        cuts, recomputed = _select_again(store, cuts), True
        note = (
            f"snapshot {snapshot.id} was saved in the middle of epoch {snapshot.epoch}: expected positives "
            f"were selected from its scores, since the run's last cuts are of the end of epoch "
            f"{snapshot.epoch - 1}"
        )
    else:
        note = f"expected positives as selected at the end of epoch {snapshot.epoch}"
    return Expected(tau=cuts.tau, last_id=cuts.last_id, recomputed=recomputed, note=note)


def _select_again(store: HeatmapStore, cuts: Cuts) -> Cuts:
    """Return cuts of as many positives, by the snapshot's own scores."""
    assert cuts.num_expected is not None
    chunks = ranked_by_shard("selecting", store)
    if cuts.named_first:
        assert store.annotations is not None
        chunks = named_first(chunks, store.annotations)
    return rank(chunks, cuts.num_expected, SingleProcess())


def count_by_class(mask: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return how many samples each class has in `[n,L]`; fast if there are few."""
    return np.bincount(np.flatnonzero(mask) % mask.shape[1], minlength=mask.shape[1])
