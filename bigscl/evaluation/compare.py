"""Compare runs on the same images: differences with bootstrap intervals, classes that changed."""

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from bigscl.common.user_error import UserError
from bigscl.evaluation.evaluate_options import Activation, Pooling
from bigscl.evaluation.main_metrics import METRICS, draw_counts
from bigscl.evaluation.predictions import SavedPredictions
from bigscl.evaluation.report import Report, make_report, score
from bigscl.evaluation.report_files import main_table, markdown_table, percent, plain, pooling_table

COVERAGE = 95


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A run's figure, and its difference from the baseline's."""

    value: float
    difference: float
    low: float
    high: float
    """Limits of the difference in 95% of the resamples of the images."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassChange:
    """A class's average precision in the baseline and in another run."""

    name: str
    num_positives: int
    before: float
    after: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A run compared with the baseline."""

    report: Report
    figures: dict[str, Difference]
    changes: list[ClassChange]
    """Classes that changed most, from the largest gain to the largest loss."""


def compare(
    runs: Sequence[SavedPredictions],
    *,
    real_labels: Sequence[Sequence[int]] | None = None,
    activation: Activation = "sigmoid",
    pooling: Pooling | Literal["both"] = "plain",
    num_resamples: int = 200,
    num_classes: int = 10,
    seed: int = 0,
) -> list[Comparison]:
    """Compare every run with the first, the baseline, on the same resamples: common variation cancels.

    With `both` poolings each run is there twice, and the first with plain pooling is the baseline.
    """
    poolings: tuple[Pooling, ...] = ("plain", "map") if pooling == "both" else (pooling,)
    drawn: list[dict[str, NDArray[np.float64]]] = []
    reports = []
    counts = None
    for run, each in itertools.product(align(runs), poolings):
        scored = score(run.pooled(each), real_labels=real_labels, activation=activation)
        counts = draw_counts(len(scored.targets), num_resamples, seed) if counts is None else counts
        drawn.append({name: metric.resampled(scored, counts) for name, metric in METRICS.items()})
        reports.append(make_report(run, real_labels=real_labels, activation=activation, pooling=each))
    return [
        Comparison(
            report=report,
            figures={name: _difference(name, reports[0], report, drawn[0], own) for name in METRICS},
            changes=_changes(reports[0], report, num_classes),
        )
        for report, own in zip(reports, drawn, strict=True)
    ]


def resampled_maps(
    run: SavedPredictions, *, pooling: Pooling = "plain", num_resamples: int = 200, seed: int = 0
) -> NDArray[np.float64]:
    """Return the mAP of every resample of the images; the resamples are the same for all runs on them."""
    scored = score(*align([run.pooled(pooling)]))
    return METRICS["map"].resampled(scored, draw_counts(len(scored.targets), num_resamples, seed))


def limits(differences: NDArray[np.float64]) -> tuple[float, float]:
    """Return the limits of the difference in 95% of the resamples."""
    tail = (100 - COVERAGE) / 2
    low, high = np.nanpercentile(differences, [tail, 100 - tail])
    return float(low), float(high)


def align(runs: Sequence[SavedPredictions]) -> list[SavedPredictions]:
    """Return the runs with their images in the order of their keys; images, classes and labels must agree."""
    aligned = [_sorted(run) for run in runs]
    first = aligned[0]
    for run in aligned[1:]:
        names = f"{first.about['model']} and {run.about['model']}"
        if run.class_names != first.class_names:
            raise UserError(
                f"{names}: have different classes ({len(first.class_names)}, {len(run.class_names)})"
            )
        if run.keys != first.keys:
            other = sorted(set(run.keys) ^ set(first.keys)) or ["some that occur several times"]
            raise UserError(
                f"{names}: predicted {len(first.keys)} and {len(run.keys)} images that differ in "
                f"{', '.join(other[:3])}. Only predictions of the same images can be compared."
            )
        if not _same_labels(first, run):
            raise UserError(f"{names}: were saved with different labels. Evaluate both on the same shards.")
    return aligned


def _sorted(run: SavedPredictions) -> SavedPredictions:
    order = np.argsort(np.array(run.keys), kind="stable")
    return replace(
        run,
        keys=tuple(run.keys[row] for row in order),
        logits=run.logits[order],
        ranked=run.ranked[order],
        map_logits=None if run.map_logits is None else run.map_logits[order],
        map_ranked=None if run.map_ranked is None else run.map_ranked[order],
        labels=None if run.labels is None else run.labels[order],
    )


def _same_labels(first: SavedPredictions, other: SavedPredictions) -> bool:
    # Predictions of another tool may have none; then both are scored by ReaL's.
    return first.labels is None or other.labels is None or np.array_equal(first.labels, other.labels)


def _difference(
    name: str,
    first: Report,
    report: Report,
    first_drawn: dict[str, NDArray[np.float64]],
    drawn: dict[str, NDArray[np.float64]],
) -> Difference:
    low, high = limits(drawn[name] - first_drawn[name])
    value = report.metrics[name]
    return Difference(value=value, difference=value - first.metrics[name], low=low, high=high)


def _changes(first: Report, report: Report, count: int) -> list[ClassChange]:
    """Return the classes whose average precision changed most, from the largest gain to the largest loss."""
    changes = [
        ClassChange(
            name=before.name,
            num_positives=before.num_positives,
            before=before.average_precision,
            after=after.average_precision,
        )
        for before, after in zip(first.per_class, report.per_class, strict=True)
        if before.average_precision != after.average_precision and before.num_positives
    ]
    changes.sort(key=lambda change: abs(change.before - change.after), reverse=True)
    return sorted(changes[:count], key=lambda change: change.before - change.after)


# Tables


def comparison_facts(compared: Sequence[Comparison]) -> dict[str, Any]:
    rows = [
        {
            "model": run.report.model,
            "pooling": run.report.pooling,
            "num_images": run.report.num_images,
            "figures": {name: asdict(difference) for name, difference in run.figures.items()},
            "changes": [asdict(change) for change in run.changes],
        }
        for run in compared
    ]
    return {"first": compared[0].report.name, "runs": plain(rows)}


def comparison_text(compared: Sequence[Comparison]) -> str:
    first = compared[0]
    header = ["run", *(metric.title for metric in METRICS.values())]
    rows = [
        [run.report.name, *(_cell(run.figures[name], run is first) for name in METRICS)] for run in compared
    ]
    parts = [
        f"{len(compared)} runs on {first.report.num_images:,} images; differences from {first.report.name} "
        f"with 95% bootstrap intervals over images, in percent",
        markdown_table(header, rows),
        main_table([run.report for run in compared]),
        pooling_table([run.report for run in compared]),
        *(_change_table(first, run) for run in compared[1:] if run.changes),
    ]
    return "\n\n".join(filter(None, parts))


def _cell(found: Difference, is_first: bool) -> str:
    if is_first:
        return percent(found.value)
    change, low, high = (f"{100 * value:+.2f}" for value in (found.difference, found.low, found.high))
    return f"{percent(found.value)} {change} [{low}, {high}]"


def _change_table(first: Comparison, other: Comparison) -> str:
    rows = [
        [
            change.name,
            f"{change.num_positives:,}",
            percent(change.before),
            percent(change.after),
            f"{100 * (change.after - change.before):+.2f}",
        ]
        for change in other.changes
    ]
    header = ["class", "positives", f"AP of {first.report.name}", f"AP of {other.report.name}", "change"]
    return markdown_table(header, rows)
