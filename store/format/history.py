"""How a few tracked samples evolve: each epoch's scores and strongest heatmaps, outside the snapshots.

It serves pictures only, so that damage to it never stops a run: its arrays are opened by the store's spec,
not by their metadata on the storage, which is for other readers.
"""

import logging
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import numpy as np
import zarr
from numpy.typing import NDArray
from zarr.storage import StorePath

from bigscl.store.backends.backend import Backend
from bigscl.store.errors import storage_errors
from bigscl.store.format.array_types import ARRAYS
from bigscl.store.format.layout import ArrayPlan, choose_classes
from bigscl.store.format.spec import MAX_COUNT, GroupSpec, Rows, StoreSpec
from bigscl.store.format.zarr_group import codecs, create_array, described, metadata_fault, planned_metadata

logger = logging.getLogger(__name__)

FOLDER = "history"
# Arrays are sparse: room for epochs that never come costs nothing, and nothing is ever resized.
MAX_EPOCHS = 100_000
TOP = 10
RECORDED = ("scores", "classes", "heatmaps", "cell_visits")


def default_history_samples(spec: StoreSpec, count: int) -> tuple[int, ...]:
    ids = np.concatenate([spec.sample_ids(shard) for shard in range(spec.num_shards)])
    places = np.linspace(0, len(ids) - 1, min(count, len(ids))).astype(np.int64)
    return tuple(ids[places].tolist())


def _group(spec: StoreSpec) -> GroupSpec:
    return GroupSpec(name=FOLDER, layout="topk", top=min(TOP, spec.num_classes))


def _plans(spec: StoreSpec) -> tuple[ArrayPlan, ...]:
    count, group = len(spec.history_samples), _group(spec)
    # The few tracked samples have the scores of all classes.
    tails = {name: ARRAYS[name].shape(replace(spec, top_scores=None), group) for name in RECORDED}
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
    if not spec.history_samples:
        return
    zarr.create_group(
        backend.zarr_store(read_only=False),
        path=FOLDER,
        attributes={"history_samples": list(spec.history_samples)},
    )
    for plan in _plans(spec):
        create_array(backend, f"{FOLDER}/{plan.name}", plan, codecs(_group(spec)))


def _open(backend: Backend, spec: StoreSpec, *, read_only: bool) -> dict[str, zarr.Array[Any]]:
    store, group = backend.zarr_store(read_only=read_only), _group(spec)
    return {
        plan.name: zarr.Array(
            zarr.AsyncArray(planned_metadata(plan, group), StorePath(store, f"{FOLDER}/{plan.name}"))
        )
        for plan in _plans(spec)
    }


def record(backend: Backend, spec: StoreSpec, epoch: int, rows: Rows, given: NDArray[np.bool_]) -> None:
    values: dict[str, NDArray[Any]] = {"scores": rows.scores}
    if rows.heatmaps is not None:
        classes = choose_classes(rows.scores, given, TOP)
        places = np.arange(len(rows))[:, None]
        values |= {"classes": classes, "heatmaps": rows.heatmaps_of(places, classes)}
        if "cell_visits" in rows:
            values["cell_visits"] = rows["cell_visits"]
    with storage_errors(f"{backend.url}/{FOLDER}"):
        arrays = _open(backend, spec, read_only=False)
        for name, value in values.items():
            arrays[name][epoch] = value
        _restore_metadata(backend, spec)


def _restore_metadata(backend: Backend, spec: StoreSpec) -> None:
    faults = list(metadata_faults(backend, spec))
    if faults:
        logger.warning("%s/%s: %s. Its metadata is written again", backend.url, *faults[0])
        files = described(lambda scratch: describe_history(scratch, spec))
        for key, data in files.items():
            # Not the root group that comes with it: the store has one.
            if key.startswith(f"{FOLDER}/"):
                backend.replace(key, data)


def metadata_faults(backend: Backend, spec: StoreSpec) -> Iterator[tuple[str, str]]:
    """(file, what is wrong with it) of metadata that is not as it was created."""
    if not spec.history_samples:
        return
    store = backend.zarr_store(read_only=True)
    try:
        history_samples = zarr.open_group(store, path=FOLDER, mode="r").attrs.get("history_samples")
        if history_samples != list(spec.history_samples):
            yield f"{FOLDER}/zarr.json", "history_samples are not the samples that the store says"
    except Exception as error:  # zarr raises anything for metadata that is missing or is not its own
        yield f"{FOLDER}/zarr.json", f"cannot be read ({error!r:.120})"
    for plan in _plans(spec):
        path = f"{FOLDER}/{plan.name}"
        try:
            fault = metadata_fault(zarr.open_array(store, path=path, mode="r"), plan, _group(spec))
        except Exception as error:
            fault = f"cannot be read ({error!r:.120})"
        if fault:
            yield f"{path}/zarr.json", fault


def history_faults(backend: Backend, spec: StoreSpec) -> Iterator[tuple[str, str]]:
    """(file, what is wrong with it) of all that was kept of the tracked samples."""
    yield from metadata_faults(backend, spec)
    for name, array in _open(backend, spec, read_only=True).items() if spec.history_samples else ():
        for chunk, epoch in _chunks(backend, name).items():
            try:
                array[epoch]
            except (ValueError, RuntimeError, OSError) as error:
                yield f"{FOLDER}/{name}/{chunk}", f"epoch {epoch} cannot be read ({error})"


def _chunks(backend: Backend, array: str) -> dict[str, int]:
    """The epochs that were kept, by the name of the chunk."""
    names = (re.fullmatch(r"c\.(\d+)[.\d]*", name) for name in backend.names(f"{FOLDER}/{array}"))
    return {found[0]: int(found[1]) for found in names if found is not None}


def read_history(backend: Backend, sample: int, spec: StoreSpec) -> dict[int, Rows]:
    """History of one tracked sample, by epoch; nothing for a sample that is not tracked."""
    if sample not in spec.history_samples:
        return {}
    place = spec.history_samples.index(sample)
    arrays = _open(backend, spec, read_only=True)
    history = {}
    for epoch in sorted(_chunks(backend, "scores").values()):
        try:
            values = {name: cast(NDArray[Any], array[epoch, place])[None] for name, array in arrays.items()}
        except (ValueError, RuntimeError) as error:
            # What zarr and its codecs raise for a wrong checksum or length.
            logger.warning("%s/%s: epoch %d is left out: damaged (%s)", backend.url, FOLDER, epoch, error)
            continue
        if np.isnan(values["heatmaps"]).all():
            values = {"scores": values["scores"]}
        elif (values["cell_visits"] > MAX_COUNT).any():
            del values["cell_visits"]  # this epoch was recorded without
        history[epoch] = Rows(last_epoch=np.full(1, epoch, np.int32), **values)
    return history
