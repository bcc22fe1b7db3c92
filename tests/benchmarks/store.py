"""How fast the heatmap store is, side by side with other ways to keep the same bytes.

    python tests/benchmarks/store.py [--shards 100] [--folder DIR] [--json out.json]

One epoch = every sample's scores [1000] and heatmaps [10,14,14] read, blended with new values (EMA) and
written back.
Needs `pip install -e '.[bench]'`.
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import zarr

# Run as a file, this module's own name would hide the package it measures.
sys.path[0] = str(Path(__file__).parents[2])

from bigscl.store import Annotations, GroupSpec, HeatmapStore, Prefetcher, Ragged, Rows, ShardCache, Writeback

ROWS, CLASSES, TOP, SIZE = 1000, 1000, 10, 14
SHAPES = {"scores": (CLASSES,), "heatmaps": (TOP, SIZE, SIZE), "classes": (TOP,), "last_epoch": ()}
DTYPES = {"scores": "f2", "heatmaps": "f2", "classes": "u2", "last_epoch": "i4"}
ROW_BYTES = sum(int(np.prod(SHAPES[n])) * np.dtype(DTYPES[n]).itemsize for n in SHAPES)
BATCH = 250
MOMENTUM = np.float32(0.8)

FRESH = np.random.default_rng(0).random((ROWS, max(CLASSES, TOP * SIZE * SIZE)), np.float32) * np.float32(0.2)


def blend(values: dict[str, Any]) -> dict[str, Any]:
    """Scores and heatmaps after one more look: the same arithmetic for every way of storing."""
    out = dict(values)
    for name in ("scores", "heatmaps"):
        flat = values[name].reshape(len(values[name]), -1)
        mixed = flat.astype(np.float32) * MOMENTUM
        mixed += FRESH[: len(flat), : flat.shape[1]]
        out[name] = mixed.astype(np.float16).reshape(values[name].shape)
    return out


def unchanged(rows: Rows) -> dict[str, Any]:
    """All arrays of rows that an update has."""
    return {name: array for name, array in rows.items() if name not in ("classes", "last_epoch")}


def shard_values() -> dict[str, Any]:
    """One shard's worth of plausible values."""
    rng = np.random.default_rng(1)
    return {
        "scores": rng.random((ROWS, CLASSES), np.float32).astype(np.float16),
        "heatmaps": rng.random((ROWS, TOP, SIZE, SIZE), np.float32).astype(np.float16),
        "classes": np.sort(rng.choice(CLASSES, (ROWS, TOP)), axis=1).astype(np.uint16),
        "last_epoch": np.zeros(ROWS, np.int32),
    }


def annotations(shards: int) -> Annotations:
    """One positive per sample."""
    rows = shards * ROWS
    return Annotations(
        fingerprint="benchmark",
        num_classes=CLASSES,
        rows_per_shard=ROWS,
        shard_sizes=np.full(shards, ROWS),
        given=Ragged(np.arange(rows + 1), np.arange(rows) % CLASSES),
    )


class Memmap:
    """One flat file per array."""

    def __init__(self, folder: Path, shards: int) -> None:
        self.maps = {
            name: np.memmap(folder / name, DTYPES[name], "w+", shape=(shards, ROWS, *SHAPES[name]))
            for name in SHAPES
        }

    def read(self, shard: int) -> dict[str, Any]:
        return {name: np.array(array[shard]) for name, array in self.maps.items()}

    def write(self, shard: int, values: dict[str, Any]) -> None:
        for name, value in values.items():
            self.maps[name][shard] = value

    def close(self) -> None:
        for array in self.maps.values():
            array.flush()


class PlainZarr:
    """zarr-python by whole chunks, uncompressed: the bar."""

    def __init__(self, folder: Path, shards: int) -> None:
        group = zarr.create_group(str(folder))
        self.arrays = {
            name: group.create_array(
                name,
                shape=(shards, ROWS, *SHAPES[name]),
                chunks=(1, ROWS, *SHAPES[name]),
                dtype=DTYPES[name],
                compressors=None,
                chunk_key_encoding={"name": "default", "separator": "."},
            )
            for name in SHAPES
        }

    def read(self, shard: int) -> dict[str, Any]:
        return {name: array[shard] for name, array in self.arrays.items()}

    def write(self, shard: int, values: dict[str, Any]) -> None:
        for name, value in values.items():
            self.arrays[name][shard] = value

    def close(self) -> None:
        pass


class Hdf5:
    """h5py by whole chunks."""

    def __init__(self, folder: Path, shards: int) -> None:
        import h5py

        self.file = h5py.File(folder / "store.h5", "w")
        for name in SHAPES:
            shape = (shards, ROWS, *SHAPES[name])
            self.file.create_dataset(name, shape, DTYPES[name], chunks=(1, *shape[1:]))

    def read(self, shard: int) -> dict[str, Any]:
        return {name: self.file[name][shard] for name in SHAPES}

    def write(self, shard: int, values: dict[str, Any]) -> None:
        for name, value in values.items():
            self.file[name][shard] = value

    def close(self) -> None:
        self.file.close()


class Lmdb:
    """One value per array and shard."""

    def __init__(self, folder: Path, shards: int) -> None:
        import lmdb

        size = shards * ROWS * ROW_BYTES * 3 + 2**24
        self.env = lmdb.open(str(folder), map_size=size, sync=False)

    def read(self, shard: int) -> dict[str, Any]:
        out = {}
        with self.env.begin(buffers=True) as transaction:
            for name in SHAPES:
                held = transaction.get(f"{name}{shard}".encode())
                out[name] = np.frombuffer(held, DTYPES[name]).reshape(ROWS, *SHAPES[name]).copy()
        return out

    def write(self, shard: int, values: dict[str, Any]) -> None:
        with self.env.begin(write=True) as transaction:
            for name, value in values.items():
                transaction.put(f"{name}{shard}".encode(), memoryview(np.ascontiguousarray(value)).cast("B"))

    def close(self) -> None:
        self.env.close()


def epoch_by_shard(way: Any, shards: int) -> None:
    """Read, blend, write, one shard after the other, in one thread."""
    for shard in range(shards):
        way.write(shard, blend(way.read(shard)))


def epoch_by_sample(way: PlainZarr, samples: int) -> None:
    """What happens when a step reads and writes its samples straight in Zarr."""
    for n in np.random.default_rng(0).choice(ROWS, samples, replace=False):
        values = {name: array[0, n][None] for name, array in way.arrays.items()}
        for name, value in blend(values).items():
            way.arrays[name][0, n] = value[0]


def epoch_of_store(store: HeatmapStore, epoch: int, shards: int) -> None:
    """The trainer's way: shuffled batches through prefetch and writeback, then a commit with its syncs."""
    rng = np.random.default_rng(epoch)

    def batches() -> Iterator[Any]:
        for shard in rng.permutation(shards):
            yield from np.split(shard * ROWS + rng.permutation(ROWS), ROWS // BATCH)

    with ShardCache(store, epoch) as cache, Prefetcher(cache) as prefetcher, Writeback(cache) as writeback:
        for ids, rows in prefetcher.pair(batches(), lambda ids: ids):
            after = blend({"scores": rows.scores, "heatmaps": rows.heatmaps})
            writeback.put(ids, Rows(**unchanged(rows) | after))
        writeback.drain()


@contextmanager
def place(folder: Path | None) -> Iterator[Path]:
    """An empty folder on the storage under test."""
    made = Path(tempfile.mkdtemp(prefix="bigscl-bench-", dir=folder))
    try:
        yield made
    finally:
        shutil.rmtree(made)


def measure(action: Callable[[], Any], samples: int) -> dict[str, float]:
    """Wall and CPU time (all threads) of an action over so many samples."""
    wall, cpu = time.perf_counter(), time.process_time()
    action()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return {"samples_per_second": samples / wall, "cpu_ms_per_1000": cpu * 1e6 / samples}


def bench_ways(shards: int, folder: Path | None) -> dict[str, dict[str, float]]:
    """Every other way to keep the bytes."""
    results = {}
    values = shard_values()
    results["EMA arithmetic alone"] = measure(lambda: [blend(values) for _ in range(shards)], shards * ROWS)
    ways = {"np.memmap": Memmap, "h5py": Hdf5, "LMDB (no sync)": Lmdb, "plain zarr, whole chunks": PlainZarr}
    for name, kind in ways.items():
        with place(folder) as where:
            way = kind(where, shards)
            for shard in range(shards):
                way.write(shard, values)
            results[name] = measure(lambda way=way: epoch_by_shard(way, shards), shards * ROWS)
            if kind is PlainZarr:
                results["naive zarr, per sample"] = measure(lambda way=way: epoch_by_sample(way, 50), 50)
            way.close()
    return results


def bench_store(shards: int, folder: Path | None, **settings: Any) -> dict[str, float]:
    """An epoch of the store once every shard has been written, and the size of what is on disk."""
    with place(folder) as where:
        data = annotations(shards)
        HeatmapStore.create(
            where / "store", data, heatmap_size=SIZE, group=GroupSpec(layout="topk", top=TOP, **settings)
        )
        with HeatmapStore.open(where / "store", annotations=data, mode="w", run="benchmark") as store:
            for epoch in range(2):
                epoch_of_store(store, epoch, shards)
                store.commit(epoch=epoch)
                store.drop_snapshots()
            result = measure(lambda: epoch_of_store(store, 2, shards), shards * ROWS)
            result["commit_seconds"] = -time.perf_counter()
            store.commit(epoch=2)
            result["commit_seconds"] += time.perf_counter()
            arrays = dict(store.backend.sizes(store.group.name))
            versions = sum("/samples/c." in key for key in arrays)
            result["ratio"] = versions * ROWS * ROW_BYTES / sum(arrays.values())
    return result


def table(rows: dict[str, dict[str, float]], bar: str) -> None:
    """Rates beside each other, and as a ratio to the bar."""
    print(f"{'':32} {'samples/s':>10} {'CPU ms/1000':>12} {'vs zarr':>8} {'size ratio':>11} {'commit s':>9}")
    for name, row in rows.items():
        rate, cpu = row["samples_per_second"], row["cpu_ms_per_1000"]
        extra = f"{row['ratio']:11.2f} {row['commit_seconds']:9.2f}" if "ratio" in row else ""
        print(f"{name:32} {rate:10,.0f} {cpu:12.1f} {rate / rows[bar]['samples_per_second']:8.2f} {extra}")


def main() -> None:
    """Everything, as a table and as JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shards", type=int, default=100, help="shards of 1000 samples each")
    parser.add_argument("--folder", type=Path, help="where to write; the default is the temporary folder")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    bar = "plain zarr, whole chunks"
    rows = bench_ways(args.shards, args.folder)
    rows["store, no checksum"] = bench_store(args.shards, args.folder, checksum=False)
    rows["store (default: crc32c)"] = bench_store(args.shards, args.folder)
    rows["store, blosc-lz4-bitshuffle"] = bench_store(args.shards, args.folder, codec="blosc")
    rows["store, zstd"] = bench_store(args.shards, args.folder, codec="zstd")
    rows["store, uint8"] = bench_store(args.shards, args.folder, codec="uint8")
    table(rows, bar)
    if args.json:
        args.json.write_text(json.dumps({"epoch": rows}, indent=2))


if __name__ == "__main__":
    main()
