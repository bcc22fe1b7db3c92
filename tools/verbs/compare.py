"""Compare the predictions of several runs."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from bigscl.common.command_line import AsJson
from bigscl.common.files import write_text
from bigscl.data.labels.real_labels import read_real_labels
from bigscl.evaluation.evaluate_options import Activation
from bigscl.tools.shared.terminal import print_result

if TYPE_CHECKING:
    from bigscl.evaluation.compare import Comparison


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
        Literal["plain", "map", "both"],
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
    from bigscl.evaluation.compare import compare, comparison_facts, comparison_text
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
    print_result(comparison_facts(compared), comparison_text(compared), as_json)


def _write(compared: "list[Comparison]", paths: list[Path], folder: Path) -> None:
    from bigscl.evaluation.compare import comparison_facts, comparison_text
    from bigscl.evaluation.report_files import draw_score_distributions
    from bigscl.evaluation.run_plots import draw_curves

    folder.mkdir(parents=True, exist_ok=True)
    histograms = {run.report.name: run.report.score_distribution for run in compared}
    draw_score_distributions(histograms, folder / "scores.png")
    # With both poolings each run is there twice.
    names = [run.report.model for run in compared[:: len(compared) // len(paths)]]
    runs = {
        name: [run] for name, path in zip(names, paths, strict=True) if (run := _run_of(path)) is not None
    }
    drawn = draw_curves(runs, folder / "curves.png")
    pictures = ["![score distributions](scores.png)", *["![learning curves](curves.png)"] * drawn]
    write_text(folder / "compare.md", "\n\n".join([comparison_text(compared), *pictures]) + "\n")
    write_text(folder / "compare.json", json.dumps(comparison_facts(compared), indent=1) + "\n")


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
