import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from bigscl.tools.shared.label_table import best_share, overlaps, strongest_boxes


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


def test_overlap_is_the_intersection_over_the_union_with_the_best_box():
    found = np.array([[0.0, 0.0, 0.5, 0.5], [0.0, 0.0, 0.5, 0.5], [np.nan] * 4])
    boxes = [[[0.25, 0.0, 0.75, 0.5], [0.9, 0.9, 1.0, 1.0]], [[0.5, 0.5, 1.0, 1.0]], [[0.0, 0.0, 1.0, 1.0]]]
    assert overlaps(found, boxes).tolist() == pytest.approx([1 / 3, 0, 0])


def test_the_best_share_gives_the_true_boxes():
    heatmap = np.zeros((1, 8, 8), np.float32)
    heatmap[0, 1:7, 1:7] = 0.3
    heatmap[0, 2:6, 2:6] = 0.6
    heatmap[0, 3, 3] = 1
    assert best_share(heatmap, [[[0.25, 0.25, 0.75, 0.75]]]) > 0.3
    assert best_share(heatmap, [[[0.25, 0.25, 0.75, 0.75]]]) <= 0.6
    assert best_share(heatmap, [[[0.125, 0.125, 0.875, 0.875]]]) <= 0.3
