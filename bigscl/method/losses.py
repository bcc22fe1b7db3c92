"""The losses, from logits, each with what it needs: base losses of the pooled prediction, and consistencies.

Every function returns one value per sample, [B]; the caller sums them and divides by the number of samples of
the global batch. Labels are int8 [B,L]: 1 positive, 0 negative, -1 unknown. A known label outranks what is
expected of it. Arithmetic is in float32 (float64 for float64 logits), also under autocast.

To add a loss: write its function, add its name to `Base` or `Consistency`, and its row to the table below it.
The config reads the tables, so this module must not import torch.
"""

# Shapes: B batch, L classes, G side of the score map, k classes with a heatmap; f is sigmoid(logits).

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeVar

from bigscl.method.precision import at_least_float32, probabilities
from bigscl.user_error import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from bigscl.method.objective import Objective

Base = Literal["bce", "an", "an_ls", "wan", "en", "ep", "epr", "role"]
Consistency = Literal["none", "cl", "scl"]
Norm = Literal["mse", "rms", "l2"]
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a loss is computed from, in addition to the logits and the labels."""

    scores: bool = False
    """The scores that the memory keeps of each image."""
    heatmaps: bool = False
    """The heatmaps that the memory keeps of each image, and the network's score maps."""
    expected: bool = False
    """The expected positives, which are selected by the scores in the memory."""
    positives_per_image: bool = False
    """K, the expected number of positives per image, in the loss itself."""
    mean_counts: bool = False
    """Means over the whole global batch, so a step cannot be divided into smaller batches."""
    estimates: bool = False
    """Label estimates, which are trained together with the network."""
    smoothing: bool = False
    """The setting `objective.smoothing`."""

    @property
    def memory(self) -> bool:
        """Whether it needs a store."""
        return self.scores or self.heatmaps or self.expected

    @property
    def k(self) -> bool:
        """Whether K must be known: for the loss itself, or to select the expected positives."""
        return self.positives_per_image or self.expected

    @property
    def num_mean_counts(self) -> int:
        """How many means are reduced over the ranks: the network's, and that of the label estimates."""
        return int(self.mean_counts) * (1 + int(self.estimates))

    def __or__(self, other: Needs) -> Needs:
        """What two losses need together."""
        return Needs(**{name: getattr(self, name) or getattr(other, name) for name in self.__slots__})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossInputs:
    """What losses are computed from, for a batch of B samples; only what `Needs` asks for must be there."""

    logits: Tensor
    """[B,L], of the pooled prediction."""
    labels: Tensor
    """int8 [B,L]: 1 positive, 0 negative, -1 unknown."""
    maps: Tensor | None = None
    """Score maps [B,L,G,G] in the view frame: the sigmoid of the network's maps, in at least float32."""
    scores: Tensor | None = None
    """Scores [B,L] from the memory."""
    target: Tensor | None = None
    """Heatmaps from the memory as the view shows them: [B,L,G,G], or [B,k,G,G] of `classes`."""
    classes: Tensor | None = None
    """[B,k], distinct: the classes that have a heatmap, the others' is 0; None: all have one."""
    expected: Tensor | None = None
    """bool [B,L]: the expected positives."""
    positives_per_image: float | None = None
    """K."""
    mean_counts: tuple[Tensor, ...] = ()
    """Means of `predicted_count` over the global batch; none: this is the global batch."""
    estimates: Tensor | None = None
    """Logits [B,L] of the label estimates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTerm:
    """A loss as the objective uses it."""

    compute: Callable[[LossInputs, Objective], Tensor]
    needs: Needs = Needs()


def bce(logits: Tensor, labels: Tensor) -> Tensor:
    """Binary cross-entropy of the known labels; unknown labels have no loss."""
    return _positives(logits, labels == 1) + _negatives(logits, labels == 0)


def an(logits: Tensor, labels: Tensor) -> Tensor:
    """Assume negative: every label that is not positive is a negative."""
    return _positives(logits, labels == 1) + _negatives(logits, labels != 1)


def an_ls(logits: Tensor, labels: Tensor, *, smoothing: float = 0.1) -> Tensor:
    """Assume negative with label smoothing: the targets are `1 - smoothing` and `smoothing`."""
    swapped = _positives(logits, labels != 1) + _negatives(logits, labels == 1)
    return (1 - smoothing) * an(logits, labels) + smoothing * swapped


def wan(logits: Tensor, labels: Tensor) -> Tensor:
    """Weak assume negative: as `an`, each negative weighted 1/(L-1), so that all weigh as one positive."""
    return _positives(logits, labels == 1) + _negatives(logits, labels != 1) / max(labels.shape[1] - 1, 1)


def en(logits: Tensor, labels: Tensor, expected: Tensor) -> Tensor:
    """Expected negative: as `an`, but unknown labels that are expected positives have no loss."""
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


def scl_dense(maps: Tensor, target: Tensor, *, norm: Norm = "mse") -> Tensor:
    """Spatial consistency of the score maps with the heatmaps of all classes, both [B,L,G,G]."""
    difference = maps - target.detach()
    return _reduce(difference.square().sum((1, 2, 3)), maps.shape[1:].numel(), norm)


def scl_topk(maps: Tensor, classes: Tensor, target: Tensor, *, norm: Norm = "mse") -> Tensor:
    """Spatial consistency with the heatmaps [B,k,G,G] of `classes` [B,k], distinct; all others are 0."""
    index = classes.long()
    kept = maps.gather(1, index[:, :, None, None].expand(-1, -1, *maps.shape[2:]))
    # Squares of the kept classes are left out, not subtracted again: nothing cancels.
    others = maps.square().sum((2, 3)).scatter(1, index, 0.0).sum(1)
    squares = others + (kept - target.detach()).square().sum((1, 2, 3))
    return _reduce(squares, maps.shape[1:].numel(), norm)


BASES: Mapping[Base, LossTerm] = {
    "bce": LossTerm(compute=lambda given, _: bce(given.logits, given.labels)),
    "an": LossTerm(compute=lambda given, _: an(given.logits, given.labels)),
    "an_ls": LossTerm(
        compute=lambda given, objective: an_ls(given.logits, given.labels, smoothing=objective.smoothing),
        needs=Needs(smoothing=True),
    ),
    "wan": LossTerm(compute=lambda given, _: wan(given.logits, given.labels)),
    "en": LossTerm(
        compute=lambda given, _: en(given.logits, given.labels, _needed("expected", given.expected)),
        needs=Needs(expected=True),
    ),
    "ep": LossTerm(
        compute=lambda given, _: ep(given.logits, given.labels, _needed("expected", given.expected)),
        needs=Needs(expected=True),
    ),
    "epr": LossTerm(
        compute=lambda given, _: epr(given.logits, given.labels, _k(given), *given.mean_counts),
        needs=Needs(positives_per_image=True, mean_counts=True),
    ),
    "role": LossTerm(
        compute=lambda given, _: role(
            given.logits, _needed("estimates", given.estimates), given.labels, _k(given), given.mean_counts
        ),
        needs=Needs(positives_per_image=True, mean_counts=True, estimates=True),
    ),
}
CONSISTENCIES: Mapping[Consistency, LossTerm] = {
    "none": LossTerm(compute=lambda given, _: at_least_float32(given.logits).new_zeros(len(given.logits))),
    "cl": LossTerm(
        compute=lambda given, objective: cl(
            given.logits, _needed("scores", given.scores), norm=objective.norm
        ),
        needs=Needs(scores=True),
    ),
    "scl": LossTerm(compute=lambda given, objective: _scl(given, objective.norm), needs=Needs(heatmaps=True)),
}


def _needed(name: str, value: Value | None) -> Value:
    if value is None:
        raise UserError(f"{name}: missing, and this objective needs it")
    return value


def _k(given: LossInputs) -> float:
    return _needed("positives_per_image", given.positives_per_image)


def _scl(given: LossInputs, norm: Norm) -> Tensor:
    maps, target = _needed("maps", given.maps), _needed("target", given.target)
    if given.classes is None:
        return scl_dense(maps, target, norm=norm)
    return scl_topk(maps, given.classes, target, norm=norm)


def _positives(logits: Tensor, weight: Tensor) -> Tensor:
    """-1/L sum of weight * log f, for a mask or weights [B,L]."""
    import torch.nn.functional as F

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
