"""The history of tracked samples: damage to it is noticed, and stops nothing."""

import numpy as np
import pytest

from bigscl.store import HeatmapStore, history_faults, update
from bigscl.store.backends.backend import open_backend
from tests.test_store.conftest import all_ids, random_update


def record_epoch(store, annotations, epoch):
    ids = all_ids(annotations)
    update(store, epoch, ids, random_update(store, len(ids), seed=epoch))
    store.commit(epoch=epoch)
    store.drop_snapshots()
    store.record_history(epoch)


@pytest.fixture
def recorded(tmp_path, annotations):
    """(backend, what opens the store for writing) of a store with two epochs of history."""
    url = tmp_path / "store"
    HeatmapStore.create(url, annotations, heatmap_size=4, history_samples=[0, 6])

    def writer():
        return HeatmapStore.open(url, annotations=annotations, mode="w", run="run")

    with writer() as store:
        for epoch in range(2):
            record_epoch(store, annotations, epoch)
    return open_backend(url), writer


def damage(backend, key, place):
    data = bytearray(backend.read(key))
    data[place] ^= 1
    backend.replace(key, bytes(data))


NAMES = [
    "history/zarr.json",
    *(f"history/{name}/zarr.json" for name in ("scores", "heatmaps", "cell_visits")),
]


@pytest.mark.parametrize("name", NAMES)
def test_damaged_metadata_is_found_and_written_again(recorded, annotations, caplog, name):
    backend, writer = recorded
    before = backend.read(name)
    damage(backend, name, before.index(b"history_samples" if name == NAMES[0] else b"shape"))
    with writer() as store:
        (fault,) = history_faults(backend, store.spec)
        assert fault[0] == name
        assert set(store.history(6)) == {0, 1}
        for epoch in (2, 3):
            record_epoch(store, annotations, epoch)
        assert set(store.history(6)) == {0, 1, 2, 3}
        assert not list(history_faults(backend, store.spec))
    assert backend.read(name) == before
    assert [record.getMessage() for record in caplog.records if "written again" in record.getMessage()] == [
        f"{backend.url}/{name}: {fault[1]}. Its metadata is written again"
    ]


@pytest.mark.parametrize("name", ["scores/c.1.0.0", "heatmaps/c.1.0.0.0.0", "cell_visits/c.1.0.0.0"])
def test_a_damaged_epoch_is_left_out_and_found(recorded, annotations, caplog, name):
    backend, writer = recorded
    damage(backend, f"history/{name}", 3)
    with writer() as store:
        (fault,) = history_faults(backend, store.spec)
        assert fault[0] == f"history/{name}"
        assert set(store.history(6)) == {0}
        assert "epoch 1 is left out" in caplog.text
        record_epoch(store, annotations, 1)
        assert set(store.history(6)) == {0, 1}
        np.testing.assert_array_equal(store.history(6)[1].scores, store.read([6]).scores)
