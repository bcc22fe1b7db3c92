"""`bigscl score`: the report on saved predictions, without the network."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from bigscl.tools.text import tell

Activation = Literal["sigmoid", "softmax"]


def command(
    predictions: Annotated[
        Path, typer.Argument(help="A folder of bigscl.evaluate, or another tool's logits: .npz, or .npy.")
    ],
    keys: Annotated[
        Path | None, typer.Option(help="Names of the .npy's images: one a line, or .npy.")
    ] = None,
    labels: Annotated[
        Path | None, typer.Option(help=".npy with a class number for each image, or 1, 0, -1 for each class.")
    ] = None,
    real: Annotated[
        Path | None, typer.Option(help="real.json: score ImageNet's validation images by the ReaL labels.")
    ] = None,
    activation: Annotated[Activation, typer.Option(help="What makes scores of logits.")] = "sigmoid",
    name: Annotated[str | None, typer.Option(help="What the report calls the model.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write report.md, report.json, scores.png there.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as one JSON object.")] = False,
) -> None:
    """Score saved predictions: the same report as bigscl.evaluate gives."""
    from bigscl.evaluation.predictions import load_predictions
    from bigscl.evaluation.real_labels import read_real_labels
    from bigscl.evaluation.report import make_report
    from bigscl.evaluation.report_files import summary, to_json, write_report

    saved = load_predictions(predictions, keys=keys, labels=labels)
    if name is not None:
        saved.about["model"] = name
    report = make_report(
        saved, real_labels=None if real is None else read_real_labels(real), activation=activation
    )
    if output is not None:
        write_report(report, output)
    tell(to_json(report), summary(report), as_json)
