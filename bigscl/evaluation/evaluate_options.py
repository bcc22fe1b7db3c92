"""The options of an evaluation, for `bigscl evaluate` and `python -m bigscl.evaluate`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from bigscl.common.user_error import UserError

Triple = tuple[float, float, float]
SEVERAL = ("--shards",)
"""Options that take several values: `--shards val-*.tar`, as the shell expands it."""
_MODEL, _IMAGES, _REPORT = "The network, where no run names it", "Images", "Report"
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
    backbone: Annotated[
        str | None,
        typer.Option(help="resnet50, timm:<name>, or package.module:callable.", rich_help_panel=_MODEL),
    ] = None
    weights: Annotated[
        str | None, typer.Option(help="Name of published weights, as IMAGENET1K_V1.", rich_help_panel=_MODEL)
    ] = None
    args: Annotated[
        str | None,
        typer.Option(
            metavar="YAML",
            help="Keyword arguments of the network, as '{global_pool: avg}'.",
            rich_help_panel=_MODEL,
        ),
    ] = None
    name: Annotated[
        str | None, typer.Option(help="Name of the network in the report.", rich_help_panel=_MODEL)
    ] = None
    shards: Annotated[
        list[str] | None,
        typer.Option(help="Tar shards. Default: the run's validation shards.", rich_help_panel=_IMAGES),
    ] = None
    index: Annotated[
        Path | None,
        typer.Option(help="Index of the shards, if it is not in their folder.", rich_help_panel=_IMAGES),
    ] = None
    labels_file: Annotated[
        Path | None,
        typer.Option(
            help="Full labels in place of those in the shards: .csv, .jsonl, .parquet, or ReaL's .json.",
            rich_help_panel=_IMAGES,
        ),
    ] = None
    size: Annotated[
        int | None,
        typer.Option(min=1, max=10_000, help="Side of the network's input.", rich_help_panel=_IMAGES),
    ] = None
    resize: Annotated[
        Literal["square", "shorter"] | None,
        typer.Option(help="Use the whole image, or its centre.", rich_help_panel=_IMAGES),
    ] = None
    shorter: Annotated[
        int | None,
        typer.Option(
            min=1, max=10_000, help="Shorter side before the centre is cropped.", rich_help_panel=_IMAGES
        ),
    ] = None
    interpolation: Annotated[
        Literal["bilinear", "bicubic"] | None,
        typer.Option(help="How images are resized.", rich_help_panel=_IMAGES),
    ] = None
    mean: Annotated[
        Triple | None, typer.Option(help="Mean of red, green and blue, in 0 to 1.", rich_help_panel=_IMAGES)
    ] = None
    std: Annotated[
        Triple | None,
        typer.Option(help="Standard deviation of red, green and blue, in 0 to 1.", rich_help_panel=_IMAGES),
    ] = None
    batch_size: Annotated[
        int,
        typer.Option(
            min=1, max=100_000, help="Images that a loader worker sends at once.", rich_help_panel=_IMAGES
        ),
    ] = 64
    workers: Annotated[
        int, typer.Option(min=0, max=1024, help="Loader workers of each process.", rich_help_panel=_IMAGES)
    ] = 4
    max_bad_share: Annotated[
        float, typer.Option(help="Tolerated fraction of unreadable images.", rich_help_panel=_IMAGES)
    ] = 0.01
    allow_pipe: Annotated[
        bool,
        typer.Option("--allow-pipe", help="Run the commands of `pipe:` shards.", rich_help_panel=_IMAGES),
    ] = False
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Folder of the report. Default: `evaluation` in the run's folder.",
            rich_help_panel=_REPORT,
        ),
    ] = None
    real: Annotated[
        Path | None,
        typer.Option(help="real.json: score ImageNet-val by the ReaL labels.", rich_help_panel=_REPORT),
    ] = None
    reviewed: Annotated[
        Path | None,
        typer.Option(
            "--multilabel",
            help="human_accuracy_v3.0.0.json: add multi-label accuracy on ImageNet-val by reviewed labels.",
            rich_help_panel=_REPORT,
        ),
    ] = None
    activation: Annotated[
        Literal["sigmoid", "softmax"], typer.Option(help="How logits become scores.", rich_help_panel=_REPORT)
    ] = "sigmoid"
    pooling: Annotated[
        Literal["plain", "map"],
        typer.Option(
            help="The logits that the report is about: as the network pools, or map pooling, which finds "
            "more small objects. The main figures of both are in it.",
            rich_help_panel=_REPORT,
        ),
    ] = "plain"
    boxes: Annotated[
        bool,
        typer.Option("--boxes", help="Add the pointing game of the network's maps.", rich_help_panel=_REPORT),
    ] = False
    heatmaps: Annotated[
        bool,
        typer.Option(
            "--heatmaps", help="Add the pointing game of the run's stored heatmaps.", rich_help_panel=_REPORT
        ),
    ] = False
    json: Annotated[
        bool, typer.Option("--json", help="Print the report as one JSON object.", rich_help_panel=_REPORT)
    ] = False

    def __post_init__(self) -> None:
        # Typer checks no ranges of tuples, and lets NaN pass.
        for name, (least, most) in _LIMITS.items():
            value = getattr(self, name)
            values = value if isinstance(value, tuple) else () if value is None else (value,)
            if not all(least <= one <= most for one in values):
                option = f"--{name.replace('_', '-')}"
                raise UserError(f"{option} {value}: expected {least:g} to {most:g}")
