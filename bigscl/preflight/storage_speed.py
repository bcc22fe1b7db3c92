"""Measure how fast a place reads and writes the shards of a store."""

import contextlib
import os
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from bigscl.store import (
    Annotations,
    GroupSpec,
    HeatmapStore,
    LocalBackend,
    Ragged,
    Rows,
    StorageOptions,
    StoreSpec,
    array_plans,
    stored_bytes,
)

MAX_BYTES = 2**28
MAX_SHARDS = 32
ROUNDS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Bytes per second of a store, measured through all of its code; writing includes the sync."""

    read: float
    write: float
    num_bytes: int
    """Bytes written and read in each round."""

    @property
    def both(self) -> float:
        return 1 / (1 / self.read + 1 / self.write)


def measure(place: str, spec: StoreSpec, group: GroupSpec, threads: int, options: StorageOptions) -> Speed:
    """Return the better of two rounds with a few shards of this layout, in a store that is then deleted."""
    shards = int(np.clip(MAX_BYTES // stored_bytes(spec, group), 2, MAX_SHARDS))
    annotations = _unlabelled(spec, shards)
    url = f"{place.rstrip('/')}/bigscl-probe-{uuid.uuid4().hex}"
    HeatmapStore.create(
        url,
        annotations,
        heatmap_size=spec.heatmap_size,
        group=replace(group, slots=2),
        history_samples=0,
        top_scores=spec.top_scores,
        options=options,
    )
    with HeatmapStore.open(url, annotations=annotations, mode="w", run="probe", options=options) as store:
        try:
            rounds = [_round(store, threads, number) for number in range(ROUNDS)]
        finally:
            store.close()
            store.backend.delete_tree("")
    num_bytes = shards * stored_bytes(spec, group)
    reading, writing = (min(seconds) for seconds in zip(*rounds, strict=True))
    return Speed(read=num_bytes / reading, write=num_bytes / writing, num_bytes=num_bytes)


def _unlabelled(spec: StoreSpec, shards: int) -> Annotations:
    rows = shards * spec.rows_per_shard
    return Annotations(
        fingerprint="probe",
        num_classes=spec.num_classes,
        rows_per_shard=spec.rows_per_shard,
        shard_sizes=np.full(shards, spec.rows_per_shard, np.int64),
        given=Ragged(np.zeros(rows + 1, np.int64), np.empty(0, np.int64)),
    )


def _round(store: HeatmapStore, threads: int, number: int) -> tuple[float, float]:
    rows = _random_rows(store)
    shards = range(store.spec.num_shards)
    with ThreadPoolExecutor(threads, thread_name_prefix="probe") as pool:
        started = time.perf_counter()
        list(pool.map(lambda shard: store.save_shard(shard, rows), shards))
        store.commit(epoch=number)
        writing = time.perf_counter() - started
        store.drop_snapshots()
        _forget_cached(store)
        started = time.perf_counter()
        list(pool.map(store.load_shard, shards))
        return time.perf_counter() - started, writing


def _random_rows(store: HeatmapStore) -> Rows:
    """Return rows that do not compress, with valid values in every array."""
    random = np.random.default_rng(0)
    arrays = {}
    for plan in array_plans(store.spec, store.group):
        shape = plan.shape[2:]
        if plan.dtype.kind == "f":
            arrays[plan.name] = random.random(shape, dtype=np.float32).astype(plan.dtype)
        elif plan.name in ("classes", "score_classes"):
            arrays[plan.name] = np.broadcast_to(np.arange(shape[-1], dtype=plan.dtype), shape).copy()
        else:
            arrays[plan.name] = np.zeros(shape, plan.dtype)
    return Rows(store.spec.num_classes, **arrays)


def _forget_cached(store: HeatmapStore) -> None:
    """Ask the kernel to drop the files from its cache: after an epoch they would not be there either."""
    if not isinstance(store.backend, LocalBackend) or not hasattr(os, "posix_fadvise"):
        return
    for key, _ in store.backend.sizes(""):
        with contextlib.suppress(OSError):
            descriptor = os.open(store.backend.root / key, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
