"""Pure parts of the layout against slow, obvious references."""

from dataclasses import fields

import numpy as np
import pytest

from bigscl.store import Rows, Update
from bigscl.store.array_table import ARRAYS
from bigscl.store.layout import choose_classes


@pytest.mark.parametrize("num_columns", [5, 300_000])
def test_the_classes_chosen_are_the_annotated_then_the_highest_ties_to_the_lowest(num_columns):
    random = np.random.default_rng(0)
    # Few different scores, so that most rows have ties at the cut; so many columns need wider keys.
    scores = (random.integers(0, 4, (6, num_columns)) / 4).astype(np.float16)
    annotated = np.zeros(scores.shape, bool)
    annotated[np.arange(6), random.integers(0, num_columns, 6)] = True
    annotated[:3, num_columns - 1] = True
    chosen = choose_classes(scores, annotated, 3)
    for row, found in enumerate(chosen):
        keys = (np.arange(num_columns), -scores[row].astype(float), ~annotated[row])
        assert found.tolist() == sorted(np.lexsort(keys)[:3].tolist())


def test_every_array_of_the_table_is_a_field_of_rows_and_every_updated_one_of_update():
    assert {field.name for field in fields(Rows)} == set(ARRAYS)
    assert {field.name for field in fields(Update)} == {
        name for name, array in ARRAYS.items() if array.updated
    }


@pytest.mark.parametrize("kept", [None, 3])
def test_heatmaps_of_finds_the_class_in_its_row_or_gives_zeros(kept):
    rng = np.random.default_rng(0)
    num_rows, num_classes = 6, 8
    classes = kept and np.sort(rng.permuted(np.tile(np.arange(num_classes), (num_rows, 1)), axis=1)[:, :kept])
    heatmaps = rng.random((num_rows, kept or num_classes, 2, 2)).astype(np.float16)
    rows = Rows(
        scores=np.zeros((num_rows, num_classes), np.float16),
        visited=np.zeros(num_rows, np.int32),
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
