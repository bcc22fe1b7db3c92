"""`bigscl quickstart`: run the whole system in minutes, offline, and show every command."""

import json
import os
import shlex
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from bigscl.files import write_text
from bigscl.tools.running import CONFIGS, Runner, launcher

DEFAULT_FOLDER = Path("quickstart")
METHODS = {
    "an": "AN (assume negative)",
    "en": "EN (expected negative)",
    "cl": "EN + CL",
    "scl": "EN + SCL (the method)",
    "bce": "oracle (all labels known)",
}
MAKE_AGAIN = "Delete the file and run the command again to make it again."
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
    """Make scenes of digits, pretrain, train five ways from one label per image, and compare them.

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
    results = {name: _figures(folder / name / "test" / "report.json") for name in chosen}
    write_text(folder / "results.json", json.dumps(results, indent=1))
    picture = folder / "heatmaps.png"
    _draw(folder, chosen, picture)
    typer.echo(f"\n{_table(results)}\n\nheatmaps of digits that no label names: {picture}")
    typer.echo(f"took {(time.monotonic() - started) / 60:.1f} minutes")


def _chosen(methods: str) -> list[str]:
    chosen = [name.strip() for name in methods.split(",") if name.strip()]
    unknown = [name for name in chosen if name not in METHODS]
    if unknown or not chosen:
        raise ValueError(f"--methods {methods}: expected some of {', '.join(METHODS)}")
    return chosen


class QuickstartRun:
    """The commands of the quickstart. Each is shown and run, or skipped if its result exists."""

    def __init__(self, folder: Path, seed: int, epochs: int | None, runner: Runner) -> None:
        self.folder, self.seed, self.epochs, self.runner = folder, seed, epochs, runner

    def make_scenes(self) -> None:
        """Write the shards and their indexes."""
        scenes = self.folder / "scenes"
        if not (scenes / "bigscl-index-test.npz").exists():
            workers = str(os.cpu_count() or 1)
            self._run(
                "bigscl", "shards", "scenes", str(scenes), "--seed", str(self.seed), "--workers", workers
            )
            for part in PARTS:
                self._run("bigscl", "index", f"{scenes}/{part}-*.tar")

    def train(self, name: str) -> None:
        """Train one run from its config."""
        run = self.folder / name
        if (run / "done").exists():
            return
        config = os.path.relpath(CONFIGS / f"quickstart_{name}.yaml")
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
        return [text for key, value in settings.items() for text in (f"--{key}", str(value))]

    def _run(self, *words: str) -> None:
        typer.echo(f"\n$ {shlex.join(words)}")
        self.runner.run(words)


def _figures(report: Path) -> dict[str, float]:
    """Return the numbers of a run in the table."""
    from bigscl.evaluation.localization import STORED
    from bigscl.files import parsing

    with parsing(report, "a report of bigscl.evaluate", MAKE_AGAIN):
        found = json.loads(report.read_bytes())
        heat = found["localization"][STORED]
        return {
            "map": float(found["mean_ap"]["present"]),
            "observed": float(heat["observed"]["hit_rate"]),
            "missing": float(heat["missing"]["hit_rate"]),
        }


def _table(results: dict[str, dict[str, float]]) -> str:
    head = f"{'':28} {'test mAP':>9} {'pointing: observed':>19} {'missing':>8}"
    lines = [
        f"{METHODS[name]:28} {row['map']:9.1%} {row['observed']:19.1%} {row['missing']:8.1%}"
        for name, row in results.items()
    ]
    return "\n".join([head, *lines])


def _draw(folder: Path, methods: list[str], path: Path) -> None:
    """Draw the heatmaps of each run for digits that no label names."""
    from bigscl.config import load_config
    from bigscl.plots.runs import draw_runs

    runs = {METHODS[name].split(" (")[0]: load_config(folder / name / "config.yaml") for name in methods}
    draw_runs(runs, path, kinds=("unannotated",), count=6)
