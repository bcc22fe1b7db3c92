"""Consistencies: the agreement of a prediction with the memory. No torch import."""

# Shapes: B batch, L classes, G side of the score map, k classes with a heatmap; f is sigmoid(logits).

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from bigscl.losses.cross_entropy import at_least_float32, probabilities
from bigscl.losses.registry import consistency

if TYPE_CHECKING:
    from torch import Tensor

Norm = Literal["mse", "rms", "l2"]


def none(logits: Tensor) -> Tensor:
    return at_least_float32(logits).new_zeros(len(logits))


def cl(logits: Tensor, scores: Tensor, *, norm: Norm = "mse") -> Tensor:
    """Consistency of f with the scores [B,L] in the memory."""
    difference = probabilities(logits) - scores.detach()
    return _reduce(difference.square().sum(1), logits.shape[1:].numel(), norm)


def scl(maps: Tensor, target: Tensor, classes: Tensor | None = None, *, norm: Norm = "mse") -> Tensor:
    """Spatial consistency of the score maps with the heatmaps in the memory, as the view shows them."""
    return _spatial(maps, target, classes, norm, None)


def scl_corrected(
    maps: Tensor, target: Tensor, weight: Tensor, classes: Tensor | None = None, *, norm: Norm = "mse"
) -> Tensor:
    """As `scl`, with heatmaps less their initial values and a weight [B,1,G,G] of each cell."""
    return _spatial(maps, target, classes, norm, weight)


def _spatial(
    maps: Tensor, target: Tensor, classes: Tensor | None, norm: Norm, weight: Tensor | None
) -> Tensor:
    if classes is None:
        return scl_dense(maps, target, norm=norm, weight=weight)
    return scl_topk(maps, classes, target, norm=norm, weight=weight)


def scl_dense(maps: Tensor, target: Tensor, *, norm: Norm = "mse", weight: Tensor | None = None) -> Tensor:
    """Spatial consistency with the heatmaps of all classes [B,L,G,G]; `weight` [B,1,G,G] is that of cells."""
    squares = _weighted((maps - target.detach()).square(), weight)
    return _reduce(squares.sum((1, 2, 3)), maps.shape[1:].numel(), norm)


def scl_topk(
    maps: Tensor, classes: Tensor, target: Tensor, *, norm: Norm = "mse", weight: Tensor | None = None
) -> Tensor:
    """Spatial consistency with the heatmaps [B,k,G,G] of `classes` [B,k], distinct; all others are 0."""
    index = classes.long()
    kept = maps.gather(1, index[:, :, None, None].expand(-1, -1, *maps.shape[2:]))
    # Squares of the kept classes are left out, not subtracted again: nothing cancels.
    others = _weighted(maps.square(), weight).sum((2, 3)).scatter(1, index, 0.0).sum(1)
    squares = others + _weighted((kept - target.detach()).square(), weight).sum((1, 2, 3))
    return _reduce(squares, maps.shape[1:].numel(), norm)


def _weighted(squares: Tensor, weight: Tensor | None) -> Tensor:
    return squares if weight is None else weight.detach() * squares


def _reduce(squares: Tensor, size: int, norm: Norm) -> Tensor:
    """Sums of squares [B] under a norm: their mean, its root, or the root of the sum."""
    match norm:
        case "mse":
            return squares / size
        case "rms":
            return _root(squares / size)
        case "l2":
            return _root(squares)


def _root(squares: Tensor) -> Tensor:
    """The square root; its slope at 0 is infinite, so a perfect match gets value 0 and gradient 0."""
    positive = squares > 0
    return squares.where(positive, 1.0).sqrt().where(positive, 0.0)


consistency("none", none)
consistency("cl", cl)
consistency("scl", scl)
consistency("scl_corrected", scl_corrected)
