"""Losses that take unknown labels for something by more than one prediction: LL-*, EM+APL, CRISP.

As in `bigscl.losses.losses`: one value per sample [B], labels int8 [B,L]: 1 positive, 0 negative, -1 unknown.
Only unknown labels are decided on; known labels have the plain cross-entropy. No torch import.
"""

# Shapes: B batch, L classes; f is sigmoid(logits).

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from bigscl.losses.cross_entropy import negatives, weighted
from bigscl.losses.inputs import LossInputs, needed
from bigscl.losses.precision import at_least_float32, probabilities
from bigscl.losses.settings import EmApl

if TYPE_CHECKING:
    from torch import Tensor

    from bigscl.losses.objective import Objective

Scheme = Literal["reject", "correct"]


# Large losses


def large_loss(
    logits: Tensor, labels: Tensor, is_large: Tensor, corrected: Tensor | None, scheme: Scheme
) -> Tensor:
    """Large losses are rejected or corrected (Kim et al. 2022).

    As `an`, but unknown labels with `is_large` [B,L] have no loss (LL-R) or count as positives (LL-Ct, LL-Cp)
    and those that were `corrected` before are positives. See `find_large` for which losses are large.
    """
    is_large = is_large & (labels == -1)
    is_positive = labels == 1
    if corrected is not None:
        is_positive = is_positive | (corrected & (labels == -1))
    if scheme == "correct":
        return weighted(logits, is_positive | is_large, ~(is_positive | is_large))
    return weighted(logits, is_positive, ~is_positive & ~is_large)


def find_large(competing: Tensor, num: int, threshold: Tensor | None = None) -> Tensor:
    """Return which losses are among the `num` largest of the global batch, as bool [B,L].

    Only the labels that are `competing` [B,L] can be. As negatives their loss is -log(1 - f), which grows
    with the logit: so `threshold` is the logit of rank `num` over all ranks; without it these samples are the
    whole batch. Ties are all large. (The authors' code leaves the one of rank `num` out of LL-Cp's
    corrections, but corrects it in the step.)
    """
    if num == 0 or not competing.numel():
        return competing > math.inf
    if threshold is None:
        threshold = competing.flatten().topk(num).values[-1]
    return (competing >= threshold) & (competing > -math.inf)


def competing_logits(logits: Tensor, labels: Tensor, corrected: Tensor | None) -> Tensor:
    """Return the logits of unknown labels that are not corrected yet, -inf elsewhere, without gradient."""
    competes = labels == -1 if corrected is None else (labels == -1) & ~corrected
    return at_least_float32(logits.detach()).where(competes, -math.inf)


def large_in(given: LossInputs, objective: Objective) -> Tensor:
    """Return which losses of a batch are large, bool [B,L]."""
    competing = competing_logits(given.logits, given.labels, corrections_in(given, objective))
    num = num_large(competing.numel(), large_rate(objective, needed("epoch", given.epoch)))
    return find_large(competing, num, given.threshold)


def corrections_in(given: LossInputs, objective: Objective) -> Tensor | None:
    """Return the corrections of earlier epochs, bool [B,L]; None if the objective makes none that last."""
    return needed("corrections", given.corrections) if objective.needs.corrections else None


def large_rate(objective: Objective, epoch: int) -> float:
    """Return the share of a batch's labels whose loss counts as large in an epoch: none in the first.

    It grows from epoch to epoch, unless corrections last: then as many are added in each epoch.
    """
    epochs = min(epoch, 1) if objective.needs.corrections else epoch
    return min(epochs * objective.large_loss.rate, 1.0)


def num_large(num_labels: int, rate: float) -> int:
    """Return how many of a batch's labels, known ones included, have a large loss: the rate, rounded up."""
    # A product such as 0.002 * 1000 may exceed the whole number that it stands for.
    return min(math.ceil(num_labels * rate - 1e-9), num_labels)


# Entropy maximisation


def em_apl(
    logits: Tensor,
    labels: Tensor,
    scores: Tensor,
    cuts: Tensor,
    settings: EmApl = EmApl(),  # noqa: B008
) -> Tensor:
    """Entropy maximisation with asymmetric pseudo-labels (Zhou et al. 2022).

    -log f of positives, -alpha H(f) of unknown labels, H the entropy, and beta times the cross-entropy with
    the remembered score s of those that have s < cut, the class's cut [L]: they are most likely negative.

    In the paper an extra pass after each epoch gives the lowest predictions a pseudo-label for good. Here the
    memory has them: the same share of each class is taken anew for each epoch, by the scores [B,L] in it.
    """
    f = probabilities(logits)
    is_pseudo = (labels == -1) & (scores < cuts)
    is_open = (labels == -1) & ~is_pseudo
    taught = scores.detach().to(f.dtype)
    # -log f and -log(1 - f) with the weights -f and -(1 - f) are the negative entropy.
    entropy, pseudo = -settings.alpha * is_open.to(f.dtype), settings.beta * is_pseudo.to(f.dtype)
    positive = (labels == 1) + entropy * f + pseudo * taught
    negative = (labels == 0) + entropy * probabilities(-logits) + pseudo * (1 - taught)
    return weighted(logits, positive, negative)


# Class priors


def crisp(
    logits: Tensor,
    labels: Tensor,
    priors: Tensor,
    observed_share: Tensor,
    class_means: Tensor | None = None,
) -> Tensor:
    """Class-prior induced risk (Liu et al. 2023, eq. 7): 2 pi_j (1 - f) of positives, |mean of f_j - pi_j|.

    `priors` [L] are the class priors pi, `observed_share` [L] the share of images with class j as an observed
    positive. The first term is a mean over these images, so each has the weight 2 pi_j / observed_share_j.
    The second takes the mean over the batch: `class_means` [L] are those of the *global* batch, which the
    caller reduces over ranks; without them these samples are the whole batch. Both are divided by L, as every
    loss here. Value and gradient are exact however ranks share the batch, as in `epr`.

    The weights of eq. 8, by logits, are left out: the paper gives no value for its factor. Known negatives:
    cross-entropy.
    """
    f = probabilities(logits)
    weight = 2 * priors / observed_share.where(observed_share > 0, 1.0)
    fitted = ((labels == 1) * weight * probabilities(-logits)).mean(1)
    error = (f.mean(0) if class_means is None else class_means).detach() - priors
    # Of the absolute value of a mean each sample has the whole value, and the gradient of sign * f.
    aligned = error.abs() + error.sign() * (f - f.detach())
    return fitted + aligned.mean(1) + negatives(logits, labels == 0)
