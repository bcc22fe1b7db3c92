"""The codec `uint8`: heatmaps of a byte per cell, rounded once and without bias."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigscl.store import Annotations, GroupSpec, HeatmapStore, Rows, stored_bytes, update
from bigscl.store.errors import BadFile, ChunkCorrupt
from bigscl.store.format.quantize import LEVELS, MISSING, from_bytes, rounded, to_bytes
from tests.test_store.conftest import all_ids, assert_same_rows, make_annotations, random_update
from tests.test_store.rounding_reference import LEVELS as SLOW_LEVELS
from tests.test_store.rounding_reference import slowly_rounded

EVERY_HALF = np.arange(np.float16(1).view(np.uint16) + 1, dtype=np.uint16).view(np.float16)


@given(
    values=st.lists(st.sampled_from(EVERY_HALF.tolist()), min_size=1, max_size=40),
    sample=st.integers(0, 2**40),
    epoch=st.integers(-1, 10_000),
)
def test_rounding_equals_the_slow_reference(values, sample, epoch):
    row = np.array([values], np.float16)
    np.testing.assert_array_equal(rounded(row, np.array([sample]), epoch), slowly_rounded(row, sample, epoch))


def test_every_value_goes_to_one_of_its_neighbours_and_levels_stay():
    assert LEVELS.tolist() == SLOW_LEVELS
    assert (len(LEVELS), LEVELS[0], LEVELS[-1]) == (MISSING, 0, 1)
    for epoch in range(5):
        found = rounded(EVERY_HALF[None], np.array([7]), epoch)[0]
        above = np.searchsorted(LEVELS, EVERY_HALF)
        exact = LEVELS[above] == EVERY_HALF
        below = np.where(exact, above, above - 1)
        assert ((found == LEVELS[above]) | (found == LEVELS[below])).all()
        np.testing.assert_array_equal(rounded(found[None], np.array([8]), epoch + 1)[0], found)


def test_bytes_and_levels_are_the_same_thing(monkeypatch):
    monkeypatch.setattr("bigscl.store.format.quantize.BLOCK", 100)
    np.testing.assert_array_equal(to_bytes(LEVELS), np.arange(MISSING))
    np.testing.assert_array_equal(from_bytes(np.arange(MISSING, dtype=np.uint8)), LEVELS)
    outside = np.array([-0.1, 1.001, np.nan, np.inf, -np.inf], np.float16)
    assert to_bytes(outside).tolist() == [MISSING] * 5
    assert np.isnan(from_bytes(np.array([MISSING], np.uint8))).all()


def test_a_sample_is_rounded_alike_in_any_batch(monkeypatch):
    monkeypatch.setattr("bigscl.store.format.quantize.BLOCK", 100)
    rng = np.random.default_rng(0)
    values, ids = rng.random((50, 3, 4, 4)).astype(np.float16), rng.permutation(1000)[:50]
    whole = rounded(values, ids, 3)
    order = rng.permutation(50)
    for part in np.array_split(order, 7):
        np.testing.assert_array_equal(rounded(values[part], ids[part], 3), whole[part])
    assert (rounded(values, ids, 4) != whole).mean() > 0.2


def test_running_averages_have_no_bias():
    """From 1 towards 0.003 with momentum 0.95; the nearest level would stop the average far above it."""
    ids, target = np.arange(400), np.float32(0.003)
    by_chance = nearest = np.ones((400, 16), np.float16)
    means = []
    for epoch in range(400):
        by_chance = rounded(
            (0.95 * by_chance.astype(np.float32) + 0.05 * target).astype(np.float16), ids, epoch
        )
        nearest = from_bytes(to_bytes((0.95 * nearest.astype(np.float32) + 0.05 * target).astype(np.float16)))
        means.append(by_chance.astype(np.float64).mean())
    assert np.mean(means[200:]) == pytest.approx(target, rel=0.01)
    assert nearest.max() > 2 * target


def make(tmp_path, annotations, heatmap_size=4, codec="uint8", **layout):
    group = GroupSpec(codec=codec, **layout)
    HeatmapStore.create(
        tmp_path / "store", annotations, heatmap_size=heatmap_size, group=group, history_samples=2
    )
    return HeatmapStore.open(tmp_path / "store", annotations=annotations, mode="w", run="test")


@pytest.mark.parametrize("layout", [{}, {"layout": "topk", "top": 3}], ids=str)
def test_rows_are_rounded_when_they_enter_and_never_again(tmp_path, annotations, layout):
    ids = all_ids(annotations)
    with make(tmp_path, annotations, **layout) as store:
        values = random_update(store, len(ids), seed=0)
        update(store, 5, ids, values)
        found = store.read(ids)
        for place, n in enumerate(ids):
            expected = slowly_rounded(values.heatmaps[place], int(n), 5)
            np.testing.assert_array_equal(found.heatmaps[place], expected)
        np.testing.assert_array_equal(found.scores, values.scores)
        store.commit(epoch=5)
        # The same values again, in a later epoch: nothing moves.
        again = {name: array for name, array in found.items() if name not in ("classes", "last_epoch")}
        update(store, 6, ids, Rows(**again))
        np.testing.assert_array_equal(store.read(ids).heatmaps, found.heatmaps)


def test_a_chunk_of_a_single_cell_comes_back(tmp_path):
    annotations = Annotations.of([[0], [0]], 1, rows_per_shard=1)
    with make(tmp_path, annotations, heatmap_size=1) as store:
        update(store, 0, np.arange(2), random_update(store, 2, seed=3))
        store.commit(epoch=0)
        before = store.read([0, 1])
    assert_same_rows(HeatmapStore.open(tmp_path / "store", annotations=annotations).read([0, 1]), before)


def test_missing_and_damaged_files_show(tmp_path, annotations):
    ids = all_ids(annotations)
    with make(tmp_path, annotations) as store:
        update(store, 0, ids, random_update(store, len(ids), seed=0))
        slot = store.commit(epoch=0).slots[1]
    folder = tmp_path / "store/arrays-000/heatmaps"
    (folder / f"c.{slot}.1.0.0.0.0").unlink()
    store = HeatmapStore.open(tmp_path / "store", annotations=annotations)
    with pytest.raises(ChunkCorrupt, match="missing"):
        store.load_shard(1)
    described = json.loads((folder / "zarr.json").read_text())
    described["attributes"]["values"][3] = 0.5
    (folder / "zarr.json").write_text(json.dumps(described))
    with pytest.raises(BadFile, match="values"):
        HeatmapStore.open(tmp_path / "store", annotations=annotations)


def test_values_outside_their_domain_are_damage_not_data(tmp_path, annotations):
    with make(tmp_path, annotations) as store:
        rows = store.load_shard(0)
        rows.heatmaps[0, 0, 0, 0] = np.nan
        store.save_shard(0, rows)
        with pytest.raises(ChunkCorrupt):
            store.load_shard(0)


def test_a_compacted_store_may_change_to_the_codec_and_back(tmp_path, annotations):
    ids = all_ids(annotations)
    with make(tmp_path, annotations, codec="none", layout="topk", top=4) as store:
        update(store, 2, ids, random_update(store, len(ids), seed=0))
        store.commit(epoch=2)
        before = store.read(ids)
        store.compact(4, codec="uint8")
        found = store.read(ids)
        for place, n in enumerate(ids):
            expected = slowly_rounded(before.heatmaps[place], int(n), 2)
            np.testing.assert_array_equal(found.heatmaps[place], expected)
        store.compact(4, codec="none")
        assert_same_rows(store.read(ids), found)


def test_heatmaps_that_start_at_their_scores_are_rounded_too(tmp_path, annotations):
    ids = all_ids(annotations)
    with make(tmp_path, annotations, layout="scores") as store:
        update(store, 0, ids, random_update(store, len(ids), seed=0))
        store.commit(epoch=0)
        store.compact(3)
        found = store.read(ids).heatmaps
        assert np.isin(found, LEVELS).all()
        np.testing.assert_array_equal(
            HeatmapStore.open(tmp_path / "store", annotations=annotations).read(ids).heatmaps, found
        )


def test_even_noise_takes_no_more_than_a_byte(tmp_path):
    annotations = make_annotations((200, 200), 8)
    ids = all_ids(annotations)
    with make(tmp_path, annotations, heatmap_size=10) as store:
        update(store, 0, ids, random_update(store, len(ids), seed=0))
        store.commit(epoch=0)
        size = sum(size for key, size in store.backend.sizes("arrays-000") if "zarr.json" not in key)
        assert size < 1.02 * 2 * stored_bytes(store.spec, store.group)
