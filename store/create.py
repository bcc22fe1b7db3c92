"""Creating a store, finding out what is at a place, and deleting what a crash left."""

import contextlib
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

import zarr

from bigscl.common.user_error import UserError
from bigscl.store.backends.backend import Backend
from bigscl.store.errors import AlreadyExists, BadFile, IndexMismatch, NotAStore, OtherFormat, StoreError
from bigscl.store.format import history
from bigscl.store.format.annotations import Annotations
from bigscl.store.format.fields import read_object, seal
from bigscl.store.format.layout import check_top
from bigscl.store.format.spec import FEATURES, FORMAT, SPARSE_SCORES, GroupSpec, StoreSpec
from bigscl.store.format.zarr_group import describe_group, described
from bigscl.store.lease import KEY as LEASE_KEY
from bigscl.store.lease import Lease, is_beat
from bigscl.store.snapshots import FOLDER as SNAPSHOTS
from bigscl.store.snapshots import Check, Snapshot, SnapshotLog, Version, version_of, versions_of

ROOT = "zarr.json"
PARTIAL = ".partial"
"""How names of files end that are being written."""
FIRST_GROUP = GroupSpec()
CREATED = (SNAPSHOTS, history.FOLDER, FIRST_GROUP.name)
"""Folders that creation makes next to the root file."""
REMEDY = "Restore it from a copy (complete the copy, if one was interrupted), or use another place."


def read_spec(backend: Backend, *, listing: bool = True) -> StoreSpec:
    """Return the spec of the store at this address, or raise an error that says what is there instead.

    Without `listing`, no folder is listed if the root file is there: on a shared file system a listing may be
    old, and others have found the store complete.
    """
    if not listing and (root := backend.read(ROOT)) is not None:
        return _parse_spec(backend, root)
    names = _own_names(backend)
    if not names:
        raise NotAStore(f"{backend.url}: nothing there. Create a store first, or check the path.")
    data = backend.read(ROOT)
    has_snapshots = bool(SnapshotLog(backend).ids())
    if data is None and has_snapshots:
        raise BadFile(f"{backend.url}/{ROOT}: is missing, but the store has snapshots. {REMEDY}")
    if data is None and set(names) <= {LEASE_KEY, *CREATED}:
        raise _interrupted(backend)
    if data is None:
        raise NotAStore(f"{backend.url}: not a heatmap store: found {', '.join(names[:3])}. Check the path.")
    spec = _parse_spec(backend, data)
    if not has_snapshots:
        raise _interrupted(backend)
    return spec


def _interrupted(backend: Backend) -> StoreError:
    """The error for a store that lacks what its creation writes last."""
    if (chunk := first_chunk(backend)) is None:
        return NotAStore(f"{backend.url}: the store's creation was interrupted. Create it again.")
    return BadFile(
        f"{backend.url}: holds chunks ({chunk}) but no snapshot, as after an unfinished copy. {REMEDY}"
    )


def _parse_spec(backend: Backend, data: bytes) -> StoreSpec:
    place = f"{backend.url}/{ROOT}"
    attributes = read_object(data, place, REMEDY, sealed=False).get("attributes", {})
    if not isinstance(attributes, dict) or "bigscl" not in attributes:
        raise NotAStore(f"{backend.url}: a Zarr hierarchy, but not a heatmap store. Check the path.")
    path = ("attributes", "bigscl")
    version = read_object(data, place, REMEDY, *path, sealed=False).get("format")
    if type(version) is not int:
        raise BadFile(f"{place}: format: found {version!r:.40}, expected a whole number. {REMEDY}")
    if version != FORMAT:
        remedy = "Upgrade bigscl" if version > FORMAT else "Use another place for a new store"
        raise OtherFormat(
            f"{backend.url}: written in format {version}, this version reads format {FORMAT}. {remedy}."
        )
    described = read_object(data, place, REMEDY, *path)
    features = described.get("features", {})
    if not isinstance(features, dict):
        raise BadFile(f"{place}: features: found {features!r:.40}, expected a JSON object. {REMEDY}")
    unknown = sorted(name for name, value in features.items() if not _is_known(name, value))
    if unknown:
        raise OtherFormat(
            f"{backend.url}: uses {', '.join(unknown)}, which this version does not read. Upgrade bigscl."
        )
    if not FEATURES.keys() <= features.keys():
        raise OtherFormat(
            f"{backend.url}: written by a revision before version 0.2.0. Use another place for a new store."
        )
    return StoreSpec.from_json(described, place, REMEDY)


def _is_known(name: str, value: Any) -> bool:
    if name == SPARSE_SCORES:
        return type(value) is int and value > 0
    return name in FEATURES and bool(FEATURES[name] == value)


def first_chunk(backend: Backend) -> str | None:
    """The key of some chunk that lies here, whatever else is missing."""
    return next((key for key, _ in backend.sizes("") if version_of(key) is not None), None)


def check_fingerprint(backend: Backend, spec: StoreSpec, annotations: Annotations) -> None:
    if spec.fingerprint != annotations.fingerprint:
        raise IndexMismatch(
            f"{backend.url}: made for data {spec.fingerprint[:12]}, these shards are "
            f"{annotations.fingerprint[:12]}. Use another store path, or the shards this store was made from."
        )


def create_store(backend: Backend, annotations: Annotations, spec: StoreSpec, group: GroupSpec) -> None:
    """Make an empty store; it exists from the moment its snapshot 0 does."""
    group = replace(group, name=FIRST_GROUP.name, generations=FIRST_GROUP.generations)
    if group.top is not None:
        check_top(annotations, group.top)
    if spec.top_scores is not None:
        check_top(annotations, spec.top_scores, "top_scores")
        if group.layout == "dense" or (group.top or 0) > spec.top_scores:
            maps = "all" if group.top is None else group.top
            raise UserError(
                f"top_scores: {spec.top_scores}, but heatmaps of {maps} classes are kept. Expected no more "
                f"classes with a heatmap than with a score."
            )
    lease = _claim(backend)
    try:
        files = described(lambda scratch: _describe(scratch, spec, group))
        leftovers = present(backend, files)
        lease.check()
        write_metadata(backend, files, leftovers)
        nothing = (-1,) * spec.num_shards
        first = Snapshot(
            id=0, parent=None, time=time.time(), run="", epoch=-1, step=0, group=group.name, slots=nothing
        )
        SnapshotLog(backend).publish(first, lease.check)
    finally:
        lease.release()


def _describe(scratch: Backend, spec: StoreSpec, group: GroupSpec) -> None:
    zarr.create_group(scratch.zarr_store(read_only=False), attributes={"bigscl": seal(spec.to_json())})
    describe_group(scratch, spec, group)
    history.describe_history(scratch, spec)


def present(backend: Backend, keys: Iterable[str]) -> dict[str, bytes]:
    found = {key: backend.read(key) for key in keys}
    return {key: data for key, data in found.items() if data is not None}


def write_metadata(backend: Backend, files: Mapping[str, bytes], leftovers: Mapping[str, bytes]) -> None:
    """Write files that are not there, and put them in place of leftovers of an interrupted creation.

    Nothing is deleted, and a file that is neither ours nor the leftover that was seen is another creator's: a
    creator that was frozen and thawed can change nothing of what its successor made.
    """
    for key, data in files.items():
        try:
            backend.create(key, data)
        except AlreadyExists:
            found = backend.read(key)
            if found == data:
                continue
            if found is None or leftovers.get(key) != found or not backend.swap(key, found, data):
                raise AlreadyExists(
                    f"{backend.url}/{key}: another process creates a store here. Choose another place, or "
                    f"use the store when it is finished."
                ) from None


def spec_for(
    annotations: Annotations,
    heatmap_size: int,
    history_samples: int | Collection[int],
    top_scores: int | None = None,
) -> StoreSpec:
    """Return the spec of a store for this data; `history_samples` are a number, or the samples themselves."""
    if heatmap_size < 1:
        raise UserError(f"heatmap_size: {heatmap_size}, expected at least 1")
    if top_scores is not None and top_scores < 1:
        raise UserError(f"top_scores: {top_scores}, expected at least 1")
    spec = StoreSpec(
        fingerprint=annotations.fingerprint,
        num_classes=annotations.num_classes,
        heatmap_size=heatmap_size,
        rows_per_shard=annotations.rows_per_shard,
        shard_sizes=tuple(annotations.shard_sizes.tolist()),
        top_scores=top_scores if top_scores is not None and top_scores < annotations.num_classes else None,
    )
    chosen = (
        history.default_history_samples(spec, history_samples)
        if isinstance(history_samples, int)
        else tuple(history_samples)
    )
    return replace(spec, history_samples=chosen)


def _claim(backend: Backend) -> Lease:
    """The lease of a place where nothing is but what an interrupted creation left."""
    with contextlib.suppress(NotAStore):
        read_spec(backend)
        raise AlreadyExists(f"{backend.url}: there is a store already. Open it, or choose another path.")
    names = set(_own_names(backend))
    foreign, chunk = names - {*CREATED, ROOT, LEASE_KEY}, first_chunk(backend)
    root = backend.read(ROOT)
    if foreign or chunk or (root is not None and b'"bigscl"' not in root):
        found = chunk or ", ".join(sorted(foreign or names)[:3])
        raise AlreadyExists(f"{backend.url}: not empty: found {found}. Choose an empty place.")
    return Lease.acquire(backend, "creation")


def _own_names(backend: Backend) -> list[str]:
    """Return the names at the top, without heartbeats and writes that were cut short."""
    return [name for name in backend.names("") if not is_beat(name) and not name.endswith(PARTIAL)]


def prepare_writing(backend: Backend, snapshot: int | None, run: str, lease: Lease) -> Snapshot:
    """Claim the snapshot asked for (or the newest) for a new writer, and remove what a crash left."""
    log = SnapshotLog(backend)
    claimed = log.claim(log.newest() if snapshot is None else snapshot, run, lease.check)
    if snapshot is not None:
        log.drop_after(snapshot, claimed.id, lease.check)
    delete_unnamed_groups(backend, log, lease.check)
    delete_unnamed_versions(backend, log, lease.check)
    return claimed


# Both list first and check the lease after it: whatever a successor makes has names that are not in the list.


def delete_unnamed_groups(backend: Backend, log: SnapshotLog, check: Check) -> None:
    names = [name for name in backend.names("") if name.startswith("arrays-")]
    named = {snapshot.group for snapshot in log.read_all().values()}
    for name in names:
        if name not in named:
            check()
            backend.delete_tree(name)


def delete_unnamed_versions(backend: Backend, log: SnapshotLog, check: Check) -> int:
    """Delete files of versions that no retained snapshot names; return the bytes that were freed."""
    listed = list(backend.sizes(""))
    named = {version for kept in log.read_all().values() for version in versions_of(kept)}
    unnamed = {key: size for key, size in listed if key.endswith(PARTIAL) or _is_unnamed(key, named)}
    check()
    backend.delete_many(unnamed)
    return sum(unnamed.values())


def _is_unnamed(key: str, named: set[Version]) -> bool:
    version = version_of(key)
    return version is not None and version not in named
