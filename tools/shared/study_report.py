"""The results of a study, or of the quickstart: a table of its runs, score distributions, and heatmaps."""

import json
import math
import os
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bigscl.common.files import parse_errors, read_json_lines, read_json_object, write_text
from bigscl.common.user_error import UserError
from bigscl.config import load_config
from bigscl.evaluation.compare import compare, limits, resampled_maps
from bigscl.evaluation.evaluate_options import Pooling
from bigscl.evaluation.localization import STORED
from bigscl.evaluation.memory_figures import mined_by_run
from bigscl.evaluation.predictions import load_predictions
from bigscl.evaluation.report_files import draw_score_distributions, markdown_table, plain
from bigscl.evaluation.run_plots import draw_curves, draw_runs
from bigscl.tools.shared.running import Trial
from bigscl.training.run_folder import open_data

MAKE_AGAIN = "Delete the file and run the command again to make it again."
FIGURES = {
    "f1": "F1 at 0.5",
    "given": "pointing: given",
    "missing": "missing",
    "mined_precision": "mined: precision",
    "mined_recall": "recall",
}
"""Columns of the table after the mAP, in percent."""
POOLED = {"plain": "", "map": "_with_map_pooling"}
"""Ends of the names of figures by pooling, as in the metrics of validation."""


def write_results(trials: Sequence[Trial], out: Path) -> str:
    """Write results.json, results.md and plots of the finished runs to a folder, and return the table."""
    done = [trial for trial in trials if trial.done]
    if not done:
        return "no run is finished yet"
    figures = {trial: _figures(trial) for trial in done}
    runs = [
        {"row": trial.row, "seed": trial.seed, "run": str(trial.folder), **own}
        for trial, own in figures.items()
    ]
    write_text(out / "results.json", json.dumps(plain(runs), indent=1) + "\n")
    table = _table(runs, done, "plain")
    if done[0].pooling == "map":
        table = f"{table}\n\nWith map pooling:\n\n{_table(runs, done, 'map')}"
    _draw_scores(done, out / "scores.png")
    _draw_curves(done, out / "curves.png")
    _draw_heatmaps(done, out / "heatmaps.png")
    names = ("scores", "curves", "heatmaps")
    pictures = [f"![{name}]({name}.png)" for name in names if (out / f"{name}.png").exists()]
    write_text(out / "results.md", "\n\n".join([_about(done), table, *pictures]) + "\n")
    return table


def _about(trials: Sequence[Trial]) -> str:
    """Return a sentence on the revisions of the sources, the libraries and this machine."""
    lines = [
        line
        for trial in trials
        for line in read_json_lines(trial.folder / "environment.jsonl")
        if {"revision", "time"} <= line.keys()
    ]
    parts = {(line["revision"] or "unknown").partition("-") for line in lines}
    revisions = sorted({name[:12] + (f"-{dirty}" if dirty else "") for name, _, dirty in parts})
    times = sorted(line["time"] for line in lines)
    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    torch_version, hardware = lines[0]["versions"]["torch"], ", ".join(gpus) or "no GPU"
    return (
        f"{len(trials)} runs of revision {', '.join(revisions)}, started {times[0]} to {times[-1]}, with "
        f"torch {torch_version}, {os.cpu_count()} CPU cores, {hardware}. Means and standard deviations over "
        f"seeds, in percent; differences are taken within a seed, intervals by bootstrap over images."
    )


def _table(runs: Sequence[dict[str, Any]], trials: Sequence[Trial], pooling: Pooling) -> str:
    own = [{**run, **{name: run[name + POOLED[pooling]] for name in ("map", "f1")}} for run in runs]
    return to_table(own, {(trial.row, trial.seed): _resampled_maps(trial, pooling) for trial in trials})


def to_table(runs: Sequence[dict[str, Any]], maps: Mapping[tuple[str, int], NDArray[np.float64]]) -> str:
    """Return the table: mean and deviation over seeds; `maps` has mAPs of resamples by row and seed."""
    rows = list(dict.fromkeys(run["row"] for run in runs))
    first = {run["seed"]: run["map"] for run in runs if run["row"] == rows[0]}
    lines = []
    for row in rows:
        own = [run for run in runs if run["row"] == row]
        # A seed draws the labels of all rows, so differences are taken within a seed.
        paired = {run["seed"]: run["map"] for run in own if row != rows[0] and run["seed"] in first}
        line = [
            mean_and_spread(run["map"] for run in own),
            mean_and_spread((value - first[seed] for seed, value in paired.items()), signed=True),
            _interval([maps[row, seed] - maps[rows[0], seed] for seed in paired]),
            *(mean_and_spread(run[name] for run in own) for name in FIGURES),
            f"{statistics.fmean(run['minutes'] for run in own):.1f}",
        ]
        lines.append([row, str(len(own)), *line])
    header = ["", "seeds", "mAP", "difference", "95% over images", *FIGURES.values(), "minutes per run"]
    return markdown_table(header, lines)


def _interval(differences: Sequence[NDArray[np.float64]]) -> str:
    if not differences:
        return "–"
    low, high = limits(np.mean(differences, axis=0))
    return f"{100 * low:+.1f} to {100 * high:+.1f}"


@cache
def _resampled_maps(trial: Trial, pooling: Pooling) -> NDArray[np.float64]:
    return resampled_maps(load_predictions(trial.report.parent), pooling=pooling)


def mean_and_spread(fractions: Iterable[float], *, signed: bool = False) -> str:
    """Return mean and standard deviation in percent; only the mean of a single value, a dash for none."""
    values = [100 * value for value in fractions if not math.isnan(value)]
    if not values:
        return "–"
    mean = f"{statistics.fmean(values):{'+' if signed else ''}.1f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.1f}"


def _figures(trial: Trial) -> dict[str, float]:
    report = _read_report(trial)
    heat = (report["localization"] or {}).get(STORED, {})
    mined = _mined(trial)
    # A run that is given all labels has no missing ones.
    missing = {} if trial.resolved().data.labels == "full" else heat.get("missing", {})
    own = {"map": report["mean_ap"]["present"], "f1": report["at_threshold"]["overall_f1"]}
    poolings = {"plain": own, **report.get("poolings", {})}
    return {
        **{
            name + end: _number(poolings.get(pooling, {}).get(name))
            for pooling, end in POOLED.items()
            for name in own
        },
        "given": _number(heat.get("given", {}).get("hit_rate")),
        "missing": _number(missing.get("hit_rate")),
        "mined_precision": _number(mined.get("precision")),
        "mined_recall": _number(mined.get("recall")),
        "minutes": _minutes(trial.folder / "seconds.txt"),
    }


def _read_report(trial: Trial) -> dict[str, Any]:
    with parse_errors(trial.report, "a report of bigscl.evaluate", MAKE_AGAIN):
        report: dict[str, Any] = json.loads(trial.report.read_bytes())
        float(report["mean_ap"]["present"])
        histograms, heat = report["score_distribution"], report["localization"] or {}
        if not all(isinstance(histogram, list) for histogram in histograms) or not isinstance(heat, dict):
            raise UserError("score_distribution and localization are not what a report has")
        _number(report["at_threshold"]["overall_f1"])
        return report


def _minutes(file: Path) -> float:
    with parse_errors(
        file, "a list of seconds", "Delete the lines that are not numbers, then run the command again."
    ):
        return sum(map(float, file.read_text().split())) / 60


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _mined(trial: Trial) -> dict[str, Any]:
    """Return precision and recall of the positives that the run's memory has found; cached in its folder."""
    file = trial.folder / "mined.json"
    known = read_json_object(file) if file.exists() else None
    if known is None:
        mined = mined_by_run(trial.resolved())
        known = {} if mined is None else plain(asdict(mined))
        write_text(file, json.dumps(known))
    return known


def _draw_scores(trials: Sequence[Trial], path: Path) -> None:
    """Draw the distribution of the 1st to 4th highest score of an image, one line per row, over all seeds."""
    sums: dict[str, Any] = {}
    for trial in trials:
        histograms = np.array(_read_report(trial)["score_distribution"])
        sums[trial.row] = sums.get(trial.row, 0) + histograms
    names = _short_names(list(sums))
    draw_score_distributions(dict(zip(names, (total.tolist() for total in sums.values()), strict=True)), path)


def _draw_curves(trials: Sequence[Trial], path: Path) -> None:
    """Draw the learning curves of all runs, one colour per row."""
    folders: dict[str, list[Path]] = {}
    for trial in trials:
        folders.setdefault(trial.row, []).append(trial.folder)
    draw_curves(dict(zip(_short_names(list(folders)), folders.values(), strict=True)), path)


def _draw_heatmaps(trials: Sequence[Trial], path: Path) -> None:
    """Draw the heatmaps of the runs of the first seed for the same images, if all their labels are known."""
    first = {trial.row: trial.resolved() for trial in trials if trial.seed == trials[0].seed}
    kept = {row: config for row, config in first.items() if config.store.kind == "disk"}
    if kept and open_data(next(iter(kept.values()))).train.full is not None:
        names = _short_names(list(kept))
        draw_runs(dict(zip(names, kept.values(), strict=True)), path)


def _short_names(rows: Sequence[str]) -> list[str]:
    parts = [re.split("(?<=[_ ])", row) for row in rows]
    shared = 0
    while len({tuple(words[: shared + 1]) for words in parts}) == 1 and shared + 1 < min(map(len, parts)):
        shared += 1
    return ["".join(words[shared:]) for words in parts]


# The quickstart


def quickstart_figures(report: Path) -> dict[str, float | None]:
    with parse_errors(report, "a report of bigscl.evaluate", MAKE_AGAIN):
        report_json = json.loads(report.read_bytes())
        heat = report_json["localization"][STORED]
        return {
            "map": float(report_json["mean_ap"]["present"]),
            "f1": float(report_json["at_threshold"]["overall_f1"]),
            "given": float(heat["given"]["hit_rate"]),
            "missing": float(heat["missing"]["hit_rate"]),
        }


def mined_figures(run: Path) -> dict[str, float | None]:
    """Return precision and recall of the labels that a run found; None for the oracle, which is given all."""
    mined = mined_by_run(load_config(run / "config.yaml"))
    precision_recall = (None, None) if mined is None else (plain(mined.precision), plain(mined.recall))
    return {"mined_precision": precision_recall[0], "mined_recall": precision_recall[1]}


def differences_from(folder: Path, methods: list[str], baseline: str) -> dict[str, dict[str, Any]]:
    """Return the differences of mAP and F1 from the baseline with their intervals, by method."""
    order = [baseline, *(name for name in methods if name != baseline)]
    compared = compare([load_predictions(folder / name / "test") for name in order])
    return {
        name: {f"{figure}_over_{baseline}": asdict(comparison.figures[figure]) for figure in ("map", "f1")}
        for name, comparison in zip(order, compared, strict=True)
    }


def draw_quickstart(folder: Path, titles: Mapping[str, str], path: Path) -> None:
    runs = {title: load_config(folder / name / "config.yaml") for name, title in titles.items()}
    draw_runs(runs, path, kinds=("unannotated",), count=6)
