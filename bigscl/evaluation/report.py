"""The report on predictions: all figures of a multi-label set, or of ImageNet's images with ReaL labels.

It depends on saved predictions only, so that scoring them again gives the same report.
"""

# Shapes: N images, L classes, R best classes of an image.

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from bigscl.common.user_error import UserError
from bigscl.data.labels.real_labels import match_real_labels
from bigscl.evaluation.metrics import (
    ClassFigures,
    MeanAP,
    PrecisionRecall,
    Subset,
    average_precision,
    by_num_labels,
    image_average_precision,
    mean_ap,
    per_class,
    precision_recall_at_k,
    precision_recall_at_threshold,
    score_distribution,
    threshold_by_count,
    top_k_accuracy,
)
from bigscl.evaluation.predictions import Pooling, SavedPredictions

THRESHOLD = 0.5
AT_K = (1, 3, 5)
Activation = Literal["sigmoid", "softmax"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SingleLabel:
    """Accuracies by the labels of the shards, reported next to ReaL's."""

    num_images: int
    top1: float
    top5: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingFigures:
    """The main figures with a pooling, on the same images."""

    map: float
    image_ap: float
    top1: float
    f1: float
    """Of decisions at 0.5."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All figures, as fractions."""

    model: str
    shards: str
    preprocessing: str
    """How the images were prepared; empty if another tool did it."""
    labels_file: str
    """The file that the labels come from; empty if it is the shards."""
    labels: str
    """What was evaluated against: `labels` (all of them), `observed` (others absent) or `ReaL`."""
    activation: Activation
    """Turns logits into scores; it affects the ranking of images within a class."""
    pooling: Pooling
    """The logits that were scored: as the network pools, or by map pooling."""
    poolings: dict[str, PoolingFigures]
    """The main figures of each pooling that was saved, the plain one always among them."""
    num_images: int
    """Number of evaluated images."""
    num_expected: int
    """Number of images of the whole set, evaluated or not."""
    missing: tuple[str, ...]
    """Images of the set without a prediction."""
    original: SingleLabel | None
    """Accuracies by ImageNet's own labels, if the figures are ReaL's."""
    top1: float
    top5: float
    mean_ap: MeanAP
    """Per class, as in the paper: images ranked within each class."""
    image_ap: float
    """Per image: classes ranked within each image, mean over the images with a positive."""
    by_num_labels: dict[str, Subset]
    at_threshold: PrecisionRecall
    """Of decisions at 0.5."""
    count_threshold: float
    """The score that as many classes reach, over all images, as there are labels."""
    at_count: PrecisionRecall
    """Of decisions at that score."""
    at_k: dict[str, PrecisionRecall]
    score_distribution: list[list[int]]
    """Images by their 1st, 2nd, 3rd and 4th highest score, in bins from 0 to 1."""
    per_class: list[ClassFigures]
    localization: dict[str, Any] | None
    """Pointing game and energy in boxes, if they were requested."""

    @property
    def name(self) -> str:
        """The model, and its pooling if it is not the plain one."""
        return self.model if self.pooling == "plain" else f"{self.model}, {self.pooling} pooling"

    @property
    def headline(self) -> str:
        """One line with what was evaluated, and how many images are missing."""
        what = f"{self.name} on {self.num_images:,} images"
        if not self.missing:
            return what
        there = self.num_expected - len(self.missing)
        return f"PARTIAL, {there:,} of {self.num_expected:,} images: {what}"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scored:
    """Predictions and the labels they are scored against."""

    ranking: Tensor
    """float32 [N,L]: values that order the images within a class."""
    ranked: Tensor
    """[N,R]: the best classes of each image."""
    targets: Tensor
    """int8 [N,L]."""
    cut: float
    """The value of `ranking` at a score of 0.5."""
    missing: tuple[str, ...]
    """Images of the set without a prediction."""
    num_expected: int
    """Number of images of the whole set, evaluated or not."""


def make_report(
    saved: SavedPredictions,
    *,
    real_labels: Sequence[Sequence[int]] | None = None,
    activation: Activation = "sigmoid",
    pooling: Pooling = "plain",
) -> Report:
    """Return all figures of some predictions, by their own labels or ReaL's."""
    pooled = saved.pooled(pooling)
    scored = score(pooled, real_labels=real_labels, activation=activation)
    figures = _figures(scored, saved.class_names, activation)
    poolings: dict[str, PoolingFigures] = {
        one: _chosen_figures(figures)
        if one == pooling
        else _main_figures(score(saved.pooled(one), real_labels=real_labels, activation=activation))
        for one in saved.poolings
    }
    return Report(
        model=saved.about["model"],
        shards=saved.about.get("shards", ""),
        preprocessing=saved.about.get("preprocessing", ""),
        labels_file=saved.about.get("labels_file") or "",
        labels="ReaL" if real_labels is not None else saved.about["labels"],
        activation=activation,
        num_images=len(scored.targets),
        num_expected=scored.num_expected,
        missing=scored.missing,
        original=None if real_labels is None else _single_label(pooled),
        localization=saved.about.get("localization"),
        pooling=pooling,
        poolings=poolings,
        **figures,
    )


def score(
    saved: SavedPredictions,
    *,
    real_labels: Sequence[Sequence[int]] | None = None,
    activation: Activation = "sigmoid",
) -> Scored:
    """Return predictions and labels for the metrics, without images of which no class is known."""
    rows: Any = slice(None)
    if real_labels is None:
        targets, missing = saved.labels, tuple(saved.about["missing"])
        num_expected = len(saved.keys) + len(missing)
    else:
        found = match_real_labels(real_labels, saved.keys, saved.class_names)
        rows, targets, missing = (found.labels > 0).any(1), found.labels, found.missing
        num_expected = found.num_images
    if targets is None:
        raise UserError(f"{saved.about['model']}: no labels to score against. Give --labels, or --real.")
    if real_labels is None:
        rows = (targets >= 0).any(1)
    logits = torch.from_numpy(saved.logits[rows]).float()
    return Scored(
        ranking=logits if activation == "sigmoid" else logits.log_softmax(1),
        ranked=torch.from_numpy(saved.ranked[rows]),
        targets=torch.from_numpy(targets[rows]),
        cut=0.0 if activation == "sigmoid" else math.log(THRESHOLD),
        missing=missing,
        num_expected=num_expected,
    )


def _figures(scored: Scored, class_names: Sequence[str], activation: Activation) -> dict[str, Any]:
    ranking, targets, ranked = scored.ranking, scored.targets, scored.ranked
    num_classes = ranking.shape[1]
    classes = per_class(ranking, targets, class_names, scored.cut)
    highest = ranking.topk(min(4, num_classes), dim=1).values
    to_scores = torch.sigmoid if activation == "sigmoid" else torch.exp
    count_cut = threshold_by_count(ranking, targets)
    subsets = by_num_labels(ranking, targets, ranked)
    return {
        "top1": top_k_accuracy(ranked, targets, 1),
        "top5": top_k_accuracy(ranked, targets, min(5, num_classes)),
        "mean_ap": mean_ap(torch.tensor([one.average_precision for one in classes], dtype=torch.float64)),
        "image_ap": subsets["all"].image_ap,
        "by_num_labels": subsets,
        "at_threshold": precision_recall_at_threshold(ranking, targets, scored.cut),
        "count_threshold": float(to_scores(torch.tensor(count_cut))),
        "at_count": precision_recall_at_threshold(ranking, targets, count_cut),
        "at_k": {str(k): precision_recall_at_k(ranked, targets, k) for k in AT_K if k <= num_classes},
        "score_distribution": score_distribution(to_scores(highest)).tolist(),
        "per_class": classes,
    }


def _chosen_figures(figures: dict[str, Any]) -> PoolingFigures:
    return PoolingFigures(
        map=figures["mean_ap"].present,
        image_ap=figures["image_ap"],
        top1=figures["top1"],
        f1=figures["at_threshold"].overall_f1,
    )


def _main_figures(scored: Scored) -> PoolingFigures:
    """Return what `_figures` has of these, without the rest."""
    ranking, targets = scored.ranking, scored.targets
    image_precisions = image_average_precision(ranking, targets)
    return PoolingFigures(
        map=mean_ap(average_precision(ranking, targets)).present,
        image_ap=float(image_precisions[~image_precisions.isnan()].mean()),
        top1=top_k_accuracy(scored.ranked, targets, 1),
        f1=precision_recall_at_threshold(ranking, targets, scored.cut).overall_f1,
    )


def _single_label(saved: SavedPredictions) -> SingleLabel | None:
    if saved.labels is None:
        return None
    targets, ranked = torch.from_numpy(saved.labels), torch.from_numpy(saved.ranked)
    return SingleLabel(
        num_images=int((targets > 0).any(1).sum()),
        top1=top_k_accuracy(ranked, targets, 1),
        top5=top_k_accuracy(ranked, targets, min(5, ranked.shape[1])),
    )
