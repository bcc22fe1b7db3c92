"""Metrics of multi-label classifiers: average precision, accuracy, precision and recall.

Targets are [N,L] with 1 positive, 0 negative, -1 unknown; an unknown pair of image and class counts in no
metric. Targets may be bool. All figures are fractions, not percent, computed on the tensors' device.
"""

# Shapes: N images, L classes, P most positives of a class.

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bigscl.common.user_error import UserError
from bigscl.store import in_order

SMALL = 2**20
"""Fewer scores than this are ranked without threads."""
WORTHWHILE = 15 / 16
"""A pass over scores that leaves more of them than this is the last before they are sorted."""


@torch.no_grad()
def average_precision(scores: Tensor, targets: Tensor, *, most_positives: int = 0) -> Tensor:
    """Return the average precision of each class, float64 [L]; NaN if a class has no positive.

    scikit-learn's definition: precision at each positive's score, tied scores taken together, averaged over
    the positives. It needs only the ranks of the positives, so scores are ranked without their targets, a few
    classes at a time, on all cores.

    The last bits of a sum depend on its length. Some of the classes have the bits that they have among all
    classes, given the `most_positives` of any class there.
    """
    _check(scores, targets)
    scores = scores.detach()  # other threads do not know of no_grad
    if targets.dtype == torch.bool:
        targets = targets.view(torch.int8)  # torch compares bools with numbers several times slower
    positives, counts = _positives_by_class(scores, targets, most_positives)
    has_unknowns = targets.numel() > 0 and bool(targets.min() < 0)
    cores = os.cpu_count() or 1
    per_block = max(1, min(64, 2**24 // max(1, len(scores)), -(-scores.shape[1] // cores)))

    def of_block(first: int) -> Tensor:
        block = slice(first, first + per_block)
        columns = _columns(scores[:, block], targets[:, block] < 0 if has_unknowns else None)
        reached = _count_reached(columns, positives[block], counts[block])
        return _mean_precision(reached, positives[block], counts[block])

    firsts = range(0, scores.shape[1], per_block)
    # Threads take longer to start than a small problem takes, and a GPU needs none.
    in_threads = scores.numel() >= SMALL and scores.device.type == "cpu"
    blocks = list(in_order(of_block, firsts, threads=cores) if in_threads else map(of_block, firsts))
    return torch.cat(blocks) if blocks else scores.new_empty(0, dtype=torch.float64)


@torch.no_grad()
def image_average_precision(scores: Tensor, targets: Tensor) -> Tensor:
    """Return the average precision of each image, float64 [N]; NaN if an image has no positive.

    As for a class, with the classes of the image ranked by their scores: precision at each positive's
    score, tied scores taken together, averaged over the image's positives. It compares classes within an
    image, where `average_precision` compares images within a class.
    """
    _check(scores, targets)
    images, classes = (targets > 0).nonzero(as_tuple=True)
    sums = torch.zeros(len(scores), dtype=torch.float64, device=scores.device)
    # Images have few positives: 46,837 x 1000 take 6.6 s, sorting the classes of every image takes 41.
    per_block = max(1, 2**22 // max(1, scores.shape[1]))
    for first in range(0, len(images), per_block):
        own, positive = images[first : first + per_block], classes[first : first + per_block]
        reached = scores[own] >= scores[own, positive][:, None]
        hits = (reached & (targets[own] > 0)).sum(1)
        sums.index_add_(0, own, hits.double() / (reached & (targets[own] >= 0)).sum(1))
    return sums / images.bincount(minlength=len(scores))


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanAP:
    """Mean average precision by both common rules; they differ if a class has no positive."""

    present: float
    """Mean over the classes that have a positive; NaN if none has."""
    absent_as_zero: float
    """Mean over all classes, with 0 for those without a positive."""
    num_present: int
    num_classes: int


def mean_ap(average_precisions: Tensor) -> MeanAP:
    """Return both means of the result of `average_precision`."""
    found = average_precisions[~average_precisions.isnan()]
    return MeanAP(
        present=float(found.mean()) if len(found) else float("nan"),
        absent_as_zero=float(found.sum()) / max(1, len(average_precisions)),
        num_present=len(found),
        num_classes=len(average_precisions),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionRecall:
    """Precision, recall and their harmonic mean, over all decisions and as means over the present classes."""

    overall_precision: float
    overall_recall: float
    overall_f1: float
    class_precision: float
    class_recall: float
    class_f1: float


def precision_recall_at_k(ranked: Tensor, targets: Tensor, k: int) -> PrecisionRecall:
    """Return the figures if the first k classes of `ranked` [N,k or more] are predicted for every image."""
    predicted = torch.zeros_like(targets, dtype=torch.bool)
    return _precision_recall(predicted.scatter_(1, ranked[:, :k].long(), True), targets)


def precision_recall_at_threshold(scores: Tensor, targets: Tensor, threshold: float = 0.5) -> PrecisionRecall:
    """Return the figures if every class whose score reaches the threshold is predicted."""
    return _precision_recall(scores >= threshold, targets)


def threshold_by_count(scores: Tensor, targets: Tensor) -> float:
    """Return the threshold that as many scores reach as there are positives; NaN if there are none.

    Decisions there have about the same precision and recall (the break-even point), so it suits scores that
    rank well and are all too high or too low. Scores of unknown labels do not count.
    """
    num_positives = int((targets > 0).sum())
    if num_positives == 0:
        return float("nan")
    known = scores.masked_fill(targets < 0, -torch.inf).flatten()
    return float(known.kthvalue(len(known) - num_positives + 1).values)


def best_classes(scores: Tensor, k: int) -> Tensor:
    """Return the k classes of highest score of each image [N,k], best first."""
    return scores.topk(k, dim=1).indices


def top_k_accuracy(ranked: Tensor, targets: Tensor, k: int) -> float:
    """Return the fraction of images with a positive among their first k of `ranked` [N,k or more].

    With one label per image this is the usual top-k accuracy, with the ReaL labels it is ReaL's: images
    without any positive are not evaluated. NaN if that leaves none.
    """
    num_right, num_evaluated = top_k_counts(ranked, targets, k)
    return num_right / num_evaluated if num_evaluated else float("nan")


def top_k_counts(ranked: Tensor, targets: Tensor, k: int) -> tuple[int, int]:
    """Return the number of images with a positive among their first k of `ranked`, and of those with any."""
    assert ranked.shape[1] >= k, f"{ranked.shape[1]} classes are ranked, {k} are asked for"
    hits = (targets.gather(1, ranked[:, :k].long()) > 0).any(1)
    return int(hits.sum()), int((targets > 0).any(1).sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class Subset:
    """Figures over the images that have a given number of positives."""

    num_images: int
    top1: float
    mean_ap: MeanAP
    """Over classes: images ranked within each class."""
    image_ap: float
    """Mean over images: classes ranked within each image."""


def by_num_labels(scores: Tensor, targets: Tensor, ranked: Tensor | None = None) -> dict[str, Subset]:
    """Return figures for the images with 1, 2, 3 and 4 or more positives, and for `all` that have any.

    `ranked` [N,1 or more] are the best classes of each image, if they are known more exactly than by scores.
    """
    ranked = best_classes(scores, 1) if ranked is None else ranked
    num_labels = (targets > 0).sum(1)
    masks = {"all": num_labels > 0, **{str(k): num_labels == k for k in (1, 2, 3)}, "4+": num_labels >= 4}
    images = image_average_precision(scores, targets)
    return {
        name: _subset(scores[mask], targets[mask], ranked[mask], images[mask]) for name, mask in masks.items()
    }


def score_distribution(scores: Tensor, *, num_ranks: int = 4, num_bins: int = 50) -> Tensor:
    """Return histograms over images of the 1st, 2nd, ... highest score, int64 [num_ranks, bins of 0 to 1].

    A classifier with a bias towards single positives has a high first score and low others.
    """
    best = scores.topk(min(num_ranks, scores.shape[1]), dim=1).values.double()
    bins = (best * num_bins).long().clamp(0, num_bins - 1).T
    histograms = torch.zeros(len(bins), num_bins, dtype=torch.int64, device=scores.device)
    return histograms.scatter_add_(1, bins, torch.ones_like(bins))


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassFigures:
    """One line of the per-class table; NaN where a figure is undefined."""

    name: str
    num_positives: int
    average_precision: float
    precision: float
    recall: float


def per_class(
    scores: Tensor, targets: Tensor, names: Sequence[str], threshold: float = 0.5
) -> list[ClassFigures]:
    """Return average precision, and precision and recall at a threshold, of every class."""
    found = average_precision(scores, targets)
    hits, predicted, positives = _decisions(scores >= threshold, targets)
    columns = (positives, found, hits / predicted, hits / positives)
    return [
        ClassFigures(name=name, num_positives=int(num), average_precision=ap, precision=p, recall=r)
        for name, num, ap, p, r in zip(names, *(column.tolist() for column in columns), strict=True)
    ]


def _check(scores: Tensor, targets: Tensor) -> None:
    if scores.shape != targets.shape or scores.dim() != 2:
        raise UserError(
            f"scores are {list(scores.shape)}, targets {list(targets.shape)}: expected the same [N, classes]"
        )
    if scores.numel() and not all(bound.isfinite() for bound in scores.aminmax()):
        image = int((~scores.isfinite()).any(1).nonzero()[0])
        raise UserError(
            f"scores: image {image} has one that is not finite, expected numbers that can be ranked"
        )


def _positives_by_class(scores: Tensor, targets: Tensor, least_width: int) -> tuple[Tensor, Tensor]:
    """Return the ascending scores of each class's positives [L,P], padded with infinity; their number [L].

    P is at least `least_width`.
    """
    classes, images = _pairs(targets > 0)
    counts = classes.bincount(minlength=scores.shape[1])
    place = torch.arange(len(classes), device=scores.device) - (counts.cumsum(0) - counts)[classes]
    widest = max(least_width, int(counts.max()) if len(counts) else 0)
    chosen = _widened(scores[images, classes])
    positives = chosen.new_full((len(counts), widest), torch.inf)
    positives[classes, place] = chosen
    return _sorted(positives), counts


def _sorted(rows: Tensor) -> Tensor:
    if rows.device.type != "cpu":
        return rows.sort(1).values
    # numpy sorts values alone, with vector instructions, in a third of torch's time.
    return torch.from_numpy(np.sort(rows.numpy(), axis=1))


def _pairs(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the classes and the images where a mask [N,L] is true, by class, then by image."""
    if mask.device.type != "cpu":
        rows, columns = mask.T.nonzero(as_tuple=True)
        return rows, columns
    # numpy finds them in a tenth of torch's time.
    by_image, class_of = np.divmod(np.flatnonzero(mask.numpy()), max(1, mask.shape[1]))
    classes, images = np.divmod(np.sort(class_of * len(mask) + by_image), max(1, len(mask)))
    return torch.from_numpy(classes), torch.from_numpy(images)


def _columns(scores: Tensor, unknown: Tensor | None) -> Tensor:
    """Return each class's scores, one class per row; unknowns become minus infinity."""
    # A contiguous copy first: torch transposes that by tiles, 3 times as fast as the slice it came from.
    columns = _widened(scores).contiguous()
    return (columns if unknown is None else columns.masked_fill(unknown, -torch.inf)).T.contiguous()


def _widened(scores: Tensor) -> Tensor:
    """Return the scores in a dtype that every device can search."""
    return scores.to(torch.promote_types(scores.dtype, torch.float32))


def _count_reached(columns: Tensor, positives: Tensor, counts: Tensor) -> Tensor:
    """Return how many scores of its class are no lower than each positive's, [L,P]; padding is undefined."""
    if columns.device.type != "cpu":
        return columns.shape[1] - torch.searchsorted(_sorted(columns), positives)
    reached = torch.ones(positives.shape, dtype=torch.int64)
    for row, column, found, count in zip(
        reached.numpy(), columns.numpy(), positives.numpy(), counts.tolist(), strict=True
    ):
        row[:count] = _num_no_lower(column, found[:count])
    return reached


def _num_no_lower(scores: NDArray[Any], bounds: NDArray[Any]) -> NDArray[np.int64]:
    """Return how many scores are no lower than each of the ascending bounds, all of which are scores."""
    num = np.empty(len(bounds), np.int64)
    place = 0
    # A pass that drops what is too low costs a thirtieth of sorting the scores, which then has less to do.
    worthwhile = True
    while worthwhile and place < len(bounds):
        # Four times as fast as an index by the mask.
        left = np.compress(scores >= bounds[place], scores)
        worthwhile = len(left) < WORTHWHILE * len(scores)
        num[place] = len(left)
        scores, place = left, place + 1
    num[place:] = len(scores) - np.sort(scores).searchsorted(bounds[place:])
    return num


def _mean_precision(reached: Tensor, positives: Tensor, counts: Tensor) -> Tensor:
    """Return the average precision of classes; `reached` as from `_count_reached`."""
    widest = positives.shape[1]
    # As `reached`, of the positives alone.
    hits = counts[:, None] - torch.searchsorted(positives, positives)
    filled = torch.arange(widest, device=counts.device) < counts[:, None]
    precisions = torch.where(filled, hits.double() / reached, 0)
    # Never a single row: torch divides the sum of one long row among its threads.
    sums = precisions.sum(1) if len(counts) > 1 else precisions.expand(2, widest).contiguous().sum(1)[:1]
    return sums / counts


def _decisions(predicted: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return correct predictions, predictions and positives of each class, float64 [L]."""
    positive = targets > 0
    predicted = predicted & (targets >= 0)
    return _count(predicted & positive), _count(predicted), _count(positive)


def _count(mask: Tensor) -> Tensor:
    """Return how often each column of a bool [N,L] is true, float64 [L]."""
    # Blocks whose sums fit into a byte: 0.015 s for 46,837 x 1000, torch's own sum of bools takes 0.4 s.
    blocks = torch.split(mask.view(torch.uint8), 255)
    totals = torch.zeros(mask.shape[1], dtype=torch.float64, device=mask.device)
    return sum((block.sum(0, dtype=torch.uint8) for block in blocks), totals)


def _precision_recall(predicted: Tensor, targets: Tensor) -> PrecisionRecall:
    hits, made, positives = _decisions(predicted, targets)
    precision, recall = _ratio(hits.sum(), made.sum()), _ratio(hits.sum(), positives.sum())
    present = positives > 0
    class_precision = float((hits / made.clamp(min=1))[present].mean())
    class_recall = float((hits / positives)[present].mean())
    return PrecisionRecall(
        overall_precision=precision,
        overall_recall=recall,
        overall_f1=_harmonic(precision, recall),
        class_precision=class_precision,
        class_recall=class_recall,
        class_f1=_harmonic(class_precision, class_recall),
    )


def _ratio(part: Tensor, whole: Tensor) -> float:
    """Return the quotient, 0 if `whole` is 0."""
    return float(part / whole.clamp(min=1))


def _harmonic(precision: float, recall: float) -> float:
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


def _subset(scores: Tensor, targets: Tensor, ranked: Tensor, image_precisions: Tensor) -> Subset:
    return Subset(
        num_images=len(scores),
        top1=top_k_accuracy(ranked, targets, 1),
        mean_ap=mean_ap(average_precision(scores, targets)),
        image_ap=float(image_precisions.mean()),
    )
