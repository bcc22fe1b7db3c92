"""Pictures of runs: samples side by side, an epoch's samples, and curves of metrics over epochs."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bigscl.common.files import atomic_write, read_json_lines
from bigscl.config import Config
from bigscl.data.index import Index
from bigscl.evaluation.sample_plots import (
    MEANINGS,
    Kind,
    SampleImages,
    draw_samples,
    kinds_of,
    panel_of,
    side_by_side,
)
from bigscl.selection.thresholds import Thresholds
from bigscl.store import HeatmapStore, Rows
from bigscl.training.run_folder import open_data, read_store

KINDS: tuple[Kind, ...] = ("annotated", "unannotated", "negative")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoredSample:
    """The stored rows of one image in a run, and its annotated classes."""

    rows: Rows
    annotated: NDArray[np.bool_]
    """[L], by the labels that the run trains on."""


def draw_runs(
    runs: Mapping[str, Config], path: Path, *, kinds: Sequence[Kind] = KINDS, count: int = 4
) -> None:
    """Draw `count` training images that have an unannotated positive, one line for each kind of class.

    All runs use the same shards and keep their heatmaps on disk. The first run's labels decide which classes
    are annotated; of several classes, that with the highest mean score over the runs is shown.
    """
    index = open_data(next(iter(runs.values()))).train
    ids = _with_missing(index, count)
    stored = {name: _stored_samples(config, ids) for name, config in runs.items()}
    present, names = index.labels_of(ids, "full") == 1, index.class_names
    images = SampleImages(index, ids, present)
    samples = []
    for row, sample_id in enumerate(ids.tolist()):
        held, boxes = {name: own[row] for name, own in stored.items()}, images.boxes[sample_id]
        for kind, number in _shown(held, present[row], kinds):
            panels = []
            for name, own in held.items():
                own_kinds = kinds_of(own.annotated, present=present[row])
                panel = panel_of(own.rows, number, names, own_kinds, boxes)
                panels.append(replace(panel, name=f"{name}: {names[number]}"))
            samples.append(images.picture(sample_id, f"{names[number]}: {MEANINGS[kind]}", panels))
    draw_samples(
        samples, path, title=f"{len(ids)} training images with an unannotated positive, evenly over the set"
    )


def _with_missing(index: Index, count: int) -> NDArray[np.int64]:
    """Return images spread over the set that have an unannotated positive; any images if none has one."""
    ids = index.ids()
    missing = ((index.labels_of(ids, "full") == 1) & (index.labels_of(ids) != 1)).any(1)
    candidates = ids[missing] if missing.any() else ids
    return candidates[:: max(1, len(candidates) // count)][:count]


def _stored_samples(config: Config, ids: NDArray[np.int64]) -> list[StoredSample]:
    """Return the stored rows of each of these images in a run."""
    data = open_data(config)
    annotated = data.train.labels_of(ids, config.data.labels) == 1
    with read_store(config, data.labelled) as store:
        rows = store.read_without_initial_value(ids)
    return [StoredSample(rows=rows.take(slice(n, n + 1)), annotated=annotated[n]) for n in range(len(ids))]


def _shown(
    held: Mapping[str, StoredSample], present: NDArray[np.bool_], kinds: Sequence[Kind]
) -> list[tuple[Kind, int]]:
    """Return a class of each kind, if the image has one."""
    annotated = next(iter(held.values())).annotated
    scores = np.mean([own.rows.scores[0].astype(np.float64) for own in held.values()], axis=0)
    masks = {"annotated": annotated, "unannotated": present & ~annotated, "negative": ~present & ~annotated}
    return [(kind, int(np.where(masks[kind], scores, -1.0).argmax())) for kind in kinds if masks[kind].any()]


PANELS = 5


def draw_epoch(store: HeatmapStore, index: Index, selection: Thresholds, path: Path, count: int) -> None:
    """Draw the first `count` tracked samples with the heatmaps of some of their classes."""
    ids = np.array(store.spec.history_samples[:count], np.int64)
    expected = None
    if index.full is None:
        ranked = torch.from_numpy(store.read(ids).ranked_by())
        expected = selection.to("cpu").expected(ranked, torch.from_numpy(ids)).numpy()
    images = SampleImages(index, ids, index.labels_of(ids) == 1, expected)
    samples = side_by_side([store], images, ids, PANELS)
    draw_samples(samples, path, title=f"the first {len(ids)} tracked samples, evenly over the set")


Curve = dict[int, float]
"""A value by epoch, counted from 1."""
CURVES = {"val": ("map", "validation mAP, %", 100.0), "train": ("loss", "training loss", 1.0)}
"""The kinds of lines in metrics.jsonl, each with its field, its title and its scale."""


def read_curves(run: Path) -> dict[str, Curve]:
    """Return the mean of each metric in each epoch of a run, by its name as `train/loss`."""
    values: dict[str, dict[int, list[float]]] = {}
    for line in read_json_lines(run / "metrics.jsonl"):
        epoch, kind, _ = (line.pop(name, None) for name in ("epoch", "kind", "step"))
        if not isinstance(epoch, int):
            continue
        for name, value in line.items():
            if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
                values.setdefault(f"{kind}/{name}", {}).setdefault(epoch, []).append(value)
    return {
        name: {epoch: statistics.fmean(own) for epoch, own in sorted(by_epoch.items())}
        for name, by_epoch in values.items()
    }


def read_curve(run: Path, kind: str, name: str, scale: float = 1.0) -> Curve:
    """Return the mean of a metric in each epoch of a run; empty if the run has not logged it."""
    return {epoch: scale * value for epoch, value in read_curves(run).get(f"{kind}/{name}", {}).items()}


def draw_curves(runs: Mapping[str, Sequence[Path]], path: Path) -> bool:
    """Draw the curves of each method, a thin line per run and the mean over its runs (seeds) in bold.

    Returns False, and draws nothing, if no run has any metrics.
    """
    from matplotlib.figure import Figure

    curves = {
        kind: {name: [read_curve(run, kind, field, scale) for run in own] for name, own in runs.items()}
        for kind, (field, _, scale) in CURVES.items()
    }
    if not any(curve for methods in curves.values() for own in methods.values() for curve in own):
        return False
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    panels: Any = figure.subplots(1, len(CURVES))
    for panel, (kind, (_, title, _)) in zip(panels, CURVES.items(), strict=True):
        panel.set(title=title, xlabel="epoch")
        for number, (name, own) in enumerate(curves[kind].items()):
            _draw_method(panel, name, [curve for curve in own if curve], f"C{number % 10}")
        panel.grid(alpha=0.3)
        panel.xaxis.get_major_locator().set_params(integer=True)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=8)
    with atomic_write(path) as partial:
        figure.savefig(partial, dpi=120, format="png", metadata={"Software": None})
    return True


def _draw_method(panel: Any, name: str, curves: Sequence[Curve], color: str) -> None:
    mean = mean_curve(curves)
    # A single point would not be visible as a line.
    panel.plot(list(mean), list(mean.values()), label=name, color=color, linewidth=1.8, marker=".")
    if len(curves) > 1:
        for curve in curves:
            panel.plot(list(curve), list(curve.values()), color=color, linewidth=0.6, alpha=0.5)


def mean_curve(curves: Sequence[Curve]) -> Curve:
    """Return the mean in each epoch that all curves have; runs that have not come so far do not bend it."""
    common = set.intersection(*(set(curve) for curve in curves)) if curves else set()
    return {epoch: statistics.fmean(curve[epoch] for curve in curves) for epoch in sorted(common)}
