"""Pure parts of the layout against slow, obvious references."""

import numpy as np
import pytest

from bigscl.store import GroupSpec, Rows, initial_shard, spec_for
from bigscl.store.format.array_types import ARRAYS
from bigscl.store.format.layout import choose_classes
from tests.test_store.conftest import make_annotations


@pytest.mark.parametrize("num_columns", [5, 300_000])
def test_the_classes_chosen_are_the_given_then_the_highest_ties_to_the_lowest(num_columns):
    random = np.random.default_rng(0)
    # Few different scores, so that most rows have ties at the cut; so many columns need wider keys.
    scores = (random.integers(0, 4, (6, num_columns)) / 4).astype(np.float16)
    given = np.zeros(scores.shape, bool)
    given[np.arange(6), random.integers(0, num_columns, 6)] = True
    given[:3, num_columns - 1] = True
    chosen = choose_classes(scores, given, 3)
    for row, found in enumerate(chosen):
        keys = (np.arange(num_columns), -scores[row].astype(float), ~given[row])
        assert found.tolist() == sorted(np.lexsort(keys)[:3].tolist())


@pytest.mark.parametrize(
    "group", [GroupSpec(layout="topk", top=3, spatial_score=True), GroupSpec(), GroupSpec(layout="scores")]
)
def test_rows_carry_every_array_that_the_table_gives_a_layout(group):
    annotations = make_annotations()
    for spec in (spec_for(annotations, 4, 0), spec_for(annotations, 4, 0, 5)):
        rows = initial_shard(spec, group, annotations, 0)
        assert set(rows) == {name for name, array in ARRAYS.items() if array.exists(spec, group)}
        assert ("score_floor" in rows) == (spec.top_scores is not None)
    assert rows.take(slice(0, 2)).keys() == rows.keys()


@pytest.mark.parametrize("kept", [None, 3])
def test_heatmaps_of_finds_the_class_in_its_row_or_gives_zeros(kept):
    rng = np.random.default_rng(0)
    num_rows, num_classes = 6, 8
    classes = kept and np.sort(rng.permuted(np.tile(np.arange(num_classes), (num_rows, 1)), axis=1)[:, :kept])
    heatmaps = rng.random((num_rows, kept or num_classes, 2, 2)).astype(np.float16)
    rows = Rows(
        scores=np.zeros((num_rows, num_classes), np.float16),
        last_epoch=np.zeros(num_rows, np.int32),
        heatmaps=heatmaps,
        classes=classes,
    )
    places, wanted = (grid.ravel() for grid in np.indices((num_rows, num_classes)))
    found = rows.heatmaps_of(places, wanted)
    for place, number, heatmap in zip(places, wanted, found, strict=True):
        columns = np.flatnonzero(rows.kept_classes()[place] == number)
        expected = heatmaps[place, columns[0]] if len(columns) else np.zeros((2, 2))
        np.testing.assert_array_equal(heatmap, expected)
    everywhere = rows.heatmaps_of(
        np.arange(num_rows)[:, None], np.arange(num_classes)[None].repeat(num_rows, 0)
    )
    np.testing.assert_array_equal(everywhere.reshape(found.shape), found)
    assert found[0].any() or kept
