"""Open the store of a memory for writing, and create it if there is none."""

import math
import os

from bigscl.common.user_error import UserError
from bigscl.config import RankBy, StoreConfig, checked
from bigscl.store import (
    LEASE_PATIENCE_SECONDS,
    Annotations,
    GroupSpec,
    HeatmapStore,
    NotAStore,
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
