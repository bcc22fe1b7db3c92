"""A small run to try the tools on: real scenes, and a store with blobs of heat where the digits are."""

from functools import cache
from pathlib import Path

import numpy as np

from bigscl.data.index import Index, load_index
from bigscl.data.reader import read_metadata
from bigscl.data.scan import scan
from bigscl.datasets.scenes import scenes
from bigscl.datasets.writing import write
from bigscl.selection.selection import expected_counts, select
from bigscl.store import GroupSpec, HeatmapStore, SingleProcess, Update, update

SIDE = 12
K = 2.5


def make_shards(folder: Path, train: int = 30, samples_per_shard: int = 8) -> Index:
    """Shards of scenes below `folder`, indexed; their boxes say where every digit is."""
    drawn = scenes({"single": 1, "train": train, "val": 1, "test": 1}, 0, samples_per_shard)
    for _ in write(drawn, folder):
        pass
    index, problems = scan(sorted(map(str, folder.glob("train-*.tar"))), class_names=drawn.classes)
    assert not problems
    index.save(folder / "bigscl-index-train.npz")
    return load_index(str(folder / "train-*.tar"))


def make_store(
    url,
    index: Index,
    *,
    epochs: int = 3,
    skill: float = 1.0,
    top: int | None = None,
    tracked=6,
    options=None,
    **layout,
) -> None:
    """A store that an imaginary network filled: it sees every digit, unannotated ones later and less.

    With `top`, it was compacted after the first epoch.
    """
    annotations = index.annotations()
    HeatmapStore.create(
        url,
        annotations,
        heatmap_size=SIDE,
        group=GroupSpec(**layout),
        tracked=tracked,
        options=options,
    )
    random = np.random.default_rng(1)
    with HeatmapStore.open(
        url, annotations=annotations, mode="w", run="quickstart", options=options
    ) as store:
        for epoch in range(epochs):
            learn(store, index, epoch, skill * (epoch + 1) / epochs, random)
            store.drop_snapshots(keep=[store.snapshot.id - 1])
            store.record_history(epoch)
            if epoch == 0 and top is not None:
                store.compact(top)


def learn(store: HeatmapStore, index: Index, epoch: int, skill: float, random) -> None:
    """One epoch of looks at every sample, a selection, and a commit."""
    ids = index.ids()
    annotated, present = index.labels_of(ids) == 1, index.labels_of(ids, "labels") == 1
    belief = np.where(annotated, 0.7 + 0.25 * skill, np.where(present, 0.1 + 0.6 * skill, 0.05))
    scores = (belief * random.uniform(0.8, 1.0, belief.shape)).astype(np.float16)
    heatmaps = None
    if store.group.layout != "scores":
        heatmaps = blobs(scores, centres(index))
        if (classes := store.read(ids).classes) is not None:
            heatmaps = np.take_along_axis(heatmaps, classes[:, :, None, None], 1)
    values = {"scores": scores, "heatmaps": heatmaps}
    values["visits"] = np.full(len(ids), epoch + 1, np.uint8)
    if heatmaps is not None:
        values["counts"] = np.full((len(ids), SIDE, SIDE), epoch + 1, np.uint8)
    update(store, epoch, ids, Update(**values))
    chosen = select(
        store.scores_by_shard(range(store.spec.num_shards)),
        expected_counts(index.annotations().counts(), K),
        SingleProcess(),
    )
    store.commit(
        epoch=epoch, step=10 * (epoch + 1), attributes={"selection": chosen.to_json(), "skipped": []}
    )


@cache
def centres(index: Index):
    """Where the middle of each class's digit is, in cells, `[n,L,2]`; absent ones at the upper left."""
    found = np.full((index.num_samples, index.num_classes, 2), 1.0)
    metadata = read_metadata(index, index.ids())
    for place, sample in enumerate(index.ids().tolist()):
        for number, x0, y0, x1, y1 in metadata[sample]["boxes"]:
            found[place, number] = (y0 + y1) / 2 * SIDE - 0.5, (x0 + x1) / 2 * SIDE - 0.5
    return found


def blobs(strength, centre):
    """A round patch of each class's strength at its place."""
    y, x = np.mgrid[0:SIDE, 0:SIDE]
    distance = (y - centre[..., :1, None]) ** 2 + (x - centre[..., 1:, None]) ** 2
    return (strength[..., None, None] * np.exp(-distance / 6)).astype(np.float16)
