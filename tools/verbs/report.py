"""Make the report of saved predictions."""

from pathlib import Path
from typing import Annotated

import typer

from bigscl.common.command_line import AsJson
from bigscl.data.labels.real_labels import read_real_labels, read_reviewed_labels
from bigscl.evaluation.evaluate_options import Activation, Pooling
from bigscl.tools.shared.terminal import print_result


def command(
    predictions: Annotated[
        Path, typer.Argument(help="Folder of an evaluation, or another tool's logits: .npz or .npy.")
    ],
    keys: Annotated[
        Path | None, typer.Option(help="Keys of the images in the .npy: one per line, or .npy.")
    ] = None,
    labels: Annotated[
        Path | None, typer.Option(help=".npy with one class number per image, or with 1, 0 or -1 per class.")
    ] = None,
    real: Annotated[
        Path | None, typer.Option(help="real.json: score ImageNet-val by the ReaL labels.")
    ] = None,
    reviewed: Annotated[
        Path | None,
        typer.Option(
            "--multilabel",
            help="human_accuracy_v3.0.0.json: add multi-label accuracy on ImageNet-val by reviewed labels.",
        ),
    ] = None,
    activation: Annotated[Activation, typer.Option(help="How logits become scores.")] = "sigmoid",
    pooling: Annotated[
        Pooling, typer.Option(help="The logits that the report is about; the main figures of both are in it.")
    ] = "plain",
    name: Annotated[str | None, typer.Option(help="Name of the model in the report.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder for report.md, report.json and scores.png.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make the report of saved predictions, the same as `bigscl evaluate` makes."""
    from bigscl.evaluation.predictions import load_predictions
    from bigscl.evaluation.report import make_report
    from bigscl.evaluation.report_files import summary, to_json, write_report

    saved = load_predictions(predictions, keys=keys, labels=labels)
    if name is not None:
        saved.about["model"] = name
    report = make_report(
        saved,
        real_labels=None if real is None else read_real_labels(real),
        reviewed_labels=None if reviewed is None else read_reviewed_labels(reviewed, saved.class_names),
        activation=activation,
        pooling=pooling,
    )
    if output is not None:
        write_report(report, output)
    print_result(to_json(report), summary(report), as_json)
