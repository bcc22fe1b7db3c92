import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from bigscl.tools.regions import strongest_boxes


def slow_box(heatmap, share):
    """Cell by cell, from the peak to its hot neighbours."""
    side = len(heatmap)
    if heatmap.max() <= 0:
        return None
    peak = np.unravel_index(heatmap.argmax(), heatmap.shape)
    reached, waiting = set(), [tuple(map(int, peak))]
    while waiting:
        row, column = waiting.pop()
        inside = 0 <= row < side and 0 <= column < side and (row, column) not in reached
        if inside and heatmap[row, column] >= share * heatmap.max():
            reached.add((row, column))
            waiting += [(row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1)]
    rows, columns = zip(*reached, strict=True)
    return [min(columns) / side, min(rows) / side, (max(columns) + 1) / side, (max(rows) + 1) / side]


@settings(max_examples=100, deadline=None)
@given(arrays.arrays(np.float32, (3, 6, 6), elements=st.sampled_from([0, 0.25, 0.375, 0.5, 0.75, 1])))
def test_boxes_are_those_of_a_walk_from_cell_to_cell(heatmaps):
    found = strongest_boxes(heatmaps)
    for box, heatmap in zip(found, heatmaps, strict=True):
        expected = slow_box(heatmap, 0.5)
        assert np.isnan(box).all() if expected is None else box.tolist() == pytest.approx(expected)


def test_a_second_hot_place_is_not_in_the_box():
    heatmap = np.zeros((1, 4, 8, 8), np.float16)[0]
    heatmap[0, 1:3, 5:7] = 0.9
    heatmap[0, 6, 1] = 0.8
    heatmap[0, 1, 5] = 1
    assert strongest_boxes(heatmap[:1]).tolist() == [[5 / 8, 1 / 8, 7 / 8, 3 / 8]]
