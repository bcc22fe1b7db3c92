"""Scores of all samples as a file, written shard by shard: never all in memory."""

import json
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bigscl.common.files import atomic_write, load_pyarrow
from bigscl.common.user_error import UserError
from bigscl.store import HeatmapStore
from bigscl.tools.opening import Data
from bigscl.tools.passes import scores_by_shard

Write = Callable[[NDArray[np.int64], NDArray[np.float16]], None]
"""Called with the ids and the scores of each shard, in the order of the ids."""


def write_scores(store: HeatmapStore, data: Data | None, output: Path) -> int:
    """Write the scores of all samples in the order of their ids; return the number of samples.

    .npz has `scores` float16 [samples, classes], `ids`, `keys` and `class_names`; .parquet the columns id,
    shard, key and scores; .npy the scores alone.
    """
    writers = {".npz": _npz, ".parquet": _parquet, ".npy": _npy}
    if output.suffix not in writers:
        raise UserError(f"{output}: scores are written as {', '.join(writers)}")
    with atomic_write(output) as partial, writers[output.suffix](partial, store, data) as write:
        for ids, scores in scores_by_shard("exporting", store):
            write(ids, scores)
    return store.spec.num_samples


def _header(file: Any, dtype: str, shape: tuple[int, ...]) -> None:
    head = {"descr": dtype, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, head)


@contextmanager
def _npy(path: Path, store: HeatmapStore, data: Data | None) -> Iterator[Write]:
    # Written in sequence: the pages of a memory map would stay in RAM until they are on disk.
    with path.open("wb") as file:
        _header(file, "<f2", (store.spec.num_samples, store.spec.num_classes))
        yield lambda ids, scores: _write(file, np.ascontiguousarray(scores, "<f2"))


def _write(file: Any, values: NDArray[Any]) -> None:
    file.write(values.tobytes())


@contextmanager
def _npz(path: Path, store: HeatmapStore, data: Data | None) -> Iterator[Write]:
    assert data is not None
    index, num_samples = data.index, store.spec.num_samples
    with zipfile.ZipFile(path, "w", allowZip64=True) as archive:
        with archive.open("scores.npy", "w", force_zip64=True) as file:
            _header(file, "<f2", (num_samples, store.spec.num_classes))
            yield lambda ids, scores: _write(file, np.ascontiguousarray(scores, "<f2"))
        with archive.open("ids.npy", "w", force_zip64=True) as file:
            _header(file, "<i8", (num_samples,))
            _write(file, index.ids().astype("<i8"))
        _write_keys(archive, data, store)
        with archive.open("class_names.npy", "w") as file:
            np.lib.format.write_array(file, np.array(index.class_names), allow_pickle=False)


def _write_keys(archive: zipfile.ZipFile, data: Data, store: HeatmapStore) -> None:
    """Write the keys shard by shard: a million of them as Python strings would take hundreds of megabytes."""
    # Bytes that are not UTF-8 are escaped, four letters each.
    raw = np.asarray(data.index.keys.values)
    longest = int(data.index.keys.lengths.max()) * (4 if len(raw) and raw.max() > 127 else 1)
    with archive.open("keys.npy", "w", force_zip64=True) as file:
        _header(file, f"<U{max(1, longest)}", (store.spec.num_samples,))
        for shard in range(store.spec.num_shards):
            keys = [data.index.key(int(sample)) for sample in store.spec.sample_ids(shard)]
            _write(file, np.array(keys, f"<U{max(1, longest)}"))


@contextmanager
def _parquet(path: Path, store: HeatmapStore, data: Data | None) -> Iterator[Write]:
    assert data is not None
    pyarrow, parquet = load_pyarrow(".parquet", ".npz")
    index, width = data.index, store.spec.num_classes
    names = index.shard_names  # once: it is computed from all addresses
    vector = pyarrow.list_(pyarrow.float32(), width)
    text = pyarrow.string()
    columns = [("id", pyarrow.int64()), ("shard", text), ("key", text), ("scores", vector)]
    # A name may contain any letter, so JSON.
    schema = pyarrow.schema(columns, metadata={"class_names": json.dumps(index.class_names)})

    def write(ids: NDArray[np.int64], scores: NDArray[np.float16]) -> None:
        values = pyarrow.array(scores.astype(np.float32).reshape(-1))
        arrays = [
            pyarrow.array(ids),
            pyarrow.array([names[int(one) // index.rows_per_shard] for one in ids]),
            pyarrow.array([index.key(int(one)) for one in ids]),
            pyarrow.FixedSizeListArray.from_arrays(values, width),
        ]
        writer.write_table(pyarrow.table(arrays, schema=schema))

    with parquet.ParquetWriter(path, schema) as writer:
        yield write
