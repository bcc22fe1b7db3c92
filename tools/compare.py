"""`bigscl compare`: compare the predictions of several runs on the same images."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bigscl.command_line import AsJson
from bigscl.tools.score import Activation
from bigscl.tools.text import tell

if TYPE_CHECKING:
    from bigscl.evaluation.compare import Compared, Difference


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
    resamples: Annotated[
        int, typer.Option(min=10, max=1_000_000, help="Number of bootstrap resamples of the images.")
    ] = 200,
    classes: Annotated[
        int, typer.Option(min=0, help="Number of classes to list, the most changed first.")
    ] = 10,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed of the resamples.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Compare runs with the first: metrics, differences with 95% bootstrap intervals, changed classes."""
    from bigscl.evaluation.compare import compare
    from bigscl.evaluation.predictions import load_predictions
    from bigscl.evaluation.real_labels import read_real_labels

    runs = [load_predictions(path) for path in predictions]
    _name_apart(runs, predictions)
    compared = compare(
        runs,
        real_labels=None if real is None else read_real_labels(real),
        activation=activation,
        num_resamples=resamples,
        num_classes=classes,
        seed=seed,
    )
    tell(_facts(compared), _text(compared), as_json)


def _name_apart(runs: list[Any], paths: list[Path]) -> None:
    """Name runs after their paths if their models have the same name."""
    names = [run.about["model"] for run in runs]
    for run, path, name in zip(runs, paths, names, strict=True):
        if names.count(name) > 1:
            run.about["model"] = str(path)


def _facts(compared: "list[Compared]") -> dict[str, Any]:
    from bigscl.evaluation.report_files import plain

    rows = [
        {
            "model": one.report.model,
            "num_images": one.report.num_images,
            "figures": {name: asdict(found) for name, found in one.figures.items()},
            "changes": [asdict(change) for change in one.changes],
        }
        for one in compared
    ]
    return {"first": compared[0].report.model, "runs": plain(rows)}


def _text(compared: "list[Compared]") -> str:
    from bigscl.evaluation.compare import FIGURES
    from bigscl.evaluation.report_files import main_table, markdown_table

    first = compared[0]
    header = ["run", *(title for title in FIGURES.values())]
    rows = [
        [one.report.model, *(_cell(one.figures[name], one is first) for name in FIGURES)] for one in compared
    ]
    parts = [
        f"{len(compared)} runs on {first.report.num_images:,} images; differences from {first.report.model} "
        f"with 95% bootstrap intervals over images, in percent",
        markdown_table(header, rows),
        main_table([one.report for one in compared]),
        *(_changes(first, one) for one in compared[1:] if one.changes),
    ]
    return "\n\n".join(parts)


def _cell(found: "Difference", is_first: bool) -> str:
    from bigscl.evaluation.report_files import percent

    if is_first:
        return percent(found.value)
    change, low, high = (f"{100 * value:+.2f}" for value in (found.difference, found.low, found.high))
    return f"{percent(found.value)} {change} [{low}, {high}]"


def _changes(first: "Compared", one: "Compared") -> str:
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
    header = ["class", "positives", f"AP of {first.report.model}", f"AP of {one.report.model}", "change"]
    return markdown_table(header, rows)
