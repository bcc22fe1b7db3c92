"""Per-sample scores and heatmaps on disk, read and updated at training speed. numpy in, numpy out.

These names are the public surface of the store. Modules outside this folder import nothing else from it.
"""

from bigscl.store.backends.backend import Backend, LocalBackend, check_creates_once, open_backend
from bigscl.store.backends.schemes import SCHEMES, STORE_SCHEMES, StorageOptions
from bigscl.store.backends.streams import ObjectReader, list_objects
from bigscl.store.create import read_spec, spec_for
from bigscl.store.errors import BadFile, ChunkCorrupt, IndexMismatch, NotAStore, StoreError
from bigscl.store.format.annotations import (
    Annotations,
    Answered,
    Ragged,
    answered_shard,
    label_counts,
    with_answers,
)
from bigscl.store.format.array_types import class_dtype
from bigscl.store.format.fields import SEAL, seal, seal_fault
from bigscl.store.format.history import history_bytes, history_faults
from bigscl.store.format.layout import (
    PACKED_NAME,
    array_plans,
    choose_classes,
    initial_shard,
    shard_bytes,
    stored_bytes,
    stored_plans,
)
from bigscl.store.format.spec import (
    FORMAT,
    MAX_COUNT,
    NOT_KEPT,
    Array,
    Codec,
    GroupSpec,
    KeptScores,
    Ranked,
    Rows,
    StoreSpec,
)
from bigscl.store.heatmap_store import HeatmapStore
from bigscl.store.lease import (
    LEASE_PATIENCE_SECONDS,
    Holder,
    break_lease,
    is_dead,
    process_start,
    read_holder,
)
from bigscl.store.reader import InitialValues, Problem, bytes_by_array, verify
from bigscl.store.shard_cache import ShardCache, update
from bigscl.store.snapshots import Snapshot, SnapshotLog, Version, by_version, snapshot_bytes, versions_of
from bigscl.store.threads import PASS_THREADS, in_order
from bigscl.store.transfers import Prefetcher, Writeback
from bigscl.store.transport import SingleProcess, Transport, on_rank_zero
