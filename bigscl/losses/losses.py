"""The losses, from logits, each with what it needs: base losses of the pooled prediction, and consistencies.

Every function returns one value per sample, [B]; the caller sums them and divides by the number of samples of
the global batch. Labels are int8 [B,L]: 1 positive, 0 negative, -1 unknown. A known label outranks what is
expected of it. Arithmetic is in float32 (float64 for float64 logits), also under autocast.

Here are the table of all losses, those of the paper and of Cole et al. 2021, and the consistencies; the rest
is in `robust_losses` and `pseudo_label_losses`. To add a loss: write its function, add its name to `Base` or
`Consistency`, and its row to the table below it. The config reads the tables, so importing a module of losses
must not import torch.
"""

# Shapes: B batch, L classes, G side of the score map, k classes with a heatmap; f is sigmoid(logits).

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from bigscl.losses.cross_entropy import negatives, positives
from bigscl.losses.inputs import LossInputs, LossTerm, Needs, needed
from bigscl.losses.precision import at_least_float32, probabilities
from bigscl.losses.pseudo_labels import (
    Scheme,
    corrections_in,
    crisp,
    em_apl,
    large_in,
    large_loss,
)
from bigscl.losses.robust import asl, focal, gr, hill, splc

if TYPE_CHECKING:
    from torch import Tensor

    from bigscl.losses.objective import Objective

Base = Literal[
    "bce", "an", "an_ls", "wan", "en", "ep", "enp", "epr", "role",
    "focal", "asl", "hill", "splc", "gr", "ll_r", "ll_ct", "ll_cp", "em_apl", "crisp",
]  # fmt: skip
Consistency = Literal["none", "cl", "scl", "scl_corrected"]
Norm = Literal["mse", "rms", "l2"]


def bce(logits: Tensor, labels: Tensor) -> Tensor:
    """Binary cross-entropy of the known labels; unknown labels have no loss."""
    return positives(logits, labels == 1) + negatives(logits, labels == 0)


def an(logits: Tensor, labels: Tensor) -> Tensor:
    """Assume negative: every label that is not positive is a negative."""
    return positives(logits, labels == 1) + negatives(logits, labels != 1)


def an_ls(logits: Tensor, labels: Tensor, *, smoothing: float = 0.1) -> Tensor:
    """Assume negative with label smoothing: the targets are `1 - smoothing` and `smoothing`."""
    swapped = positives(logits, labels != 1) + negatives(logits, labels == 1)
    return (1 - smoothing) * an(logits, labels) + smoothing * swapped


def wan(logits: Tensor, labels: Tensor) -> Tensor:
    """Weak assume negative: as `an`, each negative weighted 1/(L-1), so that all weigh as one positive."""
    return positives(logits, labels == 1) + negatives(logits, labels != 1) / max(labels.shape[1] - 1, 1)


def en(logits: Tensor, labels: Tensor, expected: Tensor) -> Tensor:
    """Expected negative: as `an`, but unknown labels that are expected positives have no loss."""
    return positives(logits, labels == 1) + negatives(logits, (labels == 0) | ((labels == -1) & ~expected))


def ep(logits: Tensor, labels: Tensor, expected: Tensor) -> Tensor:
    """Expected positive: as `an`, but unknown labels that are expected positives count as positives."""
    positive = (labels == 1) | ((labels == -1) & expected)
    return positives(logits, positive) + negatives(logits, ~positive)


def enp(logits: Tensor, labels: Tensor, expected: Tensor, asserted: Tensor) -> Tensor:
    """Expected negative and positive: as `en`, but the surest expected positives count as positives.

    `asserted` are those: none of the unknown labels gives `en`, all of the expected ones `ep`.
    """
    unknown = labels == -1
    positive = (labels == 1) | (unknown & asserted)
    return positives(logits, positive) + negatives(logits, (labels == 0) | (unknown & ~expected & ~asserted))


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

    `estimates` [B,L] are the label estimator's logits for these samples. Each side's loss is `epr` plus the
    cross-entropy with the other side's probabilities, which carry no gradient. `mean_counts`: as `mean_count`
    of `epr`, for the network and for the estimator.
    """
    network_count, estimator_count = mean_counts or (None, None)
    network = epr(logits, labels, positives_per_image, network_count) + _agreement(logits, estimates)
    estimator = epr(estimates, labels, positives_per_image, estimator_count) + _agreement(estimates, logits)
    return 0.5 * (network + estimator)


def predicted_count(logits: Tensor) -> Tensor:
    """Return the number of positives that is predicted for each sample: the sum of f."""
    return probabilities(logits).sum(1)


def cl(logits: Tensor, scores: Tensor, *, norm: Norm = "mse") -> Tensor:
    """Consistency of f with the scores [B,L] in the memory."""
    difference = probabilities(logits) - scores.detach()
    return _reduce(difference.square().sum(1), logits.shape[1:].numel(), norm)


def scl_dense(maps: Tensor, target: Tensor, *, norm: Norm = "mse", weight: Tensor | None = None) -> Tensor:
    """Spatial consistency of the score maps with the heatmaps of all classes, both [B,L,G,G].

    `weight` [B,1,G,G] is that of each cell's squared difference.
    """
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


BASES: Mapping[Base, LossTerm] = {
    "bce": LossTerm(compute=lambda given, _: bce(given.logits, given.labels)),
    "an": LossTerm(compute=lambda given, _: an(given.logits, given.labels)),
    "an_ls": LossTerm(
        compute=lambda given, objective: an_ls(given.logits, given.labels, smoothing=objective.smoothing),
        settings=("smoothing",),
    ),
    "wan": LossTerm(compute=lambda given, _: wan(given.logits, given.labels)),
    "en": LossTerm(
        compute=lambda given, _: en(given.logits, given.labels, needed("expected", given.expected)),
        needs=Needs(expected=True),
    ),
    "ep": LossTerm(
        compute=lambda given, _: ep(given.logits, given.labels, needed("expected", given.expected)),
        needs=Needs(expected=True),
    ),
    "enp": LossTerm(
        compute=lambda given, _: enp(
            given.logits,
            given.labels,
            needed("expected", given.expected),
            needed("asserted", given.asserted),
        ),
        needs=Needs(expected=True, asserted=True),
    ),
    "epr": LossTerm(
        compute=lambda given, _: epr(given.logits, given.labels, _k(given), *given.mean_counts),
        needs=Needs(positives_per_image=True, mean_counts=True),
    ),
    "role": LossTerm(
        compute=lambda given, _: role(
            given.logits, needed("estimates", given.estimates), given.labels, _k(given), given.mean_counts
        ),
        needs=Needs(positives_per_image=True, mean_counts=True, estimates=True),
    ),
    "focal": LossTerm(
        compute=lambda given, objective: focal(given.logits, given.labels, objective.focal),
        settings=("focal",),
    ),
    "asl": LossTerm(
        compute=lambda given, objective: asl(given.logits, given.labels, objective.asl), settings=("asl",)
    ),
    "hill": LossTerm(
        compute=lambda given, objective: hill(given.logits, given.labels, objective.hill), settings=("hill",)
    ),
    "splc": LossTerm(
        compute=lambda given, objective: splc(
            given.logits, given.labels, needed("epoch", given.epoch), objective.splc
        ),
        needs=Needs(epoch=True),
        settings=("splc",),
    ),
    "gr": LossTerm(
        compute=lambda given, objective: gr(
            given.logits, given.labels, needed("progress", given.progress), objective.gr
        ),
        needs=Needs(progress=True),
        settings=("gr",),
    ),
    "ll_r": LossTerm(
        compute=lambda given, objective: _large_loss(given, objective, "reject"),
        needs=Needs(epoch=True, threshold=True),
        settings=("large_loss",),
    ),
    "ll_ct": LossTerm(
        compute=lambda given, objective: _large_loss(given, objective, "correct"),
        needs=Needs(epoch=True, threshold=True),
        settings=("large_loss",),
    ),
    "ll_cp": LossTerm(
        compute=lambda given, objective: _large_loss(given, objective, "correct"),
        needs=Needs(epoch=True, threshold=True, corrections=True),
        settings=("large_loss",),
    ),
    "em_apl": LossTerm(
        compute=lambda given, objective: em_apl(
            given.logits,
            given.labels,
            needed("scores", given.scores),
            needed("cuts", given.cuts),
            objective.em_apl,
        ),
        needs=Needs(scores=True, cuts=True),
        settings=("em_apl",),
    ),
    "crisp": LossTerm(
        compute=lambda given, objective: _crisp(given, objective),
        needs=Needs(epoch=True, class_means=True, priors=True),
        settings=("crisp",),
    ),
}
CONSISTENCIES: Mapping[Consistency, LossTerm] = {
    "none": LossTerm(compute=lambda given, _: at_least_float32(given.logits).new_zeros(len(given.logits))),
    "cl": LossTerm(
        compute=lambda given, objective: cl(
            given.logits, needed("scores", given.scores), norm=objective.norm
        ),
        needs=Needs(scores=True),
    ),
    "scl": LossTerm(compute=lambda given, objective: _scl(given, objective.norm), needs=Needs(heatmaps=True)),
    "scl_corrected": LossTerm(
        compute=lambda given, objective: _scl(given, objective.norm, needed("weight", given.weight)),
        needs=Needs(heatmaps=True, counts=True),
    ),
}


def _k(given: LossInputs) -> float:
    return needed("positives_per_image", given.positives_per_image)


def _large_loss(given: LossInputs, objective: Objective, scheme: Scheme) -> Tensor:
    corrected = corrections_in(given, objective)
    return large_loss(given.logits, given.labels, large_in(given, objective), corrected, scheme)


def _crisp(given: LossInputs, objective: Objective) -> Tensor:
    priors = needed("priors", given.priors)
    observed_share = needed("observed_share", given.observed_share)
    if needed("epoch", given.epoch) < objective.crisp.start_epoch:
        return an(given.logits, given.labels)
    return crisp(given.logits, given.labels, priors, observed_share, given.class_means)


def _scl(given: LossInputs, norm: Norm, weight: Tensor | None = None) -> Tensor:
    maps, target = needed("maps", given.maps), needed("target", given.target)
    if given.classes is None:
        return scl_dense(maps, target, norm=norm, weight=weight)
    return scl_topk(maps, given.classes, target, norm=norm, weight=weight)


def _weighted(squares: Tensor, weight: Tensor | None) -> Tensor:
    return squares if weight is None else weight.detach() * squares


def _agreement(logits: Tensor, others: Tensor) -> Tensor:
    """Cross-entropy with the probabilities of other logits, which carry no gradient."""
    others = at_least_float32(others).detach()
    return positives(logits, others.sigmoid()) + negatives(logits, (-others).sigmoid())


def _count_penalty(logits: Tensor, positives_per_image: float, mean_count: Tensor | None) -> Tensor:
    """The squared error of the batch's mean count over L^2, for each sample, with that sample's gradient.

    With m the mean count of B samples and c one sample's, d(m - K)^2/dc = 2 (m - K) / B. So each sample's
    value is (m - K)^2 and its gradient that of 2 (m - K) c: their means are the penalty and its gradient.
    """
    count = predicted_count(logits)
    mean = (count.mean() if mean_count is None else mean_count).detach()
    error = mean - positives_per_image
    return (error.square() + 2 * error * (count - count.detach())) / logits.shape[1] ** 2


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
