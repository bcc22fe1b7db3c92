"""The report on predictions: all figures of a multi-label set, or of ImageNet's images with ReaL labels.

It depends on saved predictions only, so that scoring them again gives the same report.
"""

# Shapes: N images, L classes, R best classes of an image.

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch

from bigscl.common.user_error import UserError
from bigscl.data.labels.real_labels import ReviewedImage, image_numbers, match_real_labels
from bigscl.evaluation.evaluate_options import Activation, Pooling
from bigscl.evaluation.main_metrics import METRICS, ScoredImages
from bigscl.evaluation.metrics import (
    ClassFigures,
    MeanAP,
    PrecisionRecall,
    Subset,
    by_num_labels,
    mean_ap,
    per_class,
    precision_recall_at_k,
    precision_recall_at_threshold,
    score_distribution,
    threshold_by_count,
    top_k_accuracy,
)
from bigscl.evaluation.predictions import SavedPredictions

THRESHOLD = 0.5
AT_K = (1, 3, 5)


@dataclass(frozen=True, slots=True, kw_only=True)
class SingleLabel:
    """Accuracies by the labels of the shards, reported next to ReaL's."""

    num_images: int
    top1: float
    top5: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReviewedAccuracy:
    """Accuracy by reviewed labels: a first class that is correct or unclear is right."""

    num_images: int
    top1: float
    class_top1: float
    """Mean over the classes of the images' own labels, as published; NaN without such labels."""


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
    """Labels of the evaluation: `full` (all of them), `given` (others absent) or `ReaL`."""
    activation: Activation
    """Turns logits into scores; it affects the ranking of images within a class."""
    pooling: Pooling
    """The logits that were scored: as the network pools, or by map pooling."""
    poolings: dict[str, dict[str, float]]
    """The main metrics, by name, of each pooling that was saved, the plain one always among them."""
    num_images: int
    """Number of evaluated images."""
    num_expected: int
    """Number of images of the whole set, evaluated or not."""
    missing: tuple[str, ...]
    """Images of the set without a prediction."""
    original: SingleLabel | None
    """Accuracies by ImageNet's own labels, if the figures are ReaL's."""
    reviewed: ReviewedAccuracy | None
    """Multi-label accuracy by the labels that experts reviewed, if they were given."""
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
    offset: float | None
    """What the memory of the run suggests to add to all logits (`bigscl publish` does); None if unknown."""
    at_offset: PrecisionRecall | None
    """Of decisions at 0.5 after that."""
    at_k: dict[str, PrecisionRecall]
    score_distribution: list[list[int]]
    """Images by their 1st, 2nd, 3rd and 4th highest score, in bins from 0 to 1."""
    per_class: list[ClassFigures]
    localization: dict[str, Any] | None
    """Pointing game and energy in boxes, if they were requested."""

    @property
    def metrics(self) -> dict[str, float]:
        """The main metrics of its own pooling, by name."""
        return self.poolings[self.pooling]

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


def make_report(
    saved: SavedPredictions,
    *,
    real_labels: Sequence[Sequence[int]] | None = None,
    reviewed_labels: Mapping[int, ReviewedImage] | None = None,
    activation: Activation = "sigmoid",
    pooling: Pooling = "plain",
) -> Report:
    """Return all figures of some predictions, by their own labels or ReaL's, and by reviewed ones."""
    pooled = saved.pooled(pooling)
    scored = score(pooled, real_labels=real_labels, activation=activation)
    figures = _figures(scored, saved.class_names, activation)
    poolings: dict[str, dict[str, float]] = {}
    for each in saved.poolings:
        own = scored
        if each != pooling:
            own = score(saved.pooled(each), real_labels=real_labels, activation=activation)
        poolings[each] = {name: metric.value(own) for name, metric in METRICS.items()}
    offset = saved.about.get("offset") if activation == "sigmoid" else None
    of_offset = scored.ranking, scored.targets
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
        reviewed=None if reviewed_labels is None else reviewed_accuracy(pooled, reviewed_labels),
        localization=saved.about.get("localization"),
        pooling=pooling,
        poolings=poolings,
        offset=offset,
        at_offset=None if offset is None else precision_recall_at_threshold(*of_offset, -offset),
        **figures,
    )


def score(
    saved: SavedPredictions,
    *,
    real_labels: Sequence[Sequence[int]] | None = None,
    activation: Activation = "sigmoid",
) -> ScoredImages:
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
    return ScoredImages(
        ranking=logits if activation == "sigmoid" else logits.log_softmax(1),
        ranked=torch.from_numpy(saved.ranked[rows]),
        targets=torch.from_numpy(targets[rows]),
        cut=0.0 if activation == "sigmoid" else math.log(THRESHOLD),
        missing=missing,
        num_expected=num_expected,
    )


def _figures(scored: ScoredImages, class_names: Sequence[str], activation: Activation) -> dict[str, Any]:
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
        "mean_ap": mean_ap(torch.tensor([each.average_precision for each in classes], dtype=torch.float64)),
        "image_ap": subsets["all"].image_ap,
        "by_num_labels": subsets,
        "at_threshold": precision_recall_at_threshold(ranking, targets, scored.cut),
        "count_threshold": float(to_scores(torch.tensor(count_cut))),
        "at_count": precision_recall_at_threshold(ranking, targets, count_cut),
        "at_k": {str(k): precision_recall_at_k(ranked, targets, k) for k in AT_K if k <= num_classes},
        "score_distribution": score_distribution(to_scores(highest)).tolist(),
        "per_class": classes,
    }


def _single_label(saved: SavedPredictions) -> SingleLabel | None:
    if saved.labels is None:
        return None
    targets, ranked = torch.from_numpy(saved.labels), torch.from_numpy(saved.ranked)
    return SingleLabel(
        num_images=int((targets > 0).any(1).sum()),
        top1=top_k_accuracy(ranked, targets, 1),
        top5=top_k_accuracy(ranked, targets, min(5, ranked.shape[1])),
    )


def reviewed_accuracy(
    saved: SavedPredictions, reviewed_labels: Mapping[int, ReviewedImage]
) -> ReviewedAccuracy:
    """Return the accuracy over the predicted images that were reviewed.

    The reviewed images are as many of each class, those of them that count are not: so the published figure
    is the mean over classes, by the label of the shards.
    """
    hits: list[bool] = []
    by_class: dict[int, list[bool]] = {}
    for row, number in enumerate(image_numbers(saved.keys)):
        image = reviewed_labels.get(number)
        if image is None:
            continue
        hits.append(int(saved.ranked[row, 0]) in image.correct | image.unclear)
        own = [] if saved.labels is None else (saved.labels[row] > 0).nonzero()[0].tolist()
        if len(own) == 1:
            by_class.setdefault(own[0], []).append(hits[-1])
    complete = sum(map(len, by_class.values())) == len(hits) > 0
    return ReviewedAccuracy(
        num_images=len(hits),
        top1=fmean(hits) if hits else math.nan,
        class_top1=fmean(map(fmean, by_class.values())) if complete else math.nan,
    )
