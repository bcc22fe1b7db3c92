"""What each `store.codec` makes of a real store: size, and CPU time of one epoch's writing and reading.

    python -m tests.benchmarks.codecs runs/mine/store

The store is only read. Its newest rows are put into stores in memory, one per codec, as a run would do it.
"""

import argparse
import time
import uuid
from dataclasses import replace
from typing import get_args

import numpy as np

from bigscl.store import Annotations, Codec, HeatmapStore, Ragged, Rows
from bigscl.store.backends.backend import forget_memory
from bigscl.store.format.quantize import as_stored


def rows_of(source: HeatmapStore) -> dict[int, Rows]:
    """The written shards of a store."""
    return {shard: source.load_shard(shard) for shard, slot in enumerate(source.snapshot.slots) if slot >= 0}


def unlabelled(source: HeatmapStore) -> Annotations:
    """Annotations of the same shape: chunks do not depend on the labels."""
    spec = source.spec
    return Annotations(
        fingerprint="benchmark",
        num_classes=spec.num_classes,
        rows_per_shard=spec.rows_per_shard,
        shard_sizes=np.array(spec.shard_sizes),
        given=Ragged(np.zeros(spec.num_rows + 1, np.int64), np.empty(0, np.int64)),
    )


def measure(source: HeatmapStore, shards: dict[int, Rows], codec: Codec) -> dict[str, float]:
    """Bytes, and CPU milliseconds per 1000 samples to round, to write and to read them."""
    group, url = replace(source.group, codec=codec), f"memory://{uuid.uuid4().hex}"
    annotations = unlabelled(source)
    HeatmapStore.create(
        url, annotations, heatmap_size=source.spec.heatmap_size, history_samples=0, group=group
    )
    with HeatmapStore.open(url, annotations=annotations, mode="w", run="benchmark") as store:
        started = time.process_time()
        rounded = {
            shard: as_stored(rows, store.group, shard * len(rows) + np.arange(len(rows)), 0)
            for shard, rows in shards.items()
        }
        entered = time.process_time()
        for shard, rows in rounded.items():
            store.save_shard(shard, rows)
        written = time.process_time()
        for shard in rounded:
            store.load_shard(shard)
        read = time.process_time()
        sizes = {name: size for name, size in store.sizes().items() if name.startswith("arrays-")}
    forget_memory(url)
    per_1000 = 1e6 / sum(len(rows) for rows in shards.values())
    return {
        "bytes": sum(sizes.values()),
        "heatmaps": sizes.get("arrays-000/heatmaps", 0),
        "round": (entered - started) * per_1000,
        "write": (written - entered) * per_1000,
        "read": (read - written) * per_1000,
    }


def main() -> None:
    """A line per codec, against none."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("store")
    source = HeatmapStore.open(parser.parse_args().store)
    shards = rows_of(source)
    found = {codec: measure(source, shards, codec) for codec in get_args(Codec)}
    print(f"{source.group.layout}, {sum(map(len, shards.values()))} rows; CPU ms per 1000 rows")
    print(f"{'codec':8} {'store':>6} {'heatmaps':>9} {'round':>6} {'write':>6} {'read':>6}")
    for codec, one in found.items():
        ratios = [found["none"][what] / max(1, one[what]) for what in ("bytes", "heatmaps")]
        times = " ".join(f"{one[what]:6.1f}" for what in ("round", "write", "read"))
        print(f"{codec:8} {ratios[0]:5.2f}x {ratios[1]:8.2f}x {times}")


if __name__ == "__main__":
    main()
