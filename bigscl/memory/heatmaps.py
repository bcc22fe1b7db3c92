"""Heatmaps in view frames, score maps in image frames, and the running averages of both.

A view is a `ViewRow`: the crop box as fractions of the image, and 1 where the crop is mirrored left to
right. Cells are sampled at their centres, bilinearly, clamped at the edge. Bilinear
sampling on a grid is separable, so a batch costs two batched matmuls whatever the views.

Nothing here carries a gradient, and all of it runs in float32, under autocast too.
"""

# Shapes: B batch, C classes (all L, or the top k), G side of the score map, W side of the heatmap.

import torch
from torch import Tensor

from bigscl.data.crops import box_extents, box_origins, view_flips
from bigscl.store import MAX_COUNT


@torch.no_grad()
def to_view(heatmaps: Tensor, views: Tensor, size: int) -> Tensor:
    """Return heatmaps [B,C,W,W] in the frame of each view: cropped, flipped, resampled to [B,C,size,size].

    The result is float32. The whole heatmap is sampled: a cell just outside the crop affects a view cell at
    the crop's edge.
    """
    starts, extents = _box(views)
    positions_B2G = starts + extents * _centres(size, views)
    return _flip(_resample(heatmaps.float(), _weights(positions_B2G, heatmaps.shape[-1])), views)


@torch.no_grad()
def to_image(maps: Tensor, views: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return score maps [B,C,G,G] in the frame of the image, float32 [B,C,size,size], and a mask.

    The mask [B,size,size] is true for cells whose centre is in the crop; elsewhere the maps are undefined.
    `to_image` inverts `to_view` inside the mask, except at the crop's edge.
    """
    centres = _centres(size, views)
    weights = _weights(_relative(centres, views), maps.shape[-1])
    return _resample(_flip(maps.float(), views), weights), _within(centres, views)


@torch.no_grad()
def blend(
    heatmaps: Tensor,
    maps: Tensor,
    views: Tensor,
    momentum: float,
    *,
    erased: Tensor | None = None,
    counts: Tensor | None = None,
    debiased: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return (heatmaps, counts) after a visit; the heatmaps have their dtype.

    Where the view covers them they are `momentum * heatmaps + (1 - momentum) * maps`; other cells keep their
    bits. `erased` [B,4] are boxes (left, top, width, height) whose pixels were erased, as fractions of the
    network's input, so after the flip; cells whose centre is in one are not covered. A box without width or
    height erases nothing.

    `counts` are the earlier visits of each cell, uint8 [B,W,W]; they stop at MAX_COUNT. With `debiased`,
    which needs them, the momentum of n earlier visits is min(n / (n + 1), momentum), so the first visit
    replaces the initial value.
    """
    new, mask = to_image(maps, views, heatmaps.shape[-1])
    if erased is not None:
        # The image cells whose centre is in the erased box of the network's input.
        x, y = _relative(_centres(heatmaps.shape[-1], views), views).unbind(1)
        x = torch.where(_flipped(views)[:, None], 1 - x, x)
        mask &= ~_within(torch.stack([x, y], 1), erased)
    kept = momentum if counts is None or not debiased else _debiased(counts, momentum)[:, None]
    updated = (kept * heatmaps.float() + (1 - kept) * new).to(heatmaps.dtype)
    blended = torch.where(mask[:, None], updated, heatmaps)
    return blended, None if counts is None else counts + (mask & (counts < MAX_COUNT))


@torch.no_grad()
def outside(boxes: Tensor, size: int) -> Tensor:
    """Return which cells of a view, bool [B,size,size], have their centre in no box [B,4] of the view."""
    return ~_within(_centres(size, boxes), boxes)


@torch.no_grad()
def blend_scores(scores: Tensor, pooled: Tensor, momentum: float, visits: Tensor | None = None) -> Tensor:
    """Return scores [B,L] after a visit, in their dtype; debiased by the `visits` [B], as in `blend`."""
    kept = momentum if visits is None else _debiased(visits, momentum)[:, None]
    return (kept * scores.float() + (1 - kept) * pooled.float()).to(scores.dtype)


@torch.no_grad()
def gather_classes(maps: Tensor, classes: Tensor) -> Tensor:
    """Return the maps [B,k,G,G] of each image's own classes [B,k], from those of all classes [B,L,G,G]."""
    images = torch.arange(len(maps), device=maps.device)[:, None]
    return maps[images, classes.long()]


@torch.no_grad()
def remaining_start(counts: Tensor, momentum: float, *, debiased: bool = False) -> Tensor:
    """Return the weight that the initial value still has in each cell, by its visits: float32 [B,W,W]."""
    if debiased:
        return (counts == 0).float()
    return torch.pow(momentum, counts.float())


@torch.no_grad()
def without_initial_value(heatmaps: Tensor, starts: Tensor, remaining: Tensor) -> Tensor:
    """Return what was seen in heatmaps [B,C,W,W] since their start: float32, without their initial values.

    `starts` [B,C] are the initial values, 1 for annotated classes and 0 for others; `remaining` [B,W,W] is
    their weight in each cell. After n visits of a cell it is `H - mu^n h0`.
    """
    return (heatmaps.float() - starts.float()[:, :, None, None] * remaining[:, None]).clamp(min=0)


def _debiased(visits: Tensor, momentum: float) -> Tensor:
    """Return the momentum that gives n earlier visits and this one equal weights, at most `momentum`."""
    visits = visits.float()
    return (visits / (visits + 1)).clamp(max=momentum)


def _exact(tensor: Tensor) -> torch.dtype:
    """Return float64 if the device has it: in float32 a position on 14 cells is off by up to 1e-6 cells."""
    return torch.float32 if tensor.device.type == "mps" else torch.float64


def _box(boxes: Tensor) -> tuple[Tensor, Tensor]:
    """Return (left, top) and (width, height) of boxes [B,4 or more], each [B,2,1]."""
    exact = boxes.to(_exact(boxes))
    return box_origins(exact)[..., None], box_extents(exact)[..., None]


def _flipped(views: Tensor) -> Tensor:
    return view_flips(views) != 0


def _centres(size: int, views: Tensor) -> Tensor:
    """Return the centres of `size` cells that divide the unit interval, as exact as `_box`."""
    return (torch.arange(size, dtype=_exact(views), device=views.device) + 0.5) / size


def _relative(positions: Tensor, boxes: Tensor) -> Tensor:
    """Return positions [N] on both axes relative to each box: [B,2,N], from 0 to 1 across it."""
    starts, extents = _box(boxes)
    # An empty crop covers nothing; the bound keeps its positions finite (0 / 0 would be NaN).
    return (positions - starts) / extents.clamp(min=1e-9)


def _within(positions: Tensor, boxes: Tensor) -> Tensor:
    """Return which cells [B,N,N] at positions [N] or [B,2,N] are in each box; adjacent boxes share none."""
    starts, extents = _box(boxes)
    x, y = ((positions >= starts) & (positions < starts + extents)).unbind(1)
    return y[:, :, None] & x[:, None, :]


def _weights(positions_B2N: Tensor, cells: int) -> Tensor:
    """Return bilinear weights [B,2,N,cells] for sampling cells at positions in 0 to 1, edge-clamped."""
    at = (positions_B2N * cells - 0.5).clamp(0, cells - 1)
    grid = torch.arange(cells, dtype=at.dtype, device=at.device)
    return (1 - (at[..., None] - grid).abs()).clamp(min=0).float()


def _resample(maps_BCHH: Tensor, weights_B2NH: Tensor) -> Tensor:
    """Return maps [B,C,N,N]: weights of x applied along the last axis, weights of y along the one before."""
    x_BHN, y_BHN = weights_B2NH.transpose(2, 3).unbind(1)
    batch, classes, side, _ = maps_BCHH.shape
    num = x_BHN.shape[-1]
    # Autocast would halve their precision. TF32, where allowed, applies: its 11 bits are those of float16.
    with torch.autocast(maps_BCHH.device.type, enabled=False):
        half = torch.bmm(maps_BCHH.reshape(batch, classes * side, side), x_BHN)
        turned = half.view(batch, classes, side, num).transpose(2, 3).reshape(batch, classes * num, side)
        return torch.bmm(turned, y_BHN).view(batch, classes, num, num).transpose(2, 3)


def _flip(maps: Tensor, views: Tensor) -> Tensor:
    """Mirror the maps of mirrored views; values are mirrored, not weights, so that a flip is exact."""
    return torch.where(_flipped(views)[:, None, None, None], maps.flip(-1), maps)


# Spatial score

HOTTEST = 0.04
"""Share of the cells that speak for a class: an object is small, and its score map is hot where it is."""
DISCOUNT = 0.5
"""How much less a cell counts where the annotated class is hottest: that object explains it already."""


@torch.no_grad()
def spatial_score(scores: Tensor, heat: Tensor, annotated: Tensor, classes: Tensor | None = None) -> Tensor:
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
