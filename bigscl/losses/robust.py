"""Losses that weigh each label by the current prediction of it: focal, ASL, Hill, SPLC, GR. No torch import.

All assume unknown labels to be negatives, more or less. What a loss doubts is the unknown labels only: in
Hill and GR, known negatives have the plain cross-entropy; SPLC never corrects them.
"""

# Shapes: B batch, L classes; f is sigmoid(logits).

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from bigscl.common.bounds import CountOrZero, NonNegative, Positive, Share
from bigscl.losses.cross_entropy import (
    at_least_float32,
    log_f,
    negatives,
    positives,
    power,
    probabilities,
    weighted,
)
from bigscl.losses.registry import base_loss, section

if TYPE_CHECKING:
    from torch import Tensor

Exponent = Annotated[float, Field(gt=0, le=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Focal:
    gamma: NonNegative = 2.0
    """Exponent of the weight: 1 - f of positives, f of negatives."""


def focal(logits: Tensor, labels: Tensor, settings: Focal = Focal()) -> Tensor:
    """Focal loss (Lin et al. 2017): -(1 - f)^gamma log f of positives, -f^gamma log(1 - f) of all others.

    Without the class weight alpha, which papers on missing labels leave out, too.
    """
    return _focal(logits, labels == 1, settings.gamma)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asl:
    gamma_positive: NonNegative = 0.0
    """Exponent of the weight of positives."""
    gamma_negative: NonNegative = 4.0
    """Exponent of the weight of negatives."""
    margin: Annotated[float, Field(ge=0, lt=1)] = 0.05
    """Value that is subtracted from the probability of negatives; below it they have no loss."""


def asl(logits: Tensor, labels: Tensor, settings: Asl = Asl()) -> Tensor:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Hill:
    peak: Annotated[float, Field(ge=1)] = 1.5
    """Lambda of (lambda - f) f^2, the loss of unknown labels, which is highest at f = 2/3 of lambda."""
    margin: NonNegative = 1.0
    """Value that is subtracted from the logits of positives."""
    gamma: NonNegative = 2.0
    """Exponent of the focal weight of positives."""


def hill(logits: Tensor, labels: Tensor, settings: Hill = Hill()) -> Tensor:
    """Hill loss (Zhang et al. 2021): -(1 - p)^gamma log p, p = sigmoid(z - margin), and (lambda - f) f^2.

    The first is the loss of positives (a focal loss with a margin), the second of unknown labels: confident
    predictions, possibly of a missing label, have little slope. Known negatives: -log(1 - f).
    """
    f = probabilities(logits)
    doubted = (labels == -1) * (settings.peak - f) * f.square()
    shifted = at_least_float32(logits) - settings.margin
    known = positives(shifted, (labels == 1) * power(-shifted, settings.gamma))
    return known + negatives(logits, labels == 0) + doubted.mean(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Splc:
    threshold: Share = 0.6
    """Unknown labels whose probability is above it count as positives."""
    start_epoch: CountOrZero = 1
    """First epoch, from 0, with such labels."""
    margin: NonNegative = 1.0
    """Value that is subtracted from the logits of known positives."""
    gamma: NonNegative = 2.0
    """Exponent of the focal weight."""


def splc(logits: Tensor, labels: Tensor, epoch: int, settings: Splc = Splc()) -> Tensor:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneralizedRobust:
    """Generalised robust loss (Chen et al. 2024); pairs are values at the start and at the end of the run."""

    slope: tuple[float, float] = (0.0, 2.0)
    """w of the soft pseudo-label sigmoid(w f + b)."""
    intercept: tuple[float, float] = (-2.0, -2.0)
    """b of the soft pseudo-label."""
    center: tuple[float, float] = (0.5, 0.8)
    """Probability of the unknown labels that weigh most: mu of the weight exp(-(f - mu)^2 / (2 sigma^2))."""
    width: tuple[Positive, Positive] = (2.0, 0.5)
    """Sigma of that weight."""
    q_positive: Exponent = 0.01
    """q of the loss (1 - f^q) / q of unknown labels as positives; near 0 it is -log f, at 1 it is 1 - f."""
    q_negative: Exponent = 1.0
    """q of the loss (1 - (1 - f)^q) / q of unknown labels as negatives."""


def gr(
    logits: Tensor, labels: Tensor, progress: float, settings: GeneralizedRobust = GeneralizedRobust()
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


base_loss("focal", focal, setting=section("focal", Focal), mixes=True)
base_loss("asl", asl, setting=section("asl", Asl), mixes=True)
base_loss("hill", hill, setting=section("hill", Hill))
base_loss("splc", splc, setting=section("splc", Splc))
base_loss("gr", gr, setting=section("gr", GeneralizedRobust))
