"""Settings of single losses, with the defaults of their papers. The config reads them: no torch import."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from bigscl.common.bounds import Count, CountOrZero, NonNegative, Positive, Share

Exponent = Annotated[float, Field(gt=0, le=1)]
Probability = Annotated[float, Field(gt=0, lt=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Focal:
    """Focal loss (Lin et al. 2017)."""

    gamma: NonNegative = 2.0
    """Exponent of the weight: 1 - f of positives, f of negatives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asl:
    """Asymmetric loss (Ridnik et al. 2021)."""

    gamma_positive: NonNegative = 0.0
    """Exponent of the weight of positives."""
    gamma_negative: NonNegative = 4.0
    """Exponent of the weight of negatives."""
    margin: Annotated[float, Field(ge=0, lt=1)] = 0.05
    """What is subtracted from the probability of negatives; below it they have no loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hill:
    """Hill loss (Zhang et al. 2021)."""

    peak: Annotated[float, Field(ge=1)] = 1.5
    """Lambda of (lambda - f) f^2, the loss of unknown labels, which is highest at f = 2/3 of lambda."""
    margin: NonNegative = 1.0
    """What is subtracted from the logits of positives."""
    gamma: NonNegative = 2.0
    """Exponent of the focal weight of positives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Splc:
    """Self-paced loss correction (Zhang et al. 2021)."""

    threshold: Share = 0.6
    """Unknown labels whose probability is above it count as positives."""
    start_epoch: CountOrZero = 1
    """First epoch, from 0, with such labels."""
    margin: NonNegative = 1.0
    """What is subtracted from the logits of known positives."""
    gamma: NonNegative = 2.0
    """Exponent of the focal weight."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class LargeLoss:
    """Large losses are rejected or corrected (Kim et al. 2022)."""

    rate: Share = 0.002
    """Share of a batch's labels: ll_r and ll_ct treat `epoch * rate` of them, ll_cp `rate` in each epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmApl:
    """Entropy maximisation with asymmetric pseudo-labels (Zhou et al. 2022), as published for Pascal VOC."""

    alpha: NonNegative = 0.2
    """Weight of the entropy of unknown labels."""
    beta: NonNegative = 0.02
    """Weight of the cross-entropy of negative pseudo-labels."""
    share: Share = 0.9
    """Share of each class's unknown labels that are pseudo-labels at the end; 0 is plain EM."""
    start_epoch: Count = 5
    """First epoch, from 0, with pseudo-labels; their share grows by equal steps from then on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Crisp:
    """Class-prior induced single-positive learning (Liu et al. 2023)."""

    start_epoch: Count = 1
    """First epoch, from 0, with class priors; before it the loss is `an`."""
    delta: Probability = 0.01
    """Risk with which the estimate of a class prior may miss its bound."""
    tau: Share = 0.01
    """How much wider than necessary that bound is."""
