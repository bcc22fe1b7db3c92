"""The options of an evaluation, for `bigscl evaluate` and `python -m bigscl.evaluate`."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from bigscl.common.user_error import UserError

Triple = tuple[float, float, float]
Activation = Literal["sigmoid", "softmax"]
"""Turns logits into scores; it affects the ranking of images within a class."""
Pooling = Literal["plain", "map"]
"""How the cells of a map become one logit: as the network does it, or by map pooling."""
SEVERAL = ("--shards",)
"""Options that take several values: `--shards val-*.tar`, as the shell expands it."""
_model = partial(typer.Option, rich_help_panel="The network, where no run names it")
_images = partial(typer.Option, rich_help_panel="Images")
_report = partial(typer.Option, rich_help_panel="Report")
_LIMITS = {"mean": (0.0, 1.0), "std": (1e-6, 100.0), "max_bad_share": (0.0, 1.0)}


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationOptions:
    """Evaluate a network on shards, with any number of processes: each image once, and the same report.

    MODEL is a run (its best weights), a checkpoint or a weights file. Images are the run's validation shards,
    or others:

    bigscl evaluate runs/mine

    accelerate launch -m bigscl.evaluate runs/mine --shards 'test/test-*.tar' -o runs/mine/test

    The row of a network in the paper's ReaL table, here that of ResNet-50 with published weights:

    accelerate launch -m bigscl.evaluate --backbone resnet50 --weights IMAGENET1K_V1
    --shards 'imagenet/val-*.tar' --real real.json -o evaluation/resnet50

    Published weights get the preprocessing that they were published with, unless the options below change it.

    It writes report.md, report.json, scores.png and predictions.zarr. From the latter `bigscl report` makes
    the same report without the network, and `bigscl compare` compares several networks.
    """

    model: Annotated[
        Path | None, typer.Argument(metavar="MODEL", help="A run, a checkpoint, or a weights file.")
    ] = None
    backbone: Annotated[str | None, _model(help="resnet50, timm:<name>, or package.module:callable.")] = None
    weights: Annotated[str | None, _model(help="Name of published weights, as IMAGENET1K_V1.")] = None
    args: Annotated[
        str | None, _model(metavar="YAML", help="Keyword arguments of the network, as '{global_pool: avg}'.")
    ] = None
    name: Annotated[str | None, _model(help="Name of the network in the report.")] = None
    shards: Annotated[list[str] | None, _images(help="Tar shards. Default: the run's validation shards.")] = (
        None
    )
    index: Annotated[Path | None, _images(help="Index of the shards, if it is not in their folder.")] = None
    labels_file: Annotated[
        Path | None,
        _images(help="Full labels in place of those in the shards: .csv, .jsonl, .parquet, or ReaL's .json."),
    ] = None
    size: Annotated[int | None, _images(min=1, max=10_000, help="Side of the network's input.")] = None
    resize: Annotated[
        Literal["square", "shorter"] | None, _images(help="Use the whole image, or its centre.")
    ] = None
    shorter: Annotated[
        int | None, _images(min=1, max=10_000, help="Shorter side before the centre is cropped.")
    ] = None
    interpolation: Annotated[
        Literal["bilinear", "bicubic"] | None, _images(help="How images are resized.")
    ] = None
    mean: Annotated[Triple | None, _images(help="Mean of red, green and blue, in 0 to 1.")] = None
    std: Annotated[Triple | None, _images(help="Standard deviation of red, green and blue, in 0 to 1.")] = (
        None
    )
    batch_size: Annotated[
        int, _images(min=1, max=100_000, help="Images that a loader worker sends at once.")
    ] = 64
    workers: Annotated[int, _images(min=0, max=1024, help="Loader workers of each process.")] = 4
    max_bad_share: Annotated[float, _images(help="Tolerated fraction of unreadable images.")] = 0.01
    allow_pipe: Annotated[bool, _images("--allow-pipe", help="Run the commands of `pipe:` shards.")] = False
    output: Annotated[
        Path | None,
        _report("--output", "-o", help="Folder of the report. Default: `evaluation` in the run's folder."),
    ] = None
    real: Annotated[Path | None, _report(help="real.json: score ImageNet-val by the ReaL labels.")] = None
    reviewed: Annotated[
        Path | None,
        _report(
            "--multilabel",
            help="human_accuracy_v3.0.0.json: add multi-label accuracy on ImageNet-val by reviewed labels.",
        ),
    ] = None
    activation: Annotated[Activation, _report(help="How logits become scores.")] = "sigmoid"
    pooling: Annotated[
        Pooling,
        _report(
            help="The logits that the report is about: as the network pools, or map pooling, which finds "
            "more small objects. The main figures of both are in it."
        ),
    ] = "plain"
    boxes: Annotated[bool, _report("--boxes", help="Add the pointing game of the network's maps.")] = False
    heatmaps: Annotated[
        bool, _report("--heatmaps", help="Add the pointing game of the run's stored heatmaps.")
    ] = False
    json: Annotated[bool, _report("--json", help="Print the report as one JSON object.")] = False

    def __post_init__(self) -> None:
        # Typer checks no ranges of tuples, and lets NaN pass.
        for name, (least, most) in _LIMITS.items():
            value = getattr(self, name)
            values = value if isinstance(value, tuple) else () if value is None else (value,)
            if not all(least <= one <= most for one in values):
                option = f"--{name.replace('_', '-')}"
                raise UserError(f"{option} {value}: expected {least:g} to {most:g}")
