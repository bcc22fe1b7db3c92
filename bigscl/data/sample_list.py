"""samples.json: which row of a store is which image, for readers without bigscl.

`docs/store-format.md` describes it, with an example that reads a heatmap by key.
"""

import json
from pathlib import Path

from bigscl.common.files import atomic_write
from bigscl.data.index import Index

FILE = "samples.json"
FORMAT = 1


def write_sample_list(index: Index, path: Path) -> None:
    """Write the names of classes and shards and the keys of all samples, in the order of a store's rows."""
    head = {
        "format": FORMAT,
        "fingerprint": index.fingerprint,
        "rows_per_shard": index.rows_per_shard,
        "class_names": list(index.class_names),
    }
    with atomic_write(path) as partial, partial.open("w") as file:
        # A line per shard: a million keys are never one string.
        file.write(json.dumps(head)[:-1] + ', "shards": [\n')
        for shard, name in enumerate(index.shard_names):
            first = shard * index.rows_per_shard
            keys = [index.key(first + place) for place in range(int(index.shard_sizes[shard]))]
            end = "\n" if shard == len(index.urls) - 1 else ",\n"
            file.write(json.dumps({"name": name, "keys": keys}) + end)
        file.write("]}\n")


def is_list_of(index: Index, path: Path) -> bool:
    """Return whether the file lists the samples of this index. It is written whole, so its head is enough."""
    wanted = f'"fingerprint": "{index.fingerprint}"'
    try:
        with path.open() as file:
            return wanted in file.read(200)
    except (OSError, ValueError):
        return False
