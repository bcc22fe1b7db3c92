"""Heatmaps without what is left of their initial values, and who is given with what."""

import numpy as np
import pytest
import torch

from bigscl.memory import heatmaps as method
from bigscl.store import GroupSpec, HeatmapStore, Rows, update
from tests.test_store.conftest import all_ids, make_annotations, random_update

ANNOTATIONS = make_annotations()
IDS = all_ids(ANNOTATIONS)


def positives_of(row):
    return set(ANNOTATIONS.given[row].tolist())


def test_annotations_know_which_classes_a_row_has():
    rows, classes = np.meshgrid(np.arange(len(ANNOTATIONS.given)), np.arange(7), indexing="ij")
    slow = [[number in positives_of(row) for number in range(7)] for row in range(len(rows))]
    np.testing.assert_array_equal(ANNOTATIONS.is_given(rows, classes), slow)
    assert ANNOTATIONS.is_given(np.empty(0, np.int64), np.empty(0, np.int64)).shape == (0,)


@pytest.mark.parametrize("debiased", [False, True])
@pytest.mark.parametrize("layout", ["dense", "topk"])
def test_evidence_equals_that_of_the_method(tmp_path, layout, debiased):
    """The trainer takes the start out with torch, readers with numpy."""
    HeatmapStore.create(
        tmp_path / "store",
        ANNOTATIONS,
        heatmap_size=4,
        history_samples=[0, 6],
        group=GroupSpec(layout=layout, top=4 if layout == "topk" else None, debiased=debiased),
    )
    with HeatmapStore.open(tmp_path / "store", annotations=ANNOTATIONS, mode="w", run="test") as store:
        values = dict(random_update(store, len(IDS), 0))
        values["cell_visits"] %= 5
        update(store, 0, IDS, Rows(**values))
        store.commit(epoch=0, attributes={"momentum": 0.7})
        store.record_history(0)
    store = HeatmapStore.open(tmp_path / "store", annotations=ANNOTATIONS)
    raw, seen = store.read(IDS), store.read_without_initial_value(IDS)
    kept = raw.kept_classes().astype(np.int64)
    given = ANNOTATIONS.is_given(np.repeat(IDS[:, None], kept.shape[1], 1), kept)
    remaining = method.remaining_start(torch.from_numpy(raw["cell_visits"]), 0.7, debiased=debiased)
    expected = method.without_initial_value(
        torch.from_numpy(raw.heatmaps), torch.from_numpy(given), remaining
    )
    np.testing.assert_allclose(seen.heatmaps, expected.numpy(), atol=1e-3)
    assert (seen.heatmaps[given] != raw.heatmaps[given]).any()
    np.testing.assert_array_equal(seen.heatmaps[~given], raw.heatmaps[~given])
    for place in range(len(IDS)):
        for number in range(7):
            one = store.heatmaps_without_initial_value(raw, IDS, np.array([place]), np.array([number]))
            np.testing.assert_array_equal(one, seen.heatmaps_of(np.array([place]), np.array([number])))
    sample = store.history(6)[0]
    there = seen.take(np.flatnonzero(IDS == 6)).heatmaps_of(np.zeros(1, int), sample.classes[0])
    np.testing.assert_array_equal(sample.heatmaps[0], there)


@pytest.mark.parametrize("missing", ["momentum", "annotations"])
def test_heatmaps_are_shown_as_they_are_where_the_start_is_not_known(tmp_path, missing):
    HeatmapStore.create(tmp_path / "store", ANNOTATIONS, heatmap_size=4)
    with HeatmapStore.open(tmp_path / "store", annotations=ANNOTATIONS, mode="w", run="test") as store:
        update(store, 0, IDS, random_update(store, len(IDS), 0))
        store.commit(epoch=0, attributes={} if missing == "momentum" else {"momentum": 0.7})
    annotations = None if missing == "annotations" else ANNOTATIONS
    store = HeatmapStore.open(tmp_path / "store", annotations=annotations)
    np.testing.assert_array_equal(store.read_without_initial_value(IDS).heatmaps, store.read(IDS).heatmaps)
