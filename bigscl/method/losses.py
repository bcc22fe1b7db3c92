"""The losses, from logits: base losses on the pooled prediction, consistency with what was remembered.

Every function gives one value per sample, [B]; the caller sums them and divides by the number of samples of
the global batch. Labels are int8 [B,L]: 1 positive, 0 known negative, -1 unknown. A known negative is always
a negative and an annotated positive always a positive, whatever is expected of them. Arithmetic is in
float32 (float64 for float64 logits), whatever autocast gave.
"""

# Shapes: B batch, L classes, G side of the score map, k classes with a heatmap; f is sigmoid(logits).

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from bigscl.method.precision import at_least_float32

Norm = Literal["mse", "rms", "l2"]


def bce(logits: Tensor, labels: Tensor) -> Tensor:
    """Binary cross-entropy over the known labels; unknown ones cost nothing."""
    return _positives(logits, labels == 1) + _negatives(logits, labels == 0)


def an(logits: Tensor, labels: Tensor) -> Tensor:
    """Assume negative: every label that is not positive is a negative."""
    return _positives(logits, labels == 1) + _negatives(logits, labels != 1)


def an_ls(logits: Tensor, labels: Tensor, *, smoothing: float = 0.1) -> Tensor:
    """Assume negative with label smoothing: the targets are `1 - smoothing` and `smoothing`."""
    swapped = _positives(logits, labels != 1) + _negatives(logits, labels == 1)
    return (1 - smoothing) * an(logits, labels) + smoothing * swapped


def wan(logits: Tensor, labels: Tensor) -> Tensor:
    """Weak assume negative: as `an`, each negative weighted 1/(L-1), so that they weigh one positive."""
    return _positives(logits, labels == 1) + _negatives(logits, labels != 1) / max(labels.shape[1] - 1, 1)


def en(logits: Tensor, labels: Tensor, expected: Tensor) -> Tensor:
    """Expected negative: as `an`, but unknown labels that are expected positives cost nothing."""
    return _positives(logits, labels == 1) + _negatives(logits, (labels == 0) | ((labels == -1) & ~expected))


def ep(logits: Tensor, labels: Tensor, expected: Tensor) -> Tensor:
    """Expected positive: as `an`, but unknown labels that are expected positives count as positives."""
    positive = (labels == 1) | ((labels == -1) & expected)
    return _positives(logits, positive) + _negatives(logits, ~positive)


def epr(
    logits: Tensor, labels: Tensor, positives_per_image: float, mean_count: Tensor | None = None
) -> Tensor:
    """Expected positive regularisation (Cole et al. 2021): `bce`, and ((mean of sum f) - K)^2 / L^2.

    That mean is over the batch. `mean_count` is the mean of `predicted_count` over the *global* batch, which
    the caller reduces over ranks (it carries no gradient); without it these samples are the whole batch. The
    mean of the values over the global batch, and its gradient, are exact however ranks share the batch.
    """
    return bce(logits, labels) + _count_penalty(logits, positives_per_image, mean_count)


def role(
    logits: Tensor,
    estimates: Tensor,
    labels: Tensor,
    positives_per_image: float,
    mean_counts: tuple[Tensor, ...] = (),
) -> Tensor:
    """Regularised online label estimation (Cole et al. 2021), half for the network, half for the estimator.

    `estimates` [B,L] are the label estimator's logits for these samples. Each side pays `epr`, and the
    cross-entropy with the other's probabilities, which carry no gradient. `mean_counts`: as `mean_count` of
    `epr`, the network's and the estimator's.
    """
    network_count, estimator_count = mean_counts or (None, None)
    network = epr(logits, labels, positives_per_image, network_count) + _agreement(logits, estimates)
    estimator = epr(estimates, labels, positives_per_image, estimator_count) + _agreement(estimates, logits)
    return 0.5 * (network + estimator)


def predicted_count(logits: Tensor) -> Tensor:
    """How many positives are predicted for each sample: the sum of f."""
    return at_least_float32(logits).sigmoid().sum(1)


def cl(logits: Tensor, scores: Tensor, *, norm: Norm = "mse") -> Tensor:
    """Consistency of f with the remembered scores [B,L]."""
    difference = at_least_float32(logits).sigmoid() - scores.detach()
    return _reduce(difference.square().sum(1), logits.shape[1:].numel(), norm)


def scl_dense(logit_map: Tensor, target: Tensor, *, norm: Norm = "mse") -> Tensor:
    """Spatial consistency of the score maps with the heatmaps of all classes [B,L,G,G], in the view frame."""
    difference = at_least_float32(logit_map).sigmoid() - target.detach()
    return _reduce(difference.square().sum((1, 2, 3)), logit_map.shape[1:].numel(), norm)


def scl_topk(logit_map: Tensor, classes: Tensor, target: Tensor, *, norm: Norm = "mse") -> Tensor:
    """Spatial consistency with the heatmaps [B,k,G,G] of `classes` [B,k], distinct; all others are 0."""
    maps = at_least_float32(logit_map).sigmoid()
    index = classes.long()
    kept = maps.gather(1, index[:, :, None, None].expand(-1, -1, *maps.shape[2:]))
    # Squares of the kept classes are left out, not subtracted again: nothing cancels.
    others = maps.square().sum((2, 3)).scatter(1, index, 0.0).sum(1)
    squares = others + (kept - target.detach()).square().sum((1, 2, 3))
    return _reduce(squares, logit_map.shape[1:].numel(), norm)


def _positives(logits: Tensor, weight: Tensor) -> Tensor:
    """-1/L sum of weight * log f, for a mask or weights [B,L]."""
    return -(weight * F.logsigmoid(at_least_float32(logits))).mean(1)


def _negatives(logits: Tensor, weight: Tensor) -> Tensor:
    """-1/L sum of weight * log(1 - f), for a mask or weights [B,L]."""
    return _positives(-logits, weight)


def _agreement(logits: Tensor, others: Tensor) -> Tensor:
    """Cross-entropy with the probabilities of other logits, which carry no gradient."""
    others = at_least_float32(others).detach()
    return _positives(logits, others.sigmoid()) + _negatives(logits, (-others).sigmoid())


def _count_penalty(logits: Tensor, positives_per_image: float, mean_count: Tensor | None) -> Tensor:
    """The squared error of the batch's mean count over L^2, for each sample, with that sample's gradient.

    With m the mean count of B samples and c one sample's, d(m - K)^2/dc = 2 (m - K) / B. So each sample's
    value is (m - K)^2 and its gradient that of 2 (m - K) c; their means are the value and gradient wanted.
    """
    count = predicted_count(logits)
    mean = (count.mean() if mean_count is None else mean_count).detach()
    error = mean - positives_per_image
    return (error.square() + 2 * error * (count - count.detach())) / logits.shape[1] ** 2


def _reduce(squares: Tensor, size: int, norm: Norm) -> Tensor:
    """Sums of squares [B] under a norm: their mean, its root, or the root of the sum."""
    if norm == "mse":
        return squares / size
    if norm not in ("rms", "l2"):
        raise ValueError(f"norm: found {norm!r}, expected mse, rms or l2")
    if norm == "rms":
        squares = squares / size
    # The root's slope at 0 is infinite; a perfect match gets value 0 and gradient 0.
    positive = squares > 0
    return torch.where(positive, torch.where(positive, squares, 1.0).sqrt(), 0.0)
