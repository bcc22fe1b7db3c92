"""The command line of `bigscl.evaluate`."""

from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from pathlib import Path
from typing import NoReturn

import numpy as np

LIMITS = {
    "batch-size": (1, 100_000),
    "workers": (0, 1024),
    "size": (1, 10_000),
    "shorter": (1, 10_000),
    "mean": (0, 1),
    "std": (1e-6, 100),
    "max-bad-share": (0, 1),
}
"""The least and the largest value of an option."""


class Parser(ArgumentParser):
    """A parser whose complaints are mistakes like any other: one line, on one rank."""

    def error(self, message: str) -> NoReturn:
        """Raise what argparse would print."""
        raise ValueError(f"{message}. See --help.")


def parse(arguments: list[str], description: str) -> Namespace:
    """The options of an evaluation."""
    parser = Parser(
        prog="bigscl.evaluate",
        description=description,
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("model", nargs="?", type=Path, help="a run, a checkpoint, or a weights file")
    _add_model(parser)
    _add_images(parser)
    _add_report(parser)
    options = parser.parse_args(arguments)
    for name, (least, most) in LIMITS.items():
        value = getattr(options, name.replace("-", "_"))
        if value is not None and not all(least <= one <= most for one in np.atleast_1d(value)):
            raise ValueError(f"--{name} {value}: expected {least:g} to {most:g}")
    return options


def _add_model(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("the network, where no run says it")
    group.add_argument("--backbone", help="resnet50, timm:<name>, or package.module:callable")
    group.add_argument("--weights", help="published weights by name, as IMAGENET1K_V1")
    group.add_argument("--pooling", choices=("logits", "probabilities"), help="of a weights file")
    group.add_argument("--name", help="what the report calls it")


def _add_images(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("images")
    group.add_argument("--shards", nargs="+", help="tars; the run's data.val unless told")
    group.add_argument("--index", type=Path, help="index of the shards, if it is not beside them")
    group.add_argument("--size", type=int, help="side of the network's input")
    group.add_argument("--resize", choices=("square", "shorter"), help="the whole image, or its centre")
    group.add_argument("--shorter", type=int, help="the shorter side before the centre is cut out")
    group.add_argument("--mean", nargs=3, type=float, help="of red, green and blue, in 0 to 1")
    group.add_argument("--std", nargs=3, type=float, help="of red, green and blue, in 0 to 1")
    group.add_argument("--batch-size", type=int, default=64, help="images a loader worker sends at once (64)")
    group.add_argument("--workers", type=int, default=4, help="loader workers of each process (4)")
    group.add_argument("--max-bad-share", type=float, default=0.01, help="unreadable images to bear (0.01)")
    group.add_argument("--allow-pipe", action="store_true", help="run the commands of `pipe:` shards")


def _add_report(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("report")
    group.add_argument("-o", "--output", type=Path, help="its folder; `evaluation` in the run unless told")
    group.add_argument("--real", type=Path, help="real.json: score ImageNet-val by the ReaL labels")
    group.add_argument(
        "--activation", choices=("sigmoid", "softmax"), default="sigmoid", help="scores from logits (sigmoid)"
    )
    group.add_argument("--boxes", action="store_true", help="pointing game of the network's maps")
    group.add_argument("--heatmaps", action="store_true", help="pointing game of the run's stored heatmaps")
    group.add_argument("--json", action="store_true", help="print the report as one JSON object")
