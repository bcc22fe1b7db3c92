"""Real runs of the trainer in processes of their own, and what they leave behind."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor

from bigscl.store import HeatmapStore, Rows, StorageOptions
from bigscl.training.checkpoint_folder import Checkpoints
from tests import forks
from tests.builders import index_of
from tests.forks import ROOT, Child, free_port, trainer_server
from tests.test_store.conftest import assert_same_rows

TIMEOUT = 150
ENVIRONMENT = {**os.environ, **forks.ENVIRONMENT}


def command(arguments: Sequence[object], processes: int = 1, **launcher: object) -> list[str]:
    """The command line of a run: plain python for one process, accelerate's launcher for more."""
    call = ["-m", "bigscl.train", *map(str, arguments)]
    if processes == 1 and not launcher:
        return [sys.executable, *call]
    return [sys.executable, "-m", *launcher_words(processes, **launcher), *call]


def launcher_words(processes: int, **options: object) -> list[str]:
    """The module and the flags of accelerate's launcher."""
    given = {
        "num_processes": processes,
        "num_machines": 1,
        "mixed_precision": "no",
        "dynamo_backend": "no",
        "main_process_port": free_port(),
        **options,
    }
    flags = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    return ["accelerate.commands.launch", "--multi_gpu", *flags]


def train(*arguments: object, processes: int = 1) -> "subprocess.CompletedProcess[str]":
    """A whole run, which must end well: in forked processes, which find each other as a launcher's do."""
    done = trainer_server().run_module("bigscl.train", *arguments, processes=processes)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def launch(*arguments: object, processes: int = 1) -> "subprocess.CompletedProcess[str]":
    """A run as a user starts it: with an interpreter, or with accelerate's launcher for more processes."""
    return subprocess.run(
        command(arguments, processes),
        cwd=ROOT,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )


class Running:
    """A run that is going on, to be interrupted; it is over at the end of the block at the latest."""

    def __init__(
        self, folder: Path, *arguments: object, processes: int = 1, environment: dict[str, str] | None = None
    ) -> None:
        self._folder, self._processes = folder, processes
        self._log = folder.parent / f"{folder.name}-{time.time_ns()}.log"
        _, _, module, *words = command(arguments, processes)
        self.launcher = Child(trainer_server(), module, *words, output=self._log, environment=environment)

    def __enter__(self) -> "Running":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def is_launched(self) -> bool:
        """Whether there is a launcher, whose exit code is not that of the ranks."""
        return self._processes > 1

    @property
    def output(self) -> str:
        return self._log.read_text()

    def ranks(self) -> list[psutil.Process]:
        """The training processes, by rank."""
        launched = psutil.Process(self.launcher.pid)
        if self._processes == 1:
            return [launched]
        # Each leads a session; they are started in order.
        ranks = [child for child in launched.children() if os.getsid(child.pid) == child.pid]
        assert len(ranks) == self._processes
        return sorted(ranks, key=lambda rank: (rank.create_time(), rank.pid))

    def wait_for_step(self, step: int) -> bool:
        """Whether the run came that far, before it ended."""
        deadline = time.monotonic() + TIMEOUT
        while self.launcher.poll() is None and steps_of(self._folder) < step:
            assert time.monotonic() < deadline, self.output
            time.sleep(0.002)
        return self.launcher.poll() is None

    def kill(self) -> None:
        """`kill -9`, of every process at once."""
        if self.launcher.poll() is None:
            for process in psutil.Process(self.launcher.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            self.launcher.kill()
        self.wait()

    def wait(self, seconds: float = TIMEOUT) -> int:
        """The exit code."""
        return self.launcher.wait(seconds)


def steps_of(folder: Path) -> int:
    """The last step in a run's metrics."""
    try:
        return len([line for line in (folder / "metrics.jsonl").read_text().splitlines() if "train" in line])
    except FileNotFoundError:
        return 0


def losses_of(folder: Path) -> list[tuple[int, float]]:
    """(step, loss) of every line in a run's metrics."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["loss"]) for line in lines if line["kind"] == "train"]


def weights_of(folder: Path) -> dict[str, Tensor]:
    """The weights in a run's last checkpoint."""
    latest = Checkpoints(folder / "checkpoints", 1).latest()
    assert latest is not None
    return load_file(latest.path / "model.safetensors")


def store_of(folder: Path, shards: Path, snapshot: int | None = None) -> HeatmapStore:
    """A run's store, wherever its config has it."""
    config = folder / "config.yaml"
    settings = yaml.safe_load(config.read_text())["store"] if config.exists() else {}
    reach = {name: settings[name] for name in ("endpoint", "region") if settings.get(name)}
    return HeatmapStore.open(
        settings.get("url") or folder / "store",
        annotations=index_of(shards).annotations(),
        snapshot=snapshot,
        options=StorageOptions(**reach),
    )


def memory_of(folder: Path, shards: Path, snapshot: int | None = None) -> Rows:
    """What a run's store holds of every sample."""
    return store_of(folder, shards, snapshot).read(index_of(shards).ids())


def assert_same_weights(one: dict[str, Tensor], other: dict[str, Tensor], tolerance: float = 0.0) -> None:
    assert one.keys() == other.keys()
    for name, weight in one.items():
        torch.testing.assert_close(
            weight, other[name], rtol=0, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


def assert_same_runs(one: Path, other: Path, shards: Path) -> None:
    """The same weights, memory, selection, kept scores, and losses of every step, to the last bit."""
    assert_same_weights(weights_of(one), weights_of(other))
    first, second = store_of(one, shards), store_of(other, shards)
    assert first.snapshot.attributes == second.snapshot.attributes
    assert_same_rows(memory_of(one, shards), memory_of(other, shards))
    assert losses_of(one) == losses_of(other)
    assert score_files(one) == score_files(other)


def score_files(folder: Path) -> dict[str, bytes]:
    """The scores that a run has kept of its epochs, by name of the file."""
    files = (folder / "scores").rglob("*")
    return {str(file.relative_to(folder)): file.read_bytes() for file in files if file.is_file()}


def ids_of(folder: Path) -> Counter[tuple[int, int]]:
    """How often each (epoch, id) is in the logs of ids of all ranks."""
    lines = [line for file in folder.glob("ids-*.txt") for line in file.read_text().splitlines()]
    return Counter((int(line.split()[0]), int(line.split()[1])) for line in lines)


def copy_run(source: Path, target: Path) -> Path:
    """A run's folder under another name, without its log of ids."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("ids-*.txt"))
    return target


def call_all(calls: dict[str, Sequence[object]]) -> dict[str, dict[str, Any]]:
    """How calls of the trainer ended: `code`, `output` and `errors` of each."""
    ended = {name: trainer_server().run_module("bigscl.train", *words) for name, words in calls.items()}
    return {
        name: {"code": done.returncode, "output": done.stdout, "errors": done.stderr}
        for name, done in ended.items()
    }
