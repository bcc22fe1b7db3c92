"""How a few tracked samples evolve: each epoch's scores and strongest heatmaps, outside the snapshots."""

from typing import Any, cast

import numpy as np
import zarr
from numpy.typing import NDArray

from bigscl.store.array_table import ARRAYS
from bigscl.store.arrays import create_array
from bigscl.store.backends import Backend
from bigscl.store.errors import storage_errors
from bigscl.store.layout import ArrayPlan, choose_classes
from bigscl.store.spec import MAX_COUNT, GroupSpec, Rows, StoreSpec

FOLDER = "history"
# Arrays are sparse: room for epochs that never come costs nothing, and nothing is ever resized.
MAX_EPOCHS = 100_000
TOP = 10
RECORDED = ("scores", "classes", "heatmaps", "counts")


def default_tracked(spec: StoreSpec, count: int) -> tuple[int, ...]:
    """Evenly spaced samples."""
    ids = np.concatenate([spec.sample_ids(shard) for shard in range(spec.num_shards)])
    places = np.linspace(0, len(ids) - 1, min(count, len(ids))).astype(np.int64)
    return tuple(ids[places].tolist())


def _group(spec: StoreSpec) -> GroupSpec:
    """The layout of one epoch's values."""
    return GroupSpec(name=FOLDER, layout="topk", top=min(TOP, spec.num_classes))


def _plans(spec: StoreSpec) -> tuple[ArrayPlan, ...]:
    count, group = len(spec.tracked), _group(spec)
    tails = {name: ARRAYS[name].shape(spec, group) for name in RECORDED}
    return tuple(
        ArrayPlan(
            name=name,
            shape=(MAX_EPOCHS, count, *tail),
            chunks=(1, count, *tail),
            dtype=ARRAYS[name].dtype(spec),
        )
        for name, tail in tails.items()
    )


def history_bytes(spec: StoreSpec, num_tracked: int, *, heatmaps: bool) -> int:
    """Bytes that one epoch of so many tracked samples takes on the storage."""
    values = sum(
        int(np.prod(plan.shape[2:], dtype=np.int64)) * plan.dtype.itemsize
        for plan in _plans(spec)
        if heatmaps or plan.name == "scores"
    )
    return num_tracked * values


def describe_history(backend: Backend, spec: StoreSpec) -> None:
    """Make the metadata of empty arrays with room for every epoch."""
    if not spec.tracked:
        return
    zarr.create_group(
        backend.zarr_store(read_only=False), path=FOLDER, attributes={"tracked": list(spec.tracked)}
    )
    for plan in _plans(spec):
        create_array(backend, f"{FOLDER}/{plan.name}", plan, None)


def record(backend: Backend, spec: StoreSpec, epoch: int, rows: Rows, annotated: NDArray[np.bool_]) -> None:
    """Keep this epoch's rows of the tracked samples."""
    store = backend.zarr_store(read_only=False)
    values: dict[str, NDArray[Any]] = {"scores": rows.scores}
    if rows.heatmaps is not None:
        classes = choose_classes(rows.scores, annotated, TOP)
        places = np.arange(len(rows))[:, None]
        values |= {"classes": classes, "heatmaps": rows.heatmaps_of(places, classes)}
        if rows.counts is not None:
            values["counts"] = rows.counts
    with storage_errors(f"{backend.url}/{FOLDER}"):
        for name, value in values.items():
            zarr.open_array(store, path=f"{FOLDER}/{name}", mode="r+")[epoch] = value


def read_history(backend: Backend, sample: int, spec: StoreSpec) -> dict[int, Rows]:
    """What was kept of one tracked sample, by epoch; nothing for a sample that is not tracked."""
    if sample not in spec.tracked:
        return {}
    place = spec.tracked.index(sample)
    store = backend.zarr_store(read_only=True)
    arrays = {name: zarr.open_array(store, path=f"{FOLDER}/{name}", mode="r") for name in RECORDED}
    names = (name for name in backend.names(f"{FOLDER}/scores") if name.startswith("c."))
    epochs = sorted(int(name.split(".")[1]) for name in names if not name.endswith(".partial"))
    history = {}
    for epoch in epochs:
        values = {name: cast(NDArray[Any], array[epoch, place])[None] for name, array in arrays.items()}
        if np.isnan(values["heatmaps"]).all():
            values = {"scores": values["scores"]}
        elif (values["counts"] > MAX_COUNT).any():
            del values["counts"]  # this epoch was recorded without
        history[epoch] = Rows(visited=np.full(1, epoch, np.int32), **values)
    return history
