"""What a commit of the memory adds to a snapshot, and the snapshots that a memory returns to."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bigscl.common.user_error import UserError
from bigscl.selection.selection import Selection
from bigscl.store import HeatmapStore, Snapshot, StoreError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CommittedState:
    """Where a memory stands at a snapshot."""

    selection: Selection
    next_epoch: int
    """The epoch that is being learnt at the snapshot, or comes next."""
    skipped: list[int]
    """Samples of that epoch that could not be read."""
    class_ratios: NDArray[np.float64] | None = None
    """K of each class for the next selection; None: not estimated yet."""


def committed_state(snapshot: Snapshot, num_classes: int) -> CommittedState:
    """Return what a commit has noted in its snapshot; StoreError if it cannot be read.

    Earlier revisions did not note the epoch: then it is the one after the snapshot's.
    """
    attributes = snapshot.attributes
    if not attributes:
        return CommittedState(selection=Selection.none(num_classes), next_epoch=0, skipped=[])
    try:
        selection = Selection.from_json(attributes["selection"])
        next_epoch = int(attributes.get("next_epoch", snapshot.epoch + 1))
        skipped = [int(sample) for sample in attributes["skipped"]]
        ratios = attributes.get("class_ratios")
        class_ratios = None if ratios is None else np.asarray(ratios, np.float64)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise StoreError(
            f"snapshot {snapshot.id}: its selection and skipped samples cannot be read ({error!r})"
        ) from None
    if class_ratios is not None and class_ratios.shape != (num_classes,):
        raise StoreError(
            f"snapshot {snapshot.id}: its class_ratios have shape {list(class_ratios.shape)}, expected "
            f"{[num_classes]}"
        )
    if len(selection.tau) != num_classes:
        raise StoreError(
            f"snapshot {snapshot.id}: its selection has {len(selection.tau)} classes, expected {num_classes}"
        )
    return CommittedState(
        selection=selection, next_epoch=next_epoch, skipped=skipped, class_ratios=class_ratios
    )


def find_snapshot(store: HeatmapStore, state: Mapping[str, Any]) -> int:
    """Return the retained snapshot that a state dict names."""
    if not isinstance(state.get("snapshot"), int) or not isinstance(state.get("run"), str):
        raise UserError(f"state: found {sorted(map(str, state))}, expected what Memory.state_dict returned")
    retained = {snapshot.id: snapshot for snapshot in store.snapshots()}
    number, run = state["snapshot"], state["run"]
    if number not in retained:
        raise StoreError(
            f"{store.backend.url}: no snapshot {number}; retained are {sorted(retained)}. Load the "
            f"checkpoint that was saved last: a commit keeps the snapshot of the newest state dict, "
            f"not older ones."
        )
    if retained[number].run != run:
        raise StoreError(
            f"{store.backend.url}: snapshot {number} was committed by {retained[number].run!r}, the state is "
            f"of {run!r}. Use the store that this checkpoint was saved with."
        )
    return int(number)


def find_empty(store: HeatmapStore) -> int:
    """Return a retained snapshot of the beginning."""
    for snapshot in store.snapshots():
        if is_empty(snapshot):
            return snapshot.id
    raise StoreError(
        f"{store.backend.url}: the beginning is not retained any more, since a state dict names a later "
        f"snapshot. Load that state, or use another store.url."
    )


def is_empty(snapshot: Snapshot) -> bool:
    """Return whether nothing was learnt yet."""
    return max(snapshot.slots, default=-1) < 0
