"""Losses that weigh each label by the current prediction of it: focal, ASL, Hill, SPLC, GR. No torch import.

As in `bigscl.losses.losses`: one value per sample [B], labels int8 [B,L]: 1 positive, 0 negative, -1 unknown.
All assume unknown labels to be negatives, more or less. What a loss doubts is the unknown labels only: in
Hill and GR, known negatives have the plain cross-entropy; SPLC never corrects them.
"""

# Shapes: B batch, L classes; f is sigmoid(logits).

from __future__ import annotations

from typing import TYPE_CHECKING

from bigscl.losses.cross_entropy import log_f, negatives, positives, power, weighted
from bigscl.losses.precision import at_least_float32, probabilities
from bigscl.losses.settings import Asl, Focal, GeneralizedRobust, Hill, Splc

if TYPE_CHECKING:
    from torch import Tensor


def focal(logits: Tensor, labels: Tensor, settings: Focal = Focal()) -> Tensor:  # noqa: B008
    """Focal loss (Lin et al. 2017): -(1 - f)^gamma log f of positives, -f^gamma log(1 - f) of all others.

    Without the class weight alpha, which papers on missing labels leave out, too.
    """
    return _focal(logits, labels == 1, settings.gamma)


def asl(logits: Tensor, labels: Tensor, settings: Asl = Asl()) -> Tensor:  # noqa: B008
    """Asymmetric loss (Ridnik et al. 2021): two exponents, and negatives with f_m = max(f - margin, 0).

    -(1 - f)^gamma+ log f of positives, -f_m^gamma- log(1 - f_m) of all others. The weights carry a gradient,
    as in the paper's analysis; the authors' trainer has a switch that takes it away. The defaults are those
    of the paper's experiments, of which the class in their code differs (gamma+ 1).
    """
    is_positive = labels == 1
    loss = positives(logits, is_positive * power(-logits, settings.gamma_positive))
    if settings.margin == 0:
        return loss + negatives(logits, ~is_positive * power(logits, settings.gamma_negative))
    f = probabilities(logits)
    counts = ~is_positive & (f > settings.margin)
    # 1 where it does not count: the gradient of a power or a logarithm of 0 would be infinite.
    shifted = (f - settings.margin).where(counts, 1.0)
    kept = (probabilities(-logits) + settings.margin).where(counts, 1.0)
    return loss - (shifted.pow(settings.gamma_negative) * kept.log()).mean(1)


def hill(logits: Tensor, labels: Tensor, settings: Hill = Hill()) -> Tensor:  # noqa: B008
    """Hill loss (Zhang et al. 2021): -(1 - p)^gamma log p, p = sigmoid(z - margin), and (lambda - f) f^2.

    The first is the loss of positives (a focal loss with a margin), the second of unknown labels: confident
    predictions, possibly of a missing label, have little slope. Known negatives: -log(1 - f).
    """
    f = probabilities(logits)
    doubted = (labels == -1) * (settings.peak - f) * f.square()
    shifted = at_least_float32(logits) - settings.margin
    known = positives(shifted, (labels == 1) * power(-shifted, settings.gamma))
    return known + negatives(logits, labels == 0) + doubted.mean(1)


def splc(logits: Tensor, labels: Tensor, epoch: int, settings: Splc = Splc()) -> Tensor:  # noqa: B008
    """Self-paced loss correction (Zhang et al. 2021): unknown labels with f > threshold are positives.

    That is from `start_epoch` on. Positives and negatives have a focal loss; known positives have a margin,
    as in `hill`. The paper's equation gives corrected labels the margin, too; the authors' code, which its
    results come from, does not, and neither does this.
    """
    z = at_least_float32(logits)
    z = (z - settings.margin).where(labels == 1, z)
    is_positive = labels == 1
    if epoch >= settings.start_epoch:
        is_positive = is_positive | ((labels == -1) & (probabilities(logits) > settings.threshold))
    return _focal(z, is_positive, settings.gamma)


def gr(
    logits: Tensor,
    labels: Tensor,
    progress: float,
    settings: GeneralizedRobust = GeneralizedRobust(),  # noqa: B008
) -> Tensor:
    """Generalised robust loss (Chen et al. 2024): v [k (1 - f^q2) / q2 + (1 - k) (1 - (1 - f)^q3) / q3].

    That is the loss of unknown labels, with the soft pseudo-label k = sigmoid(w f + b) and the weight v =
    exp(-(f - mu)^2 / (2 sigma^2)), which carry no gradient. w, b, mu and sigma go in a line from their first
    to their last value with `progress`, the share of the run's epochs that are done; the authors' code counts
    epochs from 0 for w and b, and from 1 for mu and sigma. Known labels: cross-entropy.
    """
    slope, intercept, center, width = (
        first + (last - first) * progress
        for first, last in (settings.slope, settings.intercept, settings.center, settings.width)
    )
    f = probabilities(logits.detach())
    soft = (slope * f + intercept).sigmoid()
    weight = (labels == -1) * (-0.5 * ((f - center) / width).square()).exp()
    doubted = weight * (
        soft * _gce(logits, settings.q_positive) + (1 - soft) * _gce(-logits, settings.q_negative)
    )
    return weighted(logits, labels == 1, labels == 0) + doubted.mean(1)


def _focal(logits: Tensor, is_positive: Tensor, gamma: float) -> Tensor:
    return weighted(logits, is_positive * power(-logits, gamma), ~is_positive * power(logits, gamma))


def _gce(logits: Tensor, q: float) -> Tensor:
    """(1 - f^q) / q: the cross-entropy for q near 0, the absolute error for q = 1."""
    return -(q * log_f(logits)).expm1() / q
