"""A writer to be killed: epochs through prefetch and writeback, commits in mid-epoch, a compaction.

Every row it writes is a pure function of (sample, epoch), so that whoever reads the store later can tell
what each row must hold from its visit stamp alone.
"""

import sys
from functools import partial
from pathlib import Path

import numpy as np

from bigscl.store import HeatmapStore, Prefetcher, Rows, ShardCache, Writeback
from bigscl.store.errors import NotAStore
from tests.test_store.conftest import all_ids, make_annotations, values_of_rows

NUM_CLASSES, SIZE, TOP, EPOCHS = 30, 6, 5, 12
COMPACT_AFTER = 3
ANNOTATIONS = make_annotations((24, 20, 24, 7, 24, 24), NUM_CLASSES)


values_of = partial(values_of_rows, NUM_CLASSES, SIZE)


def main(path, acknowledged):
    try:
        HeatmapStore.open(path)
    except NotAStore:
        HeatmapStore.create(path, ANNOTATIONS, heatmap_size=SIZE, history_samples=3)
    store = HeatmapStore.open(path, annotations=ANNOTATIONS, mode="w", run="crash", patience_seconds=5)
    print("ready", flush=True)
    while store.snapshot.epoch < EPOCHS:
        epoch = int(store.snapshot.attributes.get("next", 0))
        if epoch == COMPACT_AFTER and store.group.layout == "dense":
            store.compact(TOP)
            store.drop_snapshots()
        train(store, epoch, acknowledged)
    print("done", flush=True)


def train(store, epoch, acknowledged):
    left = all_ids(ANNOTATIONS)[store.last_epochs()[all_ids(ANNOTATIONS)] != epoch]
    order = np.random.default_rng(epoch).permutation(left)
    batches = np.array_split(order, max(1, len(order) // 8))
    with (
        ShardCache(store, epoch, limit_bytes=0) as cache,
        Prefetcher(cache) as prefetcher,
        Writeback(cache) as writeback,
    ):
        for step, (ids, rows) in enumerate(prefetcher.pair(batches, lambda ids: ids)):
            scores, heatmaps = values_of(ids, epoch, rows.classes)
            others = {"sample_visits": rows["sample_visits"], "cell_visits": rows["cell_visits"]}
            writeback.put(ids, Rows(scores=scores, heatmaps=heatmaps, **others))
            if step % 5 == 4:
                commit(store, writeback, acknowledged, epoch, next_epoch=epoch)
        commit(store, writeback, acknowledged, epoch, next_epoch=epoch + 1)


def commit(store, writeback, acknowledged, epoch, next_epoch):
    writeback.drain()
    snapshot = store.commit(epoch=epoch, attributes={"next": next_epoch})
    acknowledged.write_text(f"{snapshot.id} {int((store.last_epochs() == epoch).sum())} {epoch}")
    store.drop_snapshots(keep=[snapshot.parent])


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
