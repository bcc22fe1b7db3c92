"""Per-sample scores and heatmaps on disk, read and updated at training speed. numpy in, numpy out."""

from bigscl.store.annotations import Annotations
from bigscl.store.backends import StorageOptions
from bigscl.store.errors import StoreError
from bigscl.store.heatmap_store import HeatmapStore
from bigscl.store.prefetch import Prefetcher
from bigscl.store.residents import Residents, update
from bigscl.store.snapshots import Snapshot
from bigscl.store.spec import GroupSpec, Rows, StoreSpec
from bigscl.store.transport import SingleProcess, Transport
from bigscl.store.writeback import Writeback

__all__ = [
    "Annotations",
    "GroupSpec",
    "HeatmapStore",
    "Prefetcher",
    "Residents",
    "Rows",
    "SingleProcess",
    "Snapshot",
    "StorageOptions",
    "StoreError",
    "StoreSpec",
    "Transport",
    "Writeback",
    "update",
]
