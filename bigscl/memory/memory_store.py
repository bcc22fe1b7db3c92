"""The store of a memory: opened for writing, created if there is none; and the state in its snapshots."""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bigscl.common.user_error import UserError
from bigscl.config import RankBy, StoreConfig, checked
from bigscl.selection.thresholds import Thresholds
from bigscl.selection.trust import Trust
from bigscl.store import (
    LEASE_PATIENCE_SECONDS,
    Annotations,
    GroupSpec,
    HeatmapStore,
    NotAStore,
    Snapshot,
    StoreError,
    Transport,
    is_dead,
    on_rank_zero,
    open_backend,
    read_holder,
    read_spec,
)


def open_store(
    settings: StoreConfig,
    annotations: Annotations,
    *,
    heatmap_size: int,
    ranks: Transport,
    run: str,
    snapshot: int | None,
    ranking: bool = False,
) -> HeatmapStore:
    """Open the store for writing at a snapshot (default: the newest), on all ranks; create it if new."""
    url = _writable_url(settings, ranks, run)
    if not snapshot:
        on_rank_zero(ranks, lambda: _create(url, settings, annotations, heatmap_size, ranking))
    return HeatmapStore.open(
        url,
        annotations=annotations,
        mode="w",
        snapshot=snapshot,
        run=run,
        transport=ranks,
        options=settings.options(),
    )


def first_group(settings: StoreConfig, *, ranking: bool) -> GroupSpec:
    """Return the layout of a new store; `ranking` if expected positives are ranked spatially."""
    return GroupSpec(
        layout=settings.warmup_heatmaps,
        slots=settings.slots,
        codec=settings.codec,
        checksum=settings.checksum,
        debiased=settings.ema == "debiased",
        spatial_score=ranking,
    )


def _create(
    url: str, settings: StoreConfig, annotations: Annotations, heatmap_size: int, ranking: bool
) -> None:
    backend = open_backend(url, settings.options())
    if settings.kind == "ram":
        backend.delete_tree("")  # what an earlier start of this run left, when it was killed
    try:
        read_spec(backend)
    except NotAStore:
        HeatmapStore.create(
            url,
            annotations,
            heatmap_size=heatmap_size,
            group=first_group(settings, ranking=ranking),
            history_samples=settings.history_samples,
            top_scores=settings.kept_scores(annotations.num_classes),
            options=settings.options(),
        )


def _writable_url(settings: StoreConfig, ranks: Transport, run: str) -> str:
    """Return where the store lives: on disk, in this process, or in memory that the ranks share."""
    if settings.kind == "disk":
        if settings.url is None:
            raise UserError("store.url: missing. Give the store a path, or choose kind memory.")
        return settings.url
    if settings.kind == "none":
        raise UserError("store.kind: none, expected disk or memory: a memory needs a store")
    if ranks.world_size == 1:
        return f"memory://{run}"
    if int(os.environ.get("LOCAL_WORLD_SIZE", ranks.world_size)) != ranks.world_size:
        raise UserError("store.kind: ram is for one machine; ranks on several need store.kind: disk")
    return _shared_url(run)


def _shared_url(run: str) -> str:
    return f"/dev/shm/bigscl-{run}"


def free_shared_memory(run: str) -> None:
    """Delete what a killed run on several ranks has left in RAM; nothing if it is still alive."""
    backend = open_backend(_shared_url(run))
    holder = read_holder(backend)
    if holder is not None and is_dead(backend, holder, LEASE_PATIENCE_SECONDS):
        backend.delete_tree("")


# Arguments of a memory


def check_store(store: HeatmapStore, settings: StoreConfig, heatmap_size: int, rank_by: RankBy) -> None:
    """Refuse a store that was created for other heatmaps, other scores or another ranking."""
    if store.spec.heatmap_size != heatmap_size:
        raise StoreError(
            f"{store.backend.url}: has heatmaps of side {store.spec.heatmap_size}, found "
            f"heatmap_size {heatmap_size}. Use another store.url, or the size that it was created with."
        )
    if store.group.spatial_score != (rank_by == "spatial"):
        kept = "spatial" if store.group.spatial_score else "score"
        raise StoreError(
            f"{store.backend.url}: was created to rank by {kept}, found {rank_by}. Use "
            f"selection.by: {kept}, or another store.url."
        )
    kept_scores, num_classes = store.spec.top_scores, store.spec.num_classes
    if kept_scores != settings.kept_scores(num_classes):
        found = settings.kept_scores(num_classes) or "all"
        raise StoreError(
            f"{store.backend.url}: was created with the scores of {kept_scores or 'all'} classes per image, "
            f"found {found}. Use store.top_scores: {kept_scores or num_classes}, or another store.url."
        )
    if kept_scores is not None and (settings.top or 0) > kept_scores:
        raise UserError(
            f"store.top: {settings.top}, expected at most {kept_scores}, the classes whose scores are kept. "
            f"Lower it, or give a new store more store.top_scores."
        )


def check_arguments(annotations: object, settings: object, positives_per_image: float | None) -> None:
    if not isinstance(annotations, Annotations):
        found = type(annotations).__name__
        raise UserError(f"annotations: found {found}, expected Annotations. Pass index.annotations().")
    if not isinstance(settings, StoreConfig):
        raise UserError(f"settings: found {type(settings).__name__}, expected bigscl.StoreConfig(url=...)")
    if positives_per_image is None:
        return
    if not isinstance(positives_per_image, float | int) or not 0 < positives_per_image < math.inf:
        raise UserError(f"positives_per_image: found {positives_per_image}, expected a number above 0")


def checked_settings(settings: StoreConfig, drops_snapshots: bool) -> StoreConfig:
    """Return the settings; UserError if they do not fit a memory that a user opens."""
    settings = checked(settings, "Memory")
    if settings.top is not None and settings.compact_after is None:
        raise UserError("compact_after: missing. Say after how many epochs the top classes are chosen.")
    if drops_snapshots and settings.slots < 3:
        raise UserError(
            f"slots: {settings.slots}, expected at least 3: the newest commit, the one that your checkpoint "
            f"names, and one to write to"
        )
    return settings


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
