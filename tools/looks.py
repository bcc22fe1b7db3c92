"""The looks that the cells of heatmaps have had, computed again for stores that did not count them.

A view is a pure function of seed, epoch and sample, so the views of all visits are drawn again. Every epoch
up to a sample's last one counts: earlier revisions did not note which of them had skipped it.
"""

# Shapes: R rows of a shard, W side of a heatmap.

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from bigscl.store import MAX_COUNT, Array, Rows
from bigscl.user_error import UserError

if TYPE_CHECKING:
    from bigscl.config import Config
    from bigscl.data.index import Index


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Looks:
    """Counts the looks of a run."""

    config: "Config"
    index: "Index"
    heatmap_size: int

    def of_shard(self, shard: int, rows: Rows) -> Array:
        """Return the looks of all cells of a shard's rows, uint8 [R,W,W]."""
        import torch

        from bigscl.method.heatmaps import covered

        config, first = self.config, shard * self.index.rows_per_shard
        # Until the top classes are chosen there may be no heatmaps.
        begin = (config.compact_after or 0) if config.store.warmup_heatmaps == "scores" else 0
        epochs = range(begin, int(rows.visited.max(initial=-1)) + 1)
        transforms = [config.data.training_transform(config.seed, epoch) for epoch in epochs]
        counts = np.zeros((len(rows), self.heatmap_size, self.heatmap_size), np.uint8)
        for sample_id, width, height in self._sizes(first + np.flatnonzero(rows.visited >= begin)):
            place = sample_id - first
            seen = [
                transform.geometry(sample_id, width=width, height=height)
                for transform in transforms[: rows.visited[place] + 1 - begin]
            ]
            views, erased = (torch.tensor(boxes, dtype=torch.float32) for boxes in zip(*seen, strict=True))
            looks = covered(views, self.heatmap_size, erased).sum(0)
            counts[place] = looks.clamp(max=MAX_COUNT).numpy()
        return counts

    def _sizes(self, ids: NDArray[np.int64]) -> Iterator[tuple[int, int, int]]:
        """Yield (id, width, height) of images of one shard."""
        from bigscl.data.headers import image_size
        from bigscl.data.plan import Stream
        from bigscl.data.reader import encoded_images
        from bigscl.data.sources import Unreadable

        stream = Stream(shards=np.unique(ids // self.index.rows_per_shard), ids=ids)
        for sample_id, content in encoded_images(self.index, stream, allow_pipe=self.config.data.allow_pipe):
            try:
                if isinstance(content, Unreadable):
                    raise content
                yield sample_id, *image_size(content)
            except Unreadable as error:
                raise UserError(
                    f"{self.index.name(sample_id)}: {error}. Its size is needed to count the looks of its "
                    f"heatmaps: restore the shards that the run was trained on."
                ) from error
