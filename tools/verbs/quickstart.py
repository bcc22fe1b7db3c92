"""Run the whole system in minutes, offline."""

import json
import os
import shlex
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from bigscl.common.files import write_text
from bigscl.common.user_error import UserError
from bigscl.config.load import FOLDER
from bigscl.tools.shared.running import Runner, launcher
from bigscl.tools.shared.terminal import table

DEFAULT_FOLDER = Path("quickstart")
METHODS = {
    "an": "AN (assume negative)",
    "en": "EN (expected negative)",
    "cl": "EN + CL",
    "scl": "EN + SCL (the paper)",
    "scl_plus": "SCL+ (our recipe)",
    "bce": "oracle (all labels known)",
}
EXPLAINED = """\
SCL+: EN + SCL with half of the mined labels as positives, mined by heatmaps too, and corrected targets.
over ...: difference from that row with its 95% interval over test images (bigscl compare); one seed only.
F1: of scores of at least 0.5.
mined: labels that the memory found beyond the given ones: the share of them that are right (precision), and
the share of the missing ones that were found (recall).
pointing: how often the stored heatmap of a digit is hottest inside its box, for the digit of the
given label and for unlabelled digits.
score: average of the prediction of a class for an image over the epochs; heatmap: the same for each cell."""
PARTS = ("single", "train", "val", "test")


def command(
    folder: Annotated[Path, typer.Argument(help="Folder for data, runs and results.")] = DEFAULT_FOLDER,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed of the scenes and of training.")] = 0,
    methods: Annotated[str, typer.Option(help="Runs to compare, separated by commas.")] = ",".join(METHODS),
    epochs: Annotated[
        int | None,
        typer.Option(
            min=1, max=10_000, help="Number of epochs, for a shorter trial. Default: that of the configs."
        ),
    ] = None,
) -> None:
    """Make scenes of digits, pretrain, train six ways from one label per image, and compare them.

    Each command is shown before it runs, so that you can repeat it. Run the quickstart again to resume it:
    finished steps are skipped. Example: bigscl quickstart --seed 1 quickstart-1
    """
    chosen = _chosen(methods)
    folder.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    with Runner() as runner:
        steps = QuickstartRun(folder, seed, epochs, runner)
        steps.make_scenes()
        steps.train("pretrain")
        for name in chosen:
            steps.train(name)
            steps.evaluate(name)
    from bigscl.tools.shared import study_report

    results = {
        name: study_report.quickstart_figures(folder / name / "test" / "report.json")
        | study_report.mined_figures(folder / name)
        for name in chosen
    }
    baseline = "en" if "en" in chosen else chosen[0]
    differences = study_report.differences_from(folder, chosen, baseline)
    write_text(
        folder / "results.json",
        json.dumps({name: {**results[name], **differences[name]} for name in chosen}, indent=1),
    )
    picture = folder / "heatmaps.png"
    study_report.draw_quickstart(folder, {name: METHODS[name].split(" (")[0] for name in chosen}, picture)
    typer.echo(f"\n{_table(results, differences, baseline)}\n\n{EXPLAINED}")
    typer.echo(f"\nheatmaps of unlabelled digits: {picture}")
    typer.echo(f"took {(time.monotonic() - started) / 60:.1f} minutes")


def _chosen(methods: str) -> list[str]:
    chosen = [name.strip() for name in methods.split(",") if name.strip()]
    unknown = [name for name in chosen if name not in METHODS]
    if unknown or not chosen:
        raise UserError(f"--methods {methods}: expected some of {', '.join(METHODS)}")
    return chosen


class QuickstartRun:
    """The commands of the quickstart. Each is shown and run, or skipped if its result exists."""

    def __init__(self, folder: Path, seed: int, epochs: int | None, runner: Runner) -> None:
        self.folder, self.seed, self.epochs, self.runner = folder, seed, epochs, runner

    def make_scenes(self) -> None:
        scenes = self.folder / "scenes"
        if not (scenes / "bigscl-index-test.npz").exists():
            workers = str(os.cpu_count() or 1)
            self._run(
                "bigscl", "shards", "scenes", str(scenes), "--seed", str(self.seed), "--workers", workers
            )
            for part in PARTS:
                self._run("bigscl", "index", f"{scenes}/{part}-*.tar")

    def train(self, name: str) -> None:
        run = self.folder / name
        if (run / "done").exists():
            return
        config = os.path.relpath(FOLDER / f"quickstart_{name}.yaml")
        self._run(*launcher(), "-m", "bigscl.train", config, *self._settings(name))
        (run / "done").touch()

    def evaluate(self, name: str) -> None:
        """Evaluate the best validation epoch on the test scenes, and its stored heatmaps."""
        run = self.folder / name
        if not (run / "test" / "report.json").exists():
            test = f"{self.folder}/scenes/test-*.tar"
            options = ("--shards", test, "-o", str(run / "test"), "--heatmaps", "--workers", "1")
            self._run("python", "-m", "bigscl.evaluate", str(run), *options)

    def _settings(self, name: str) -> list[str]:
        """Return what differs from the config: nothing for the default folder and seed."""
        settings: dict[str, Any] = {}
        if self.seed:
            settings["seed"] = self.seed
        if self.folder != DEFAULT_FOLDER:
            part = "single" if name == "pretrain" else "train"
            settings["run"] = self.folder / name
            settings["data.train"] = f"{self.folder}/scenes/{part}-*.tar"
            settings["data.val"] = f"{self.folder}/scenes/val-*.tar"
            if name != "pretrain":
                settings["model.weights"] = self.folder / "pretrain" / "best" / "model.safetensors"
        if self.epochs is not None:
            settings["schedule.main.epochs"] = self.epochs
            # A trial of fewer epochs than the configs validate after would leave no best weights.
            settings["validation.every_epochs"] = 1
        return [text for key, value in settings.items() for text in (f"--{key}", str(value))]

    def _run(self, *words: str) -> None:
        typer.echo(f"\n$ {shlex.join(words)}")
        self.runner.run(words)


def _table(
    results: Mapping[str, Mapping[str, float | None]],
    differences: Mapping[str, Mapping[str, Any]],
    baseline: str,
) -> str:
    over = f"over {baseline.upper()}"
    heads = ["", "test mAP", over, "F1", over, "mined: precision", "recall", "pointing: given", "unlabelled"]
    rows = [
        [
            METHODS[name],
            _percent(row["map"]),
            _interval(differences[name][f"map_over_{baseline}"], name == baseline),
            _percent(row["f1"]),
            _interval(differences[name][f"f1_over_{baseline}"], name == baseline),
            *(_percent(row[figure]) for figure in ("mined_precision", "mined_recall", "given", "missing")),
        ]
        for name, row in results.items()
    ]
    return table(heads, rows, indent="")


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def _interval(found: Mapping[str, float], is_baseline: bool) -> str:
    if is_baseline:
        return ""
    change, low, high = (f"{100 * found[name]:+.1f}" for name in ("difference", "low", "high"))
    return f"{change} [{low}, {high}]"
