"""Heatmaps as seen since their start: without what the running averages have left of initial values.

A heatmap starts at 1 for an annotated class. After n visits of a cell `mu^n` of that is left, which hides
what was seen wherever crops rarely look. Classes that are not annotated start at 0: nothing is taken out.
"""

# Shapes: N rows, L classes, W side of a heatmap.

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bigscl.store.format.annotations import Annotations
from bigscl.store.format.spec import Array, Rows


@dataclass(frozen=True, slots=True, kw_only=True)
class InitialValues:
    """How the averages of a store forget their initial values."""

    annotations: Annotations
    momentum: float
    debiased: bool

    def remaining(self, counts: Array) -> NDArray[np.float32]:
        """The weight that initial values still have in cells, by their visits."""
        visits = np.arange(np.iinfo(np.uint8).max + 1)
        weights = visits == 0 if self.debiased else self.momentum**visits
        return np.asarray(weights, np.float32)[counts]

    def heatmaps_without_initial_value(
        self, rows: Rows, ids: NDArray[np.int64], places: Array, classes: Array
    ) -> Array:
        """`rows.heatmaps_of(places, classes)` without initial values; `ids` are the samples of the rows."""
        maps = rows.heatmaps_of(places, classes)
        places, classes = np.broadcast_arrays(places, classes)
        named = self.annotations.includes(ids[places], classes)
        left = maps[named].astype(np.float32) - self.remaining(rows["cell_visits"][places[named]])
        maps[named] = np.maximum(left, 0)
        return maps

    def without_initial_value(self, rows: Rows, ids: NDArray[np.int64]) -> Rows:
        """The rows with heatmaps without initial values; `ids` are their samples."""
        if rows.heatmaps is None or "cell_visits" not in rows:
            return rows
        kept = rows.kept_classes().astype(np.int64)
        seen = self.heatmaps_without_initial_value(rows, ids, np.arange(len(rows))[:, None], kept)
        return rows.replace(heatmaps=seen)
