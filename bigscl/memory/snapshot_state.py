"""Attributes that the memory adds to a snapshot of the store, and the snapshots that a memory returns to."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bigscl.common.user_error import UserError
from bigscl.selection.thresholds import Thresholds
from bigscl.selection.trust import Trust
from bigscl.store import HeatmapStore, Snapshot, StoreError

REQUIRED = ("selection", "next_epoch", "skipped")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SnapshotState:
    """State of the memory at a snapshot. The store itself reads the answers of people and the momentum."""

    selection: Thresholds
    """The expected positives of `next_epoch`."""
    epoch: int = -1
    """The epoch that has updated rows last; -1 before the first."""
    next_epoch: int = 0
    """The epoch that is being trained at the snapshot, or comes next."""
    skipped: list[int]
    """Samples of that epoch that could not be read."""
    momentum: float | None = None
    """Momentum of the moving averages; None before the first commit."""
    class_ratios: NDArray[np.float64] | None = None
    """K of each class for the next selection; None: not estimated yet."""
    trust: Trust | None = None
    """How far to trust the selection; None without hidden labels."""

    @classmethod
    def of(cls, snapshot: Snapshot, num_classes: int) -> "SnapshotState":
        """Return the state that a commit has written; StoreError if an attribute is missing or wrong."""
        attributes = snapshot.attributes
        if not any(name in attributes for name in REQUIRED):
            return cls(selection=Thresholds.none(num_classes), epoch=snapshot.epoch, skipped=[])
        if missing := [name for name in REQUIRED if name not in attributes]:
            raise StoreError(f"snapshot {snapshot.id}: has no attribute {', '.join(missing)}")
        try:
            ratios, momentum = attributes.get("class_ratios"), attributes.get("momentum")
            trust = attributes.get("trust")
            state = cls(
                selection=Thresholds.from_json(attributes["selection"]),
                epoch=snapshot.epoch,
                next_epoch=int(attributes["next_epoch"]),
                skipped=[int(sample) for sample in attributes["skipped"]],
                momentum=None if momentum is None else float(momentum),
                class_ratios=None if ratios is None else np.asarray(ratios, np.float64),
                trust=None if trust is None else Trust.from_json(trust),
            )
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            reason = str(error) if isinstance(error, UserError) else repr(error)
            raise StoreError(f"snapshot {snapshot.id}: its attributes cannot be read ({reason})") from None
        for name, values in (("score", state.selection.score), ("class_ratios", state.class_ratios)):
            if values is not None and values.shape != (num_classes,):
                raise StoreError(
                    f"snapshot {snapshot.id}: its selection has {values.size} values of {name}, expected "
                    f"{num_classes}, one per class"
                )
        return state

    def attributes(self) -> dict[str, Any]:
        """Return the attributes to commit; epoch and answers are written by the store."""
        optional: dict[str, Any] = {}
        if self.class_ratios is not None:
            optional["class_ratios"] = self.class_ratios.tolist()
        if self.trust is not None:
            optional["trust"] = self.trust.to_json()
        return {
            "selection": self.selection.to_json(),
            "next_epoch": self.next_epoch,
            "skipped": self.skipped,
            "momentum": self.momentum,
            **optional,
        }

    @property
    def within_epoch(self) -> bool:
        """Whether some rows were updated after the last selection."""
        return self.next_epoch == self.epoch


def find_snapshot(store: HeatmapStore, state: Mapping[str, Any]) -> int:
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
    for snapshot in store.snapshots():
        if is_empty(snapshot):
            return snapshot.id
    raise StoreError(
        f"{store.backend.url}: the beginning is not retained any more, since a state dict names a later "
        f"snapshot. Load that state, or use another store.url."
    )


def is_empty(snapshot: Snapshot) -> bool:
    return max(snapshot.slots, default=-1) < 0
