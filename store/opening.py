"""Making a store, finding out what is at a place, and clearing away what a crash left."""

import contextlib
import json
import time
from collections.abc import Collection
from dataclasses import replace

import zarr

from store import history
from store.annotations import Annotations
from store.arrays import ArrayGroup
from store.backends import Backend
from store.compact import check_top
from store.errors import AlreadyExists, IndexMismatch, NewerFormat, NotAStore
from store.lease import KEY as LEASE_KEY
from store.lease import Lease
from store.snapshots import FOLDER as SNAPSHOTS
from store.snapshots import Snapshot, SnapshotLog
from store.spec import FORMAT, GroupSpec, StoreSpec

ROOT = "zarr.json"
FIRST_GROUP = "arrays-000"


def read_spec(backend: Backend) -> StoreSpec:
    """What the store at this place is; or an error that says what is there instead."""
    interrupted = NotAStore(f"{backend.url}: the store's creation was interrupted. Create it again.")
    names = backend.names("")
    if not names:
        raise NotAStore(f"{backend.url}: nothing there. Create a store first, or check the path.")
    if names == [LEASE_KEY]:
        raise interrupted
    data = backend.read(ROOT)
    if data is None:
        raise NotAStore(f"{backend.url}: not a heatmap store: found {', '.join(names[:3])}. Check the path.")
    described = json.loads(data).get("attributes", {}).get("bigscl")
    if described is None:
        raise NotAStore(f"{backend.url}: a Zarr hierarchy, but not a heatmap store. Check the path.")
    if described["format"] > FORMAT:
        raise NewerFormat(
            f"{backend.url}: written in format {described['format']}, this version reads up to {FORMAT}. "
            f"Upgrade bigscl."
        )
    if not SnapshotLog(backend).ids():
        raise interrupted
    return StoreSpec.from_json(described)


def check_fingerprint(backend: Backend, spec: StoreSpec, annotations: Annotations) -> None:
    """Refuse to open a store against data it was not made for."""
    if spec.fingerprint != annotations.fingerprint:
        raise IndexMismatch(
            f"{backend.url}: made for data {spec.fingerprint[:12]}, these shards are "
            f"{annotations.fingerprint[:12]}. Use another store path, or the shards this store was made from."
        )


def create_store(
    backend: Backend,
    annotations: Annotations,
    heatmap_size: int,
    group: GroupSpec,
    tracked: int | Collection[int],
) -> None:
    """Make an empty store; it exists from the moment its snapshot 0 does."""
    if group.top is not None:
        check_top(annotations, group.top)
    spec = spec_for(annotations, heatmap_size, tracked)
    lease = _claim(backend)
    try:
        zarr.create_group(backend.zarr_store(read_only=False), attributes={"bigscl": spec.to_json()})
        ArrayGroup.create(backend, spec, group)
        history.create_history(backend, spec)
        nothing = (-1,) * spec.num_shards
        SnapshotLog(backend).create(
            Snapshot(
                id=0, parent=None, time=time.time(), run="", epoch=-1, step=0, group=group.name, slots=nothing
            )
        )
    finally:
        lease.release()


def spec_for(annotations: Annotations, heatmap_size: int, tracked: int | Collection[int]) -> StoreSpec:
    """The spec of a store for this data; `tracked` is a number of samples, or the samples themselves."""
    if heatmap_size < 1:
        raise ValueError(f"heatmap_size: {heatmap_size}, expected at least 1")
    spec = StoreSpec(
        fingerprint=annotations.fingerprint,
        num_classes=annotations.num_classes,
        heatmap_size=heatmap_size,
        rows_per_shard=annotations.rows_per_shard,
        shard_sizes=tuple(annotations.shard_sizes.tolist()),
    )
    chosen = history.default_tracked(spec, tracked) if isinstance(tracked, int) else tuple(tracked)
    return replace(spec, tracked=chosen)


def _claim(backend: Backend) -> Lease:
    """The lease of an empty place, cleared of what an interrupted creation left."""
    with contextlib.suppress(NotAStore):
        read_spec(backend)
        raise AlreadyExists(f"{backend.url}: there is a store already. Open it, or choose another path.")
    ours = (SNAPSHOTS, history.FOLDER, FIRST_GROUP)
    names = set(backend.names(""))
    root = backend.read(ROOT)
    foreign = names - {*ours, ROOT, LEASE_KEY}
    if foreign or (root is not None and "bigscl" not in json.loads(root).get("attributes", {})):
        raise AlreadyExists(
            f"{backend.url}: not empty: found {', '.join(sorted(names)[:3])}. Choose an empty place."
        )
    lease = Lease.acquire(backend, "creation")
    backend.delete(ROOT)
    for name in ours:
        backend.delete_tree(name)
    return lease


def prepare_writing(backend: Backend, snapshot: int | None) -> Snapshot:
    """Remove what a crash left, go to the snapshot asked for (or stay at the newest), and give it back."""
    backend.sweep()
    log = SnapshotLog(backend)
    current = log.read(log.ids()[-1]) if snapshot is None else log.roll_back(snapshot)
    delete_unnamed_groups(backend, log)
    return current


def delete_unnamed_groups(backend: Backend, log: SnapshotLog) -> None:
    """Delete the array groups that no retained snapshot names."""
    named = {snapshot.group for snapshot in log.read_all().values()}
    for name in backend.names(""):
        if name.startswith("arrays-") and name not in named:
            backend.delete_tree(name)
