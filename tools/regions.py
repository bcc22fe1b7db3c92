"""The box around the strongest region of a heatmap."""

# Shapes: n heatmaps, W their side.

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bigscl.store import Array


def strongest_boxes(heatmaps: Array, share: float = 0.5) -> NDArray[np.float64]:
    """Return `[n,4]` (x0, y0, x1, y1) in 0..1: the box around the connected cells at the peak of each map.

    Cells are connected if they share an edge and have at least `share` of the peak. The box of a map of zeros
    is NaN.
    """
    # Maps last: then every shift by a cell is over long contiguous rows, six times faster than maps first.
    values = np.ascontiguousarray(heatmaps.transpose(1, 2, 0), dtype=np.float32)
    side, _, num_maps = values.shape
    flat = values.reshape(side * side, num_maps)
    peaks = flat.max(axis=0)
    region = np.zeros(flat.shape, bool)
    region[flat.argmax(axis=0), np.arange(num_maps)] = True
    region = _grown(region.reshape(values.shape), values >= share * peaks)
    columns, rows = np.asarray(region.any(axis=0)), np.asarray(region.any(axis=1))
    edges = [_first(columns), _first(rows), side - _first(columns[::-1]), side - _first(rows[::-1])]
    boxes: NDArray[np.float64] = np.stack(edges, axis=1) / side
    boxes[peaks <= 0] = np.nan
    return boxes


def _grown(region: NDArray[np.bool_], hot: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return all hot cells that are connected to the region, for all maps `[W,W,n]` at once."""
    while True:
        wider = region.copy()
        wider[1:] |= region[:-1]
        wider[:-1] |= region[1:]
        wider[:, 1:] |= region[:, :-1]
        wider[:, :-1] |= region[:, 1:]
        wider &= hot
        if np.array_equal(wider, region):
            return region
        region = wider


def _first(mask: NDArray[np.bool_]) -> NDArray[np.int64]:
    return np.asarray(mask.argmax(axis=0))


SHARES = tuple(round(0.1 + 0.05 * step, 2) for step in range(17))
"""Shares of the peak that are tried: 0.1 to 0.9."""


def overlaps(found: NDArray[np.float64], boxes: Sequence[Sequence[Sequence[float]]]) -> NDArray[np.float64]:
    """Return for each box found its intersection over union with the best of the true boxes of its map.

    Without a box (NaN) it is 0.
    """
    pairs = zip(found, boxes, strict=True)
    values = [max((_overlap(one, box) for box in true), default=0.0) for one, true in pairs]
    return np.array(values, np.float64)


def _overlap(one: Sequence[float] | NDArray[np.float64], other: Sequence[float]) -> float:
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    if not (width > 0 and height > 0):  # also if one of them is NaN
        return 0.0
    areas = [(box[2] - box[0]) * (box[3] - box[1]) for box in (one, other)]
    return float(width * height / (sum(areas) - width * height))


def best_share(heatmaps: Array, boxes: Sequence[Sequence[Sequence[float]]]) -> float:
    """Return the share of the peak at which the strongest boxes fit the true ones best, in the mean."""
    means = [overlaps(strongest_boxes(heatmaps, share), boxes).mean() for share in SHARES]
    return SHARES[int(np.argmax(means))]
