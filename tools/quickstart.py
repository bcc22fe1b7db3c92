"""`bigscl quickstart`: the whole system in minutes, offline, with every command shown."""

import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

CONFIGS = Path(__file__).parent.parent / "configs"
DEFAULT_FOLDER = Path("quickstart")
METHODS = {
    "an": "AN (assume negative)",
    "en": "EN (expected negative)",
    "cl": "EN + CL",
    "scl": "EN + SCL (the method)",
    "bce": "oracle (all labels known)",
}
PARTS = ("single", "train", "val", "test")


def command(
    folder: Annotated[Path, typer.Argument(help="Where data, runs and results go.")] = DEFAULT_FOLDER,
    seed: Annotated[int, typer.Option(min=0, help="Of the scenes and of training.")] = 0,
    methods: Annotated[str, typer.Option(help="Which runs to compare, by comma.")] = ",".join(METHODS),
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Other than the configs' 30, to try it out.")
    ] = None,
) -> None:
    """Make scenes of digits, pretrain, train five ways from one label per image, and compare them.

    Each command is shown before it runs, so that you can repeat them one by one. Called again, it goes on
    where it stopped. Example: bigscl quickstart --seed 1 quickstart-1
    """
    chosen = _chosen(methods)
    started = time.monotonic()
    kitchen = Kitchen(folder, seed, epochs)
    kitchen.make_scenes()
    kitchen.train("pretrain")
    for name in chosen:
        kitchen.train(name)
        kitchen.evaluate(name)
    results = {name: _figures(folder / name / "test" / "report.json") for name in chosen}
    (folder / "results.json").write_text(json.dumps(results, indent=1))
    picture = folder / "heatmaps.png"
    _draw(folder, chosen, picture)
    typer.echo(f"\n{_table(results)}\n\nheatmaps of digits that no label named: {picture}")
    typer.echo(f"took {(time.monotonic() - started) / 60:.1f} minutes")


def _chosen(methods: str) -> list[str]:
    chosen = [name.strip() for name in methods.split(",") if name.strip()]
    unknown = [name for name in chosen if name not in METHODS]
    if unknown or not chosen:
        raise ValueError(f"--methods {methods}: expected some of {', '.join(METHODS)}")
    return chosen


class Kitchen:
    """The commands of the quickstart; each is shown and run, and left out where its result is there."""

    def __init__(self, folder: Path, seed: int, epochs: int | None) -> None:
        self.folder, self.seed, self.epochs = folder, seed, epochs

    def make_scenes(self) -> None:
        """The data: shards and their indexes."""
        scenes = self.folder / "scenes"
        if not (scenes / "bigscl-index-test.npz").exists():
            workers = str(os.cpu_count() or 1)
            self._run(
                "bigscl", "shards", "scenes", str(scenes), "--seed", str(self.seed), "--workers", workers
            )
            for part in PARTS:
                self._run("bigscl", "index", f"{scenes}/{part}-*.tar")

    def train(self, name: str) -> None:
        """One run, from its config."""
        run = self.folder / name
        if (run / "done").exists():
            return
        config = os.path.relpath(CONFIGS / f"quickstart_{name}.yaml")
        self._run(*_launcher(), "-m", "bigscl.train", config, *self._settings(name))
        (run / "done").touch()

    def evaluate(self, name: str) -> None:
        """Test mAP at the best validation epoch, and the pointing game of the stored heatmaps."""
        run = self.folder / name
        if not (run / "test" / "report.json").exists():
            test = f"{self.folder}/scenes/test-*.tar"
            options = ("--shards", test, "-o", str(run / "test"), "--heatmaps", "--workers", "1")
            self._run("python", "-m", "bigscl.evaluate", str(run), *options)

    def _settings(self, name: str) -> list[str]:
        """What differs from the config: nothing, for the default folder and seed."""
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
        # The same programs, of the environment that this one runs in.
        modules = {"bigscl": ["-m", "tools.cli"], "accelerate": ["-m", "accelerate.commands.accelerate_cli"]}
        command = [sys.executable, *modules.get(words[0], []), *words[1:]]
        if subprocess.run(command, check=False).returncode:
            raise ValueError(
                f"this command failed: {shlex.join(words)}. Mend it and start again: it goes on here."
            )


def _launcher() -> tuple[str, ...]:
    import torch

    gpu = torch.cuda.is_available()
    config = CONFIGS / "accelerate" / ("1gpu.yaml" if gpu else "cpu.yaml")
    # The network is small: on a CPU, a second thread would only stand in the way of the loader.
    threads = () if gpu else ("--num_cpu_threads_per_process", "1")
    return ("accelerate", "launch", "--config_file", os.path.relpath(config), *threads)


def _figures(report: Path) -> dict[str, float]:
    """What the table shows of a run."""
    from bigscl.localization import STORED

    found = json.loads(report.read_text())
    heat = found["localization"][STORED]
    return {
        "map": found["mean_ap"]["present"],
        "observed": heat["observed"]["hit_rate"],
        "missing": heat["missing"]["hit_rate"],
    }


def _table(results: dict[str, dict[str, float]]) -> str:
    head = f"{'':28} {'test mAP':>9} {'pointing: observed':>19} {'missing':>8}"
    lines = [
        f"{METHODS[name]:28} {row['map']:9.1%} {row['observed']:19.1%} {row['missing']:8.1%}"
        for name, row in results.items()
    ]
    return "\n".join([head, *lines])


def _draw(folder: Path, methods: list[str], path: Path, count: int = 6) -> None:
    """The heatmaps that each run keeps of digits that no label named."""
    import numpy as np

    from bigscl.config import load_config
    from bigscl.data.reader import read_images, read_metadata
    from bigscl.pictures import Panel, SamplePicture, draw_samples
    from bigscl.run import open_data
    from store import HeatmapStore

    datas = {name: open_data(load_config(folder / name / "config.yaml")) for name in methods}
    index = datas[methods[0]].train
    ids = index.ids()[:: max(1, index.num_samples // count)][:count]
    images, metadata = read_images(index, ids), read_metadata(index, ids)
    missing = (index.labels_of(ids, "labels") == 1) & (index.labels_of(ids) != 1)
    stores = {
        name: HeatmapStore.open(folder / name / "store", annotations=data.annotations)
        for name, data in datas.items()
    }
    rows = {name: store.read(ids) for name, store in stores.items()}
    samples = []
    for place, sample_id in enumerate(ids.tolist()):
        number = int(np.flatnonzero(missing[place])[0])
        boxes = tuple(tuple(box[1:]) for box in metadata[sample_id]["boxes"] if box[0] == number)
        panels = []
        for name, held in rows.items():
            assert held.heatmaps is not None
            panels.append(
                Panel(
                    heatmap=held.heatmaps[place, number],
                    name=METHODS[name].split(" (")[0],
                    score=float(held.scores[place, number]),
                    kind="annotated" if name == "bce" else "unannotated",
                    boxes=boxes,
                )
            )
        title = f"where is the {index.class_names[number]}?"
        samples.append(SamplePicture(image=images[sample_id].numpy(), title=title, panels=panels))
    draw_samples(samples, path)
