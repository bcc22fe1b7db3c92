"""Compare the predictions of several runs."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bigscl.common.command_line import AsJson
from bigscl.common.files import write_text
from bigscl.tools.shared.terminal import print_result
from bigscl.tools.verbs.report import Activation, Poolings

if TYPE_CHECKING:
    from bigscl.evaluation.compare import Comparison, Difference


def command(
    predictions: Annotated[
        list[Path],
        typer.Argument(
            help="Folders of evaluations, or .npz files of other tools; the first is the baseline."
        ),
    ],
    real: Annotated[
        Path | None, typer.Option(help="real.json: score ImageNet-val by the ReaL labels.")
    ] = None,
    activation: Annotated[Activation, typer.Option(help="How logits become scores.")] = "sigmoid",
    pooling: Annotated[
        Poolings,
        typer.Option(help="The logits that are compared; both: each run twice, plain and with map pooling."),
    ] = "plain",
    resamples: Annotated[
        int, typer.Option(min=10, max=1_000_000, help="Number of bootstrap resamples of the images.")
    ] = 200,
    classes: Annotated[
        int, typer.Option(min=0, help="Number of classes to list, the most changed first.")
    ] = 10,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed of the resamples.")] = 0,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="Folder for compare.md, compare.json, scores.png and curves.png."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare runs with the first: metrics, differences with 95% bootstrap intervals, changed classes.

    With -o it also draws the score distributions of all runs in one picture, and the learning curves of those
    whose predictions are in the folder of their run.

    Example: bigscl compare runs/an runs/scl -o comparison
    """
    from bigscl.data.labels.label_files import read_real_labels
    from bigscl.evaluation.compare import compare
    from bigscl.evaluation.predictions import load_predictions

    runs = [load_predictions(path) for path in predictions]
    _name_apart(runs, predictions)
    compared = compare(
        runs,
        real_labels=None if real is None else read_real_labels(real),
        activation=activation,
        pooling=pooling,
        num_resamples=resamples,
        num_classes=classes,
        seed=seed,
    )
    if output is not None:
        _write(compared, predictions, output)
    print_result(_facts(compared), _text(compared), as_json)


def _write(compared: "list[Comparison]", paths: list[Path], folder: Path) -> None:
    """Write the comparison and its pictures into a folder."""
    from bigscl.evaluation.plots.run_plots import draw_curves
    from bigscl.evaluation.report_files import draw_score_distributions

    folder.mkdir(parents=True, exist_ok=True)
    histograms = {one.report.name: one.report.score_distribution for one in compared}
    draw_score_distributions(histograms, folder / "scores.png")
    # With both poolings each run is there twice.
    names = [one.report.model for one in compared[:: len(compared) // len(paths)]]
    runs = {
        name: [run] for name, path in zip(names, paths, strict=True) if (run := _run_of(path)) is not None
    }
    drawn = draw_curves(runs, folder / "curves.png")
    pictures = ["![score distributions](scores.png)", *["![learning curves](curves.png)"] * drawn]
    write_text(folder / "compare.md", "\n\n".join([_text(compared), *pictures]) + "\n")
    write_text(folder / "compare.json", json.dumps(_facts(compared), indent=1) + "\n")


def _run_of(path: Path) -> Path | None:
    """Return the folder of the run that predictions are in; None if they are elsewhere."""
    folders = [path.absolute(), *path.absolute().parents][:3]
    return next((folder for folder in folders if (folder / "metrics.jsonl").is_file()), None)


def _name_apart(runs: list[Any], paths: list[Path]) -> None:
    """Name runs after their paths if their models have the same name."""
    names = [run.about["model"] for run in runs]
    for run, path, name in zip(runs, paths, names, strict=True):
        if names.count(name) > 1:
            run.about["model"] = str(path)


def _facts(compared: "list[Comparison]") -> dict[str, Any]:
    from bigscl.evaluation.report_files import plain

    rows = [
        {
            "model": one.report.model,
            "pooling": one.report.pooling,
            "num_images": one.report.num_images,
            "figures": {name: asdict(found) for name, found in one.figures.items()},
            "changes": [asdict(change) for change in one.changes],
        }
        for one in compared
    ]
    return {"first": compared[0].report.name, "runs": plain(rows)}


def _text(compared: "list[Comparison]") -> str:
    from bigscl.evaluation.main_metrics import METRICS
    from bigscl.evaluation.report_files import main_table, markdown_table, pooling_table

    first = compared[0]
    header = ["run", *(metric.title for metric in METRICS.values())]
    rows = [
        [one.report.name, *(_cell(one.figures[name], one is first) for name in METRICS)] for one in compared
    ]
    parts = [
        f"{len(compared)} runs on {first.report.num_images:,} images; differences from {first.report.name} "
        f"with 95% bootstrap intervals over images, in percent",
        markdown_table(header, rows),
        main_table([one.report for one in compared]),
        pooling_table([one.report for one in compared]),
        *(_changes(first, one) for one in compared[1:] if one.changes),
    ]
    return "\n\n".join(filter(None, parts))


def _cell(found: "Difference", is_first: bool) -> str:
    from bigscl.evaluation.report_files import percent

    if is_first:
        return percent(found.value)
    change, low, high = (f"{100 * value:+.2f}" for value in (found.difference, found.low, found.high))
    return f"{percent(found.value)} {change} [{low}, {high}]"


def _changes(first: "Comparison", one: "Comparison") -> str:
    from bigscl.evaluation.report_files import markdown_table, percent

    rows = [
        [
            c.name,
            f"{c.num_positives:,}",
            percent(c.before),
            percent(c.after),
            f"{100 * (c.after - c.before):+.2f}",
        ]
        for c in one.changes
    ]
    header = ["class", "positives", f"AP of {first.report.name}", f"AP of {one.report.name}", "change"]
    return markdown_table(header, rows)
