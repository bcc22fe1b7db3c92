"""Open the store of a memory for writing, and create it if there is none."""

import os
from typing import TypedDict

from bigscl.config import StoreConfig
from bigscl.store import (
    Annotations,
    HeatmapStore,
    NotAStore,
    Transport,
    on_rank_zero,
    open_backend,
    read_spec,
)
from bigscl.user_error import UserError


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
    """Open the store for writing at a snapshot, by default the newest; create it unless a later one is named.

    All ranks call it together. Newer snapshots than the one asked for are dropped.
    """
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


class KeptArrays(TypedDict):
    """Which optional arrays a new store has, and whether its averages forget their start at once."""

    counts: bool
    visits: bool
    debiased: bool
    ranking: bool


def kept_arrays(settings: StoreConfig, *, ranking: bool) -> KeptArrays:
    """Return the optional arrays of a new store; `ranking` if it ranks spatially."""
    return KeptArrays(counts=True, visits=True, debiased=settings.ema == "debiased", ranking=ranking)


def _create(
    url: str, settings: StoreConfig, annotations: Annotations, heatmap_size: int, ranking: bool
) -> None:
    backend = open_backend(url, settings.options())
    if settings.kind == "memory":
        backend.delete_tree("")  # what an earlier start of this run left, when it was killed
    try:
        read_spec(backend)
    except NotAStore:
        HeatmapStore.create(
            url,
            annotations,
            heatmap_size=heatmap_size,
            layout=settings.warmup_heatmaps,
            slots=settings.slots,
            codec=settings.codec,
            checksum=settings.checksum,
            tracked=settings.tracked,
            options=settings.options(),
            **kept_arrays(settings, ranking=ranking),
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
        raise UserError("store.kind: memory is for one machine; ranks on several need store.kind: disk")
    return f"/dev/shm/bigscl-{run}"
