"""Small stores of every kind, on every backend."""

import uuid
from types import SimpleNamespace

import numpy as np
import pytest

from bigscl.store import Annotations, HeatmapStore, Ragged, Rows
from bigscl.store.backends.backend import forget_memory


def make_annotations(shard_sizes=(5, 3, 4), num_classes=7, seed=0, fingerprint="data-1"):
    """One to three positives per sample; rows past a shard's size have none."""
    rng = np.random.default_rng(seed)
    rows = max(shard_sizes)
    positives = [
        np.sort(rng.choice(num_classes, rng.integers(1, min(3, num_classes) + 1), replace=False))
        if position < size
        else np.empty(0, np.int64)
        for size in shard_sizes
        for position in range(rows)
    ]
    return Annotations(
        fingerprint=fingerprint,
        num_classes=num_classes,
        rows_per_shard=rows,
        shard_sizes=np.array(shard_sizes, np.int64),
        given=Ragged.from_lengths(
            np.array([len(p) for p in positives]), np.concatenate(positives).astype(np.int64)
        ),
    )


def all_ids(annotations):
    """Every real sample."""
    rows = annotations.rows_per_shard
    return np.concatenate([np.arange(s * rows, s * rows + n) for s, n in enumerate(annotations.shard_sizes)])


def random_update(store, count, seed):
    """Values in [0, 1] of the shapes the store's layout takes."""
    rng = np.random.default_rng(seed)
    size, group = store.spec.heatmap_size, store.group
    num_classes, kept = store.spec.num_classes, store.spec.top_scores
    update = {"scores": rng.random((count, kept or num_classes)).astype(np.float16)}
    if kept is not None:
        order = rng.permuted(np.tile(np.arange(num_classes), (count, 1)), axis=1)
        update["score_classes"] = np.sort(order[:, :kept], axis=1).astype(np.uint16)
        update["score_floor"] = update["scores"].min(axis=1)
    if group.layout != "scores":
        maps = store.spec.num_classes if group.layout == "dense" else group.top
        update["heatmaps"] = rng.random((count, maps, size, size)).astype(np.float16)
        update["cell_visits"] = rng.integers(0, 255, (count, size, size)).astype(np.uint8)
        if group.spatial_score:
            update["spatial_score"] = rng.random((count, maps)).astype(np.float16)
    update["sample_visits"] = rng.integers(0, 255, count).astype(np.uint8)
    return Rows(**update)


def values_of_rows(num_classes, size, ids, epoch, classes=None):
    """(scores, heatmaps) of some samples in an epoch; heatmaps of all classes, or of those given per row.

    Whoever reads a row can tell from its visit stamp alone what it must hold.
    """
    seeds = np.asarray(ids, np.int64)[:, None] * 1009 + epoch * 7919
    scores = ((seeds + np.arange(num_classes) * 31) % 997 / 997).astype(np.float16)
    chosen = np.broadcast_to(np.arange(num_classes), scores.shape) if classes is None else classes
    cells = np.arange(size * size).reshape(size, size)
    maps = (seeds[:, :, None, None] + chosen[:, :, None, None].astype(np.int64) * 17 + cells * 3) % 991 / 991
    return scores, maps.astype(np.float16)


def assert_same_rows(found, expected):
    """Bit for bit, array by array."""
    assert dict(found).keys() == dict(expected).keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


@pytest.fixture(params=["file", "memory", "s3"])
def place(request, tmp_path):
    """(url, options) of an empty place of each kind."""
    name = uuid.uuid4().hex
    if request.param == "file":
        yield str(tmp_path / name), None
    elif request.param == "s3":
        yield f"s3://bucket/{name}", request.getfixturevalue("s3_options")
    else:
        yield f"memory://{name}", None
        forget_memory(f"memory://{name}")


@pytest.fixture
def annotations():
    return make_annotations()


@pytest.fixture
def store(tmp_path, annotations):
    """A dense store on disk, open for writing."""
    HeatmapStore.create(tmp_path / "store", annotations, heatmap_size=4)
    with HeatmapStore.open(tmp_path / "store", annotations=annotations, mode="w", run="test") as opened:
        yield opened


@pytest.fixture
def clock(monkeypatch):
    """The clock of pauses, which takes no time: its `seconds`, and what to call after each pause."""
    ticking = SimpleNamespace(seconds=0.0, after_pause=lambda: None)

    def sleep(seconds):
        ticking.seconds += seconds
        ticking.after_pause()

    fake = SimpleNamespace(monotonic=lambda: ticking.seconds, sleep=sleep)
    monkeypatch.setattr("bigscl.store.threads.time", fake)
    return ticking
