"""Build what tests need: images, tars, shards with their index, configs, stores that were trained on."""

import fcntl
import io
import json
import os
import tarfile
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from bigscl.config import Config, make_config
from bigscl.data.build_index import scan
from bigscl.data.index import Index, load_index
from bigscl.data.loader import Batch
from bigscl.data.read_samples import read_metadata
from bigscl.datasets.scenes import scenes
from bigscl.datasets.writer import write
from bigscl.selection.ranking import select
from bigscl.selection.thresholds import expected_counts
from bigscl.store import GroupSpec, HeatmapStore, Rows, SingleProcess, update

DATA = Path(__file__).parent.parent.parent / "shared" / "data"
VOC = DATA / "voc2012"
WDS = DATA / "wds_real"
real_data = pytest.mark.skipif(not DATA.exists(), reason="real data: ../shared/data is not there")
SIDE = 12
"""Side of the heatmaps in stores that `make_store` fills."""
SCENES = (150, 16, 12)
"""Training images, images per shard and validation images of the fixture `shards`."""
K = 2.5

# Images and tars


def picture(seed: int, width: int = 40, height: int = 30) -> Image.Image:
    """A smooth picture, different for each seed."""
    small = np.random.default_rng(seed).integers(0, 256, (4, 5, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


def encoded(image: Image.Image, kind: str = "JPEG", **options) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def jpeg(seed: int, width: int = 40, height: int = 30) -> bytes:
    return encoded(picture(seed, width, height), quality=90)


def write_tar(path: Path, members: list[tuple[str, bytes]], mode: str = "w") -> Path:
    with tarfile.open(path, mode) as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def labelled(key: str, seed: int, **fields) -> list[tuple[str, bytes]]:
    """The members of a sample with a json."""
    return [(f"{key}.jpg", jpeg(seed)), (f"{key}.json", json.dumps(fields).encode())]


def classed(key: str, seed: int, label: int) -> list[tuple[str, bytes]]:
    """The members of a sample with a class number."""
    return [(f"{key}.jpg", jpeg(seed)), (f"{key}.cls", str(label).encode())]


def write_shards(folder: Path, sizes: list[int], num_classes: int = 5) -> list[str]:
    """Shards train-000000.tar and so on, of single-label samples with unique keys."""
    first = np.cumsum([0, *sizes])
    paths = []
    for shard, size in enumerate(sizes):
        rows = [first[shard] + n for n in range(size)]
        members = [member for n in rows for member in classed(f"k{n:04d}", int(n), int(n) % num_classes)]
        paths.append(str(write_tar(folder / f"train-{shard:06d}.tar", members)))
    return paths


def make_batch(ids, images, labels, **others) -> Batch:
    """Samples that show their whole images."""
    ids = torch.as_tensor(ids, dtype=torch.int64)
    whole = torch.tensor([[0.0, 0.0, 1.0, 1.0, 0.0]]).repeat(len(ids), 1)
    none = torch.zeros(0, dtype=torch.int64)
    return Batch(**{"ids": ids, "images": images, "labels": labels, "views": whole, "skipped": none} | others)


# Shards of scenes, with their index


def make_shards(folder: Path, train: int, samples_per_shard: int, val: int = 1) -> Path:
    """A folder of indexed scenes of digits."""
    drawn = scenes({"single": 1, "train": train, "val": val, "test": 1}, 0)
    drawn = replace(drawn, samples_per_shard=samples_per_shard)
    for _ in write(drawn, folder):
        pass
    for part in ("train", "val"):
        tars = sorted(map(str, folder.glob(f"{part}-*.tar")))
        index, problems = scan(tars, class_names=drawn.classes)
        assert not problems
        index.save(folder / f"bigscl-index-{part}.npz")
    return folder


def index_of(shards: Path) -> Index:
    return load_index(str(shards / "train-*.tar"))


def scene_index(folder: Path, train: int = 30, samples_per_shard: int = 8) -> Index:
    """Return the index of new shards below `folder`; their boxes say where every digit is."""
    return index_of(make_shards(folder, train, samples_per_shard))


def make_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Return a folder that `make` has filled: the first worker to ask makes it, the others wait for it.

    Tests only read what is in it.
    """
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / f"shared-{name}"
    done = folder.with_suffix(".done")
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            folder.mkdir()
            make(folder)
            done.touch()
    return folder


def shared_shards(factory: pytest.TempPathFactory, train: int, samples_per_shard: int, val: int = 1) -> Path:
    """Return a folder of indexed scenes that all workers of the session share."""
    name = f"scenes-{train}-{samples_per_shard}-{val}"
    return make_once(factory, name, lambda folder: make_shards(folder, train, samples_per_shard, val))


# Configs


TWO_EPOCHS = {
    "warmup": {"epochs": 1, "learning_rate": 1e-2, "decay": "constant"},
    "main": {"epochs": 1, "learning_rate": 2e-3},
}


def settings(shards: Path) -> dict[str, Any]:
    """EN + SCL with everything the paper does, in 3 epochs: a warm-up, compaction, and the whole network."""
    return {
        "data": {
            "train": str(shards / "train-*.tar"),
            "size": 48,
            "batch_size": 8,
            "workers": 1,
            "shuffle_buffer": 40,
            "crop": {"scale": [0.25, 1.0]},
        },
        "model": {"backbone": "tests.integration.tiny:tiny_net"},
        "objective": {"gamma": {"epochs": 2}},
        "selection": {"K": 2.5},
        "store": {"top": 4, "slots": 4},
        "schedule": {**TWO_EPOCHS, "main": {"epochs": 2, "learning_rate": 2e-3}},
        "optimizer": {"weight_decay": 1e-4},
        "log": {"trackers": [], "pictures_every": 0, "every_steps": 1},
    }


def config_of(**sections: Any) -> Config:
    """The config of a run that no test starts, some of whose sections have these values."""
    values = {
        "run": "run",
        "data": {"train": "shards"},
        "model": {"backbone": "resnet18"},
        "selection": {"K": 2},
    }
    for name, changes in sections.items():
        values[name] = {**values.get(name, {}), **changes} if isinstance(changes, dict) else changes
    return make_config(values)


def write_config(path: Path, shards: Path, **sections: dict[str, Any]) -> Path:
    """A config file of `settings`, some of whose sections have other values."""
    values = settings(shards)
    for section, changes in sections.items():
        values[section] = {**values.get(section, {}), **changes}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump({"run": str(path.with_suffix("")), **values}))
    return path


# Stores


def make_store(
    url,
    index: Index,
    *,
    epochs: int = 3,
    skill: float = 1.0,
    top: int | None = None,
    history_samples=6,
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
        history_samples=history_samples,
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
    annotated, present = index.labels_of(ids) == 1, index.labels_of(ids, "full") == 1
    belief = np.where(annotated, 0.7 + 0.25 * skill, np.where(present, 0.1 + 0.6 * skill, 0.05))
    scores = (belief * random.uniform(0.8, 1.0, belief.shape)).astype(np.float16)
    values = {"scores": scores, "sample_visits": np.full(len(ids), epoch + 1, np.uint8)}
    if store.group.layout != "scores":
        heatmaps = blobs(scores, centres(index))
        if (classes := store.read(ids).classes) is not None:
            heatmaps = np.take_along_axis(heatmaps, classes[:, :, None, None], 1)
        values["heatmaps"] = heatmaps
        values["cell_visits"] = np.full((len(ids), SIDE, SIDE), epoch + 1, np.uint8)
    update(store, epoch, ids, Rows(**values))
    chosen = select(
        store.scores_by_shard(range(store.spec.num_shards)),
        expected_counts(index.annotations().counts(), K),
        SingleProcess(),
    )
    store.commit(
        epoch=epoch,
        step=10 * (epoch + 1),
        attributes={"selection": chosen.to_json(), "next_epoch": epoch + 1, "skipped": []},
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
