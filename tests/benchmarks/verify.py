"""What checking costs: `bigscl verify` beside plain reading of a store, and how soon `bigscl show` answers.

    python -m tests.benchmarks.verify [--shards 60] [--rounds 5] [--folder DIR]

Rounds of both are interleaved in one process with the same threads; the ratio of the medians counts.
"""

import argparse
import contextlib
import io
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from bigscl.store import Annotations, GroupSpec, HeatmapStore, Ragged
from bigscl.store.format.layout import shard_bytes
from bigscl.tools.cli import main as bigscl

CLASSES, SIDE, TOP, ROWS = 1000, 14, 10, 1000


def annotations(num_shards: int) -> Annotations:
    rows = num_shards * ROWS
    return Annotations(
        fingerprint="benchmark",
        num_classes=CLASSES,
        rows_per_shard=ROWS,
        shard_sizes=np.full(num_shards, ROWS, np.int64),
        given=Ragged(np.arange(rows + 1), np.random.default_rng(0).integers(0, CLASSES, rows)),
    )


def make(url: Path, num_shards: int, written: int) -> None:
    """A store like ImageNet's in its last phase, with random values in some of its shards."""
    data, random = annotations(num_shards), np.random.default_rng(1)
    HeatmapStore.create(url, data, heatmap_size=SIDE, group=GroupSpec(layout="topk", top=TOP))
    with HeatmapStore.open(url, annotations=data, mode="w") as store:
        for shard in range(written):
            rows = store.load_shard(shard)
            rows.scores[:] = random.random(rows.scores.shape, dtype=np.float32)
            rows.heatmaps[:] = random.random(rows.heatmaps.shape, dtype=np.float32)
            rows["last_epoch"][:] = 0
            store.save_shard(shard, rows)
        store.commit(epoch=0)


def seconds_to_read(url: Path, threads: int) -> float:
    store = HeatmapStore.open(url)
    started = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(store.load_shard, range(store.spec.num_shards)):
            pass
    return time.perf_counter() - started


def seconds_to_verify(url: Path, threads: int) -> float:
    started = time.perf_counter()
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()) as said:
        bigscl(["verify", str(url), "--threads", str(threads)])
    assert "all is well" in said.getvalue()
    return time.perf_counter() - started


def verifying(folder: Path, num_shards: int, rounds: int) -> None:
    make(folder / "full", num_shards, num_shards)
    store = HeatmapStore.open(folder / "full")
    num_bytes = num_shards * shard_bytes(store.spec, store.group)
    for threads in (1, 2):
        seconds_to_read(folder / "full", threads)  # into the page cache
        read, verify = [], []
        for _ in range(rounds):
            read.append(seconds_to_read(folder / "full", threads))
            verify.append(seconds_to_verify(folder / "full", threads))
        plain, checked = (num_bytes / statistics.median(times) / 1e6 for times in (read, verify))
        ratio = f"ratio {checked / plain:.2f}"
        print(f"{threads} threads: read {plain:.0f} MB/s, verify {checked:.0f} MB/s, {ratio}")


def showing(folder: Path, rounds: int) -> None:
    make(folder / "sparse", 1281, 3)
    make(folder / "small", 4, 2)
    for name in ("small", "sparse"):
        command = [sys.executable, "-m", "bigscl.tools.cli", "show", str(folder / name)]
        times = []
        for _ in range(rounds):
            started = time.perf_counter()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            times.append(time.perf_counter() - started)
        print(f"show, {name}: best {min(times):.2f} s, median {statistics.median(times):.2f} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shards", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=None)
    chosen = parser.parse_args()
    place = Path(tempfile.mkdtemp(dir=chosen.folder))
    try:
        verifying(place, chosen.shards, chosen.rounds)
        showing(place, chosen.rounds)
    finally:
        shutil.rmtree(place)
