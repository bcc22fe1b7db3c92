"""Learning curves of runs: validation mAP and training loss over the epochs."""

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bigscl.common.files import atomic_write, read_json_lines

Curve = dict[int, float]
"""A value by epoch, counted from 1."""
PANELS = {"val": ("map", "validation mAP, %", 100.0), "train": ("total", "training loss", 1.0)}
"""The kinds of lines in metrics.jsonl, each with its field, its title and its scale."""


def read_curve(run: Path, kind: str, name: str, scale: float = 1.0) -> Curve:
    """Return the mean of a metric in each epoch of a run; empty if the run has not logged it."""
    values: dict[int, list[float]] = {}
    file = run / "metrics.jsonl"
    for line in read_json_lines(file) if file.exists() else ():
        epoch, value = line.get("epoch"), line.get(name)
        if line.get("kind") != kind or not isinstance(epoch, int) or not isinstance(value, int | float):
            continue
        if math.isfinite(value):
            values.setdefault(epoch + 1, []).append(scale * value)
    return {epoch: statistics.fmean(found) for epoch, found in sorted(values.items())}


def draw_curves(runs: Mapping[str, Sequence[Path]], path: Path) -> bool:
    """Draw the curves of each method, a thin line per run and the mean over its runs (seeds) in bold.

    Returns False, and draws nothing, if no run has any metrics.
    """
    from matplotlib.figure import Figure

    curves = {
        kind: {name: [read_curve(run, kind, field, scale) for run in own] for name, own in runs.items()}
        for kind, (field, _, scale) in PANELS.items()
    }
    if not any(curve for methods in curves.values() for own in methods.values() for curve in own):
        return False
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    panels: Any = figure.subplots(1, len(PANELS))
    for panel, (kind, (_, title, _)) in zip(panels, PANELS.items(), strict=True):
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
