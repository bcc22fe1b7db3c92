"""Expected positives of a snapshot: cuts that belong to its scores, even in the middle of an epoch."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bigscl.common.user_error import UserError
from bigscl.selection.ranking import named_first, rank
from bigscl.store import Array, HeatmapStore, SingleProcess, Snapshot
from bigscl.tools.opening import has_selection
from bigscl.tools.passes import ranked_by_shard


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
    if not has_selection(snapshot):
        num_classes = store.spec.num_classes
        return Expected(
            tau=np.ones(num_classes, np.float16),
            last_id=np.full(num_classes, -1),
            recomputed=False,
            note=f"no expected positives were selected by snapshot {snapshot.id}, epoch {snapshot.epoch}",
        )
    if in_mid_epoch(snapshot):
        return _recomputed(store)
    note = f"expected positives as selected at the end of epoch {snapshot.epoch}"
    cuts = snapshot.attributes["selection"]
    tau, last_id = np.asarray(cuts["tau"], np.float16), np.asarray(cuts["last_id"], np.int64)
    return Expected(tau=tau, last_id=last_id, recomputed=False, note=note)


def in_mid_epoch(snapshot: Snapshot) -> bool:
    """Return whether some rows were updated after the run last selected."""
    return bool(snapshot.attributes.get("next_epoch") == snapshot.epoch)


def _recomputed(store: HeatmapStore) -> Expected:
    snapshot = store.snapshot
    known = snapshot.attributes["selection"].get("num_expected")
    num_expected = _counted(store) if known is None else np.asarray(known, np.int64)
    chunks = ranked_by_shard("selecting", store)
    if snapshot.attributes["selection"].get("named_first"):
        assert store.annotations is not None
        chunks = named_first(chunks, store.annotations)
    cuts = rank(chunks, num_expected, SingleProcess())
    note = (
        f"snapshot {snapshot.id} was saved in the middle of epoch {snapshot.epoch}: expected positives were "
        f"selected from its scores, since the run's last cuts are of the end of epoch {snapshot.epoch - 1}"
    )
    return Expected(tau=cuts.tau, last_id=cuts.last_id, recomputed=True, note=note)


def _counted(store: HeatmapStore) -> NDArray[np.int64]:
    """Return how many positives a run expects of each class, counted at the end of an epoch.

    For snapshots of earlier revisions, which do not record it.
    """
    ends = [one for one in store.snapshots() if has_selection(one) and not in_mid_epoch(one)]
    if not ends:
        raise UserError(
            f"{store.backend.url}: snapshot {store.snapshot.id} was saved in the middle of epoch "
            f"{store.snapshot.epoch} and does not say how many positives its run expects, and there is no "
            f"snapshot of the end of an epoch to count them in. Run this again after the end of an epoch."
        )
    end = HeatmapStore(store.backend, store.spec, ends[-1], store.annotations)
    expected = expected_at(end)
    counts = np.zeros(store.spec.num_classes, np.int64)
    for ids, values in ranked_by_shard("counting expected positives", end):
        counts += count_by_class(expected.of(values, ids))
    return counts


def count_by_class(mask: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return how many samples each class has in `[n,L]`; fast if there are few."""
    return np.bincount(np.flatnonzero(mask) % mask.shape[1], minlength=mask.shape[1])
