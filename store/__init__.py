"""Per-sample scores and heatmaps on disk, read and updated at training speed. numpy in, numpy out."""

from store.annotations import Annotations
from store.backends import StorageOptions
from store.errors import StoreError
from store.heatmap_store import HeatmapStore
from store.prefetch import Prefetcher
from store.residents import Residents, update
from store.snapshots import Snapshot
from store.spec import GroupSpec, Rows, StoreSpec
from store.transport import Alone, Transport
from store.writeback import Writeback

__all__ = [
    "Alone",
    "Annotations",
    "GroupSpec",
    "HeatmapStore",
    "Prefetcher",
    "Residents",
    "Rows",
    "Snapshot",
    "StorageOptions",
    "StoreError",
    "StoreSpec",
    "Transport",
    "Writeback",
    "update",
]
