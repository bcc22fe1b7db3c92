"""Rank classes of an image by what the heatmaps show of them, in place of the pooled score alone."""

# Shapes: B batch, L classes, C classes with a heatmap (all L, or the top k), W side of the heatmap.

import torch
from torch import Tensor

HOTTEST = 0.04
"""Share of the cells that speak for a class: an object is small, and its score map is hot where it is."""
DISCOUNT = 0.5
"""How much less a cell counts where the annotated class is hottest: that object explains it already."""


@torch.no_grad()
def spatial_ranking(scores: Tensor, heat: Tensor, annotated: Tensor, classes: Tensor | None = None) -> Tensor:
    """Return what each class with a heatmap is ranked by, float16 [B,C], in 0 to 1; annotated classes: 1.

    It is `sqrt(s * h)`, with s the score and h the mean of the hottest 4% of the cells of the heat, each
    times `1 - 0.5 a`, where a is the heat of the annotated class relative to its peak. Of several annotated
    classes the hottest counts in each cell. `scores` and `annotated` (bool) are [B,L]; `heat` is [B,C,W,W],
    of `classes` [B,C] if given.
    """
    if classes is not None:
        scores, annotated = scores.gather(1, classes), annotated.gather(1, classes)
    heat = heat.float()
    named = torch.where(annotated[:, :, None, None], heat, 0.0).amax(1, keepdim=True)
    relative = named / named.amax((2, 3), keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    cells = (heat * (1 - DISCOUNT * relative)).flatten(2)
    hottest = cells.topk(num_hottest(heat.shape[-1]), dim=2).values.mean(2)
    values = (scores.float() * hottest).clamp(0, 1).sqrt()
    return torch.where(annotated, 1.0, values).to(torch.float16)


def num_hottest(side: int) -> int:
    """Return how many cells are 4% of a heatmap, rounded, at least one."""
    return max(1, round(HOTTEST * side * side))
