"""Visit most images of a saved run's epoch without training them: `scale --share`.

The rest of the epoch's rows get random values through the store, and the newest checkpoint is told the
snapshot that has them. A run of 1.3 million images then has its real selection, compaction, commits and tools
after training a share of them, on a machine that could not train them all.
"""

import json
import sys
from pathlib import Path

import numpy as np
import yaml

from bigscl.common.digests import read_sealed, write_sealed
from bigscl.data.index import load_index
from bigscl.store import HeatmapStore, Rows

LEFT_SHARDS = 4
"""Left for the trainer, so that the epoch has an end to train."""


def fill(config_path: Path) -> str:
    config = yaml.safe_load(config_path.read_text())
    run = Path(config["run"])
    checkpoint = sorted(run.glob("checkpoints/step-*"))[-1] / "progress.json"
    progress = read_sealed(checkpoint, "Train the run first.")
    annotations = load_index(config["data"]["train"]).annotations("given")
    with HeatmapStore.open(
        run / "store",
        annotations=annotations,
        mode="w",
        snapshot=progress["snapshot"],
        run=json.loads((run / "run.json").read_text())["id"],
    ) as store:
        random = np.random.default_rng([config["seed"], progress["step"]])
        epoch, filled = progress["epoch"], 0
        unfinished = np.flatnonzero((_real(store) & (_stamps(store) != epoch)).any(1))
        for done, shard in enumerate(unfinished[:-LEFT_SHARDS]):
            filled += _visit(store, int(shard), epoch, random)
            if done % 100 == 0:
                print(f"fill: {done} of {len(unfinished)} shards", file=sys.stderr, flush=True)
        before = store.snapshot
        snapshot = store.commit(epoch=before.epoch, step=before.step, attributes=before.attributes)
    write_sealed(checkpoint, {**progress, "snapshot": snapshot.id})
    return f"epoch {epoch}: {filled:,} images in {max(0, len(unfinished) - LEFT_SHARDS):,} shards"


def _stamps(store: HeatmapStore) -> np.ndarray:
    return store.last_epochs().reshape(store.spec.num_shards, -1)


def _real(store: HeatmapStore) -> np.ndarray:
    """Rows that have a sample, [shards, rows]."""
    return np.arange(store.spec.rows_per_shard) < np.asarray(store.spec.shard_sizes)[:, None]


def _visit(store: HeatmapStore, shard: int, epoch: int, random: np.random.Generator) -> int:
    """Give the rows of a shard that the epoch has not had values of their own."""
    rows: Rows = store.load_shard(shard)
    todo = rows["last_epoch"] != epoch
    todo[store.spec.shard_sizes[shard] :] = False
    for array in (rows.scores, rows.heatmaps):
        if array is not None:
            each = random.random((int(todo.sum()), *[1] * (array.ndim - 1)), dtype=np.float32)
            noise = each * random.random(array.shape[1:], dtype=np.float32)
            array[todo] = 0.8 * array[todo] + 0.2 * noise
    rows["last_epoch"][todo] = epoch
    store.save_shard(shard, rows)
    return int(todo.sum())


if __name__ == "__main__":
    print(fill(Path(sys.argv[1])))
