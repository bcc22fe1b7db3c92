"""Rows reach the device with their values; threads choose the device of their rank first."""

import threading

import numpy as np
import pytest
import torch

from bigscl.data import loader as batches
from bigscl.data.loader import normalize
from bigscl.memory.lookup import GivenClasses, SampleViews, check_sample_views, to_device
from bigscl.selection.thresholds import Thresholds
from bigscl.store import HeatmapStore, Prefetcher, Rows, ShardCache, Writeback
from tests.test_store.conftest import make_annotations


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_classes_of_either_width_arrive_as_int64(dtype):
    largest = np.iinfo(dtype).max
    classes = np.array([[0, 1, largest], [7, largest // 2 + 1, 3]], dtype)
    rows = Rows(
        scores=np.zeros((2, 4), np.float16),
        last_epoch=np.array([-1, 4], np.int32),
        heatmaps=np.zeros((2, 3, 2, 2), np.float16),
        classes=classes,
        sample_visits=np.array([0, 5], np.uint8),
    )
    sample_views = check_sample_views(SampleViews([3, 8]))
    device = torch.device("cpu")
    annotated = GivenClasses(make_annotations(), device)
    stored = to_device(
        rows, sample_views, Thresholds.none(4).to(device), annotated, device=device, momentum=0.8
    )
    assert stored.classes.dtype == torch.int64
    np.testing.assert_array_equal(stored.classes.numpy(), classes.astype(np.int64))
    assert stored.arrays["sample_visits"].tolist() == [0, 5]


def test_constants_of_the_normalisation_are_made_once():
    images = torch.randint(0, 256, (2, 3, 4, 4), dtype=torch.uint8)
    normalize(images, (0.1, 0.2, 0.3), (0.5, 0.5, 0.5))
    made = batches._factor_and_offset.cache_info().misses
    normalize(images, [0.1, 0.2, 0.3], [0.5, 0.5, 0.5])
    assert batches._factor_and_offset.cache_info().misses == made


def test_threads_of_the_store_call_what_chooses_their_device_before_they_work(tmp_path):
    annotations = make_annotations()
    HeatmapStore.create(tmp_path / "store", annotations, heatmap_size=4)
    called = []

    def on_start():
        called.append(threading.current_thread().name)

    def allocate(shape, dtype):
        assert "store-prefetch" in called
        return np.empty(shape, dtype)

    ids = np.arange(2)
    with HeatmapStore.open(tmp_path / "store", annotations=annotations, mode="w", run="r") as store:
        with (
            ShardCache(store, 0) as cache,
            Writeback(cache, on_start=on_start) as writeback,
            Prefetcher(cache, allocate=allocate, on_start=on_start) as prefetcher,
        ):
            for _, rows in prefetcher.pair([ids], lambda batch: batch):
                update = Rows(
                    scores=rows.scores,
                    heatmaps=rows.heatmaps,
                    sample_visits=rows["sample_visits"],
                    cell_visits=rows["cell_visits"],
                )
                writeback.put(ids, update, ready=lambda: called.append("ready"))
            writeback.drain()
    assert set(called[:2]) == {"store-prefetch", "store-writeback"}
    assert called[2:] == ["ready"]
