"""Write a report: report.json for machines, report.md to read, and the score distribution as a picture."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bigscl.common.files import write_text
from bigscl.common.text import printable
from bigscl.evaluation.main_metrics import METRICS
from bigscl.evaluation.metrics import PrecisionRecall, Subset
from bigscl.evaluation.report import Report

DIGITS = 6
NAMED_MISSING = 10
ORDINALS = ("1st", "2nd", "3rd", "4th")


def write_report(report: Report, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    draw_score_distribution(report.score_distribution, report.name, folder / "scores.png")
    write_text(folder / "report.json", json.dumps(to_json(report), indent=1) + "\n")
    write_text(folder / "report.md", to_markdown(report))


def to_json(report: Report) -> dict[str, Any]:
    """Return the report for JSON: fractions to six digits, null for undefined figures."""
    values: dict[str, Any] = plain({"headline": report.headline, **asdict(report)})
    return values


def to_markdown(report: Report) -> str:
    parts = [
        f"# {report.headline}",
        _about(report),
        "## Accuracy and mean average precision",
        main_table([report]),
        pooling_table([report]),
        _reviewed_line(report),
        "## Precision, recall and F1",
        _precision_table(report),
        *_localization(report),
        "## Highest scores",
        "Images by their four highest scores. With a bias towards single positives only the first is high.",
        "![score distribution](scores.png)",
        "## Classes",
        _class_table(report),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def summary(report: Report) -> str:
    parts = [report.headline, main_table([report]), pooling_table([report])]
    parts += [_reviewed_line(report), _precision_table(report)]
    return "\n\n".join(filter(None, [*parts, *_localization(report)]))


def main_table(reports: Sequence[Report]) -> str:
    """Return accuracies and mAP by number of labels of reports on the same images; three lines each."""
    first = reports[0]
    real = first.labels == "ReaL"
    accuracies = ["top-1 IN-val", "top-5 IN-val", "top-1 ReaL", "top-5 ReaL"] if real else ["top-1", "top-5"]
    header = ["", *accuracies, *(f"mAP k = {k}" for k in first.by_num_labels)]
    num_original = "" if first.original is None else f"{first.original.num_images:,}"
    images = [num_original] * 2 * real + [f"{first.by_num_labels['all'].num_images:,}"] * 2
    subsets = first.by_num_labels.values()
    rows = [
        ["images", *images, *(f"{subset.num_images:,}" for subset in subsets)],
        ["present classes", *[""] * len(accuracies), *(f"{s.mean_ap.num_present:,}" for s in subsets)],
    ]
    for report in reports:
        found = _accuracies(report)
        rows.append([report.name, *found, *(percent(s.mean_ap.present) for s in _subsets(report))])
        # Without images there is nothing to be absent from.
        zeros = [percent(s.mean_ap.absent_as_zero if s.num_images else math.nan) for s in _subsets(report)]
        rows.append([f"{report.name}, absent classes as 0", *[""] * len(found), *zeros])
        images = [percent(s.image_ap) for s in _subsets(report)]
        rows.append([f"{report.name}, AP per image", *[""] * len(found), *images])
    return markdown_table(header, rows)


def pooling_table(reports: Sequence[Report]) -> str:
    """Return the main figures of every report with each pooling; empty if there is only the plain one."""
    if not any(len(report.poolings) > 1 for report in reports):
        return ""
    models = {report.model: report for report in reports}
    names = [""] if len(models) == 1 else [f"{model}: " for model in models]
    rows = [
        [f"{name}{pooling}", *(percent(metrics[each]) for each in METRICS)]
        for name, report in zip(names, models.values(), strict=True)
        for pooling, metrics in report.poolings.items()
    ]
    return markdown_table(["pooling", *(metric.title for metric in METRICS.values())], rows)


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table whose first column is text and whose other columns are numbers."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(
        "| " + " | ".join(printable(cell).replace("|", "/") for cell in line) + " |" for line in lines
    )


def percent(fraction: float) -> str:
    """Return a fraction in percent with two digits, or a dash for NaN."""
    return "–" if math.isnan(fraction) else f"{100 * fraction:.2f}"


def plain(value: Any) -> Any:
    """Return the value for JSON: floats to six digits, null for NaN."""
    if isinstance(value, float):
        return None if math.isnan(value) else round(value, DIGITS)
    if isinstance(value, dict):
        return {name: plain(inner) for name, inner in value.items()}
    return [plain(inner) for inner in value] if isinstance(value, list | tuple) else value


def _about(report: Report) -> str:
    against = {
        "full": "all labels of the images",
        "given": "the given label of each image; other classes count as absent",
        "ReaL": "the ReaL labels, matched by image number; images without any are not evaluated",
    }[report.labels]
    lines = [f"Scored against {against}; scores are the {report.activation} of the logits. In percent."]
    lines.append(
        "mAP is the mean over classes, with images ranked within each class. AP per image is the mean over "
        "images with a positive, with classes ranked within each image."
    )
    if len(report.poolings) > 1:
        own = {"plain": "as the network pools", "map": "by map pooling"}[report.pooling]
        lines.append(
            f"Logits are pooled {own}. Map pooling is half the plain logit and half that of the hottest "
            f"quarter of the cells."
        )
    if report.shards:
        lines.append(f"Images: {report.shards}.")
    if report.labels_file and report.labels != "ReaL":
        lines.append(f"Labels: {report.labels_file}; images that it lacks are not evaluated.")
    if report.preprocessing:
        lines.append(f"Preprocessing: {report.preprocessing}.")
    if report.missing:
        named = ", ".join(map(printable, report.missing[:NAMED_MISSING]))
        more = len(report.missing) - NAMED_MISSING
        rest = f" and {more:,} more (all in report.json)" if more > 0 else ""
        lines.append(f"Missing: {len(report.missing):,} images without a prediction: {named}{rest}.")
    return "\n".join(lines)


def _reviewed_line(report: Report) -> str:
    if (found := report.reviewed) is None:
        return ""
    return (
        f"Multi-label accuracy by the labels that experts reviewed: {percent(found.class_top1)} (mean over "
        f"classes; over images {percent(found.top1)}), of {found.num_images:,} images. A first class that is "
        f"correct or unclear counts as right."
    )


def _subsets(report: Report) -> Iterable[Subset]:
    return report.by_num_labels.values()


def _accuracies(report: Report) -> list[str]:
    own = [percent(report.top1), percent(report.top5)]
    if report.labels != "ReaL":
        return own
    if report.original is None:
        return ["–", "–", *own]
    return [percent(report.original.top1), percent(report.original.top5), *own]


def _precision_table(report: Report) -> str:
    header = ["predicted", "precision", "recall", "F1", "class precision", "class recall", "class F1"]
    decisions = {"score of 0.5 and more": report.at_threshold}
    if not math.isnan(report.count_threshold):
        decisions[f"as many as labels: score of {report.count_threshold:.2f} and more"] = report.at_count
    if report.at_offset is not None:
        name = f"as many as the memory expects: 0.5 with an offset of {report.offset:+.2f}"
        decisions[name] = report.at_offset
    decisions |= {f"the {k} best" if k != "1" else "the best": found for k, found in report.at_k.items()}
    return markdown_table(header, [[name, *_six(found)] for name, found in decisions.items()])


def _six(found: PrecisionRecall) -> list[str]:
    return [percent(value) for value in asdict(found).values()]


def _localization(report: Report) -> list[str]:
    if report.localization is None:
        return []
    header = [
        "heat of",
        "positives",
        "pairs of image and class",
        "pointing game",
        "energy in boxes",
        "chance",
    ]
    rows = [
        [source, kind, f"{found['num_pairs']:,}", *(_percent(found[name]) for name in FIGURES)]
        for source, kinds in report.localization.items()
        for kind, found in kinds.items()
    ]
    return ["## Localization", markdown_table(header, rows)]


FIGURES = ("hit_rate", "energy", "chance")


def _percent(fraction: float | None) -> str:
    return percent(math.nan if fraction is None else fraction)


def _class_table(report: Report) -> str:
    header = ["class", "positives", "average precision", "precision", "recall"]
    rows = [
        [
            c.name,
            f"{c.num_positives:,}",
            percent(c.average_precision),
            percent(c.precision),
            percent(c.recall),
        ]
        for c in report.per_class
    ]
    return markdown_table(header, rows)


def draw_score_distribution(histograms: Sequence[Sequence[int]], title: str, path: Path) -> None:
    """Draw the percentage of images by their 1st to 4th highest score, one panel each, as a PNG."""
    figure, panels = _score_panels(len(histograms))
    for panel, counts in zip(panels, histograms, strict=True):
        panel.stairs(*_shares(counts), fill=True, color="tab:blue")
    figure.suptitle(title)
    figure.savefig(path, dpi=120, metadata={"Software": None})


def draw_score_distributions(histograms: Mapping[str, Sequence[Sequence[int]]], path: Path) -> None:
    """Draw the same for several models as lines in common panels; histograms by name of the model."""
    figure, panels = _score_panels(max(map(len, histograms.values())))
    for name, own in histograms.items():
        for panel, counts in zip(panels, own, strict=False):
            panel.stairs(*_shares(counts), label=name, linewidth=1.3)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=8)
    figure.savefig(path, dpi=120, metadata={"Software": None})


def _shares(counts: Sequence[int]) -> tuple[list[float], list[float]]:
    """Return (percentage of the images in each bin, edges of the bins)."""
    edges = [bin_ / len(counts) for bin_ in range(len(counts) + 1)]
    return [100 * count / max(1, sum(counts)) for count in counts], edges


def _score_panels(count: int) -> tuple[Any, Any]:
    """Return a figure, and its panels for the highest score, the second highest, and so on."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 2.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, count, sharey=True, squeeze=False)[0]
    for panel, ordinal in zip(panels, ORDINALS, strict=False):
        panel.set(
            title=f"{ordinal} highest score", xlim=(0, 1), xlabel="score", yscale="symlog", ylim=(0, 100)
        )
        panel.set_yticks([0, 1, 10, 100], labels=["0", "1", "10", "100"])
    panels[0].set_ylabel("% of images")
    return figure, panels
