"""The training of the scale benchmark: one run through the real trainer, killed in mid-epoch and resumed."""

import json
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from tests.benchmarks.scale_measure import Cost, Ended, Row, Watched, larger

ROOT = Path(__file__).parents[2]
SIZE, TOP, SIDE, SLOTS = 28, 10, 14, 3
CHECKPOINT_AT = 0.25
"""Share of the last epoch after which it is saved: what is resumed is this, in mid-epoch."""
KILL_BETWEEN = (0.35, 0.85)
LINES_PER_EPOCH = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What is trained, and when it is killed."""

    images: int
    seed: int
    epochs: int
    """Of the top-10 layout, after one of warm-up."""
    batch: int
    workers: int
    threads: int

    @property
    def steps(self) -> int:
        """Of an epoch."""
        return -(-self.images // self.batch)

    @property
    def log_steps(self) -> int:
        return max(1, self.steps // LINES_PER_EPOCH)

    @property
    def save_step(self) -> int:
        return int((self.epochs + CHECKPOINT_AT) * self.steps)

    @property
    def kill_step(self) -> int:
        """A random moment of the last epoch, always the same for a seed."""
        share = np.random.default_rng([self.seed, 3]).uniform(*KILL_BETWEEN)
        return int((self.epochs + share) * self.steps)

    def config(self, shards: Path, run: Path) -> dict[str, Any]:
        """EN + SCL as on ImageNet: its classes, maps, layouts and schedule, and few pixels."""
        return {
            "run": str(run),
            "seed": self.seed,
            "data": {
                "train": str(shards / "train-*.tar"),
                "val": str(shards / "val-*.tar"),
                "size": SIZE,
                "shorter": SIZE + 4,
                "batch_size": self.batch,
                "workers": self.workers,
            },
            "model": {"backbone": "tests.benchmarks.scale_images:tiny_net"},
            "selection": {"K": 1.2},
            "store": {"top": TOP, "warmup_heatmaps": "scores", "slots": SLOTS},
            "schedule": {
                "warmup": {"epochs": 1, "learning_rate": 1e-2, "decay": "constant"},
                "main": {"epochs": self.epochs, "learning_rate": 1e-2},
            },
            "checkpoint": {"every_steps": self.save_step},
            "log": {"every_steps": self.log_steps, "trackers": [], "pictures_every": 0},
        }

    def environment(self) -> dict[str, str]:
        return {**os.environ, "OMP_NUM_THREADS": str(self.threads), "ACCELERATE_USE_CPU": "true"}


def write_config(training: Training, shards: Path, run: Path, path: Path) -> None:
    path.write_text(yaml.safe_dump(training.config(shards, run)))


def train(training: Training, config: Path, run: Path, logs: Path) -> list[Row]:
    """Warm-up, compaction and top-10 epochs, with a kill -9 and a second start of the same command."""
    command = [sys.executable, "-m", "bigscl.train", str(config)]
    phases, rows = Phases(training, run, kill=True), []
    killed = phases.follow(Watched(command, ROOT, training.environment(), logs / "train-1"))
    rows += phases.rows
    if not phases.killed:
        return [*rows, _whole("train, not killed", killed, failed=True)]
    rows.append(replace(_whole("train, up to the kill", killed), note=f"kill -9 at step {phases.step:,}"))
    phases = Phases(training, run, kill=False)
    resumed = phases.follow(Watched(command, ROOT, training.environment(), logs / "train-2"))
    failed = resumed.returncode != 0
    said = resumed.last_line if failed else f"from step {phases.first_step:,}"
    return [*rows, *phases.rows, replace(_whole("train, resumed", resumed, failed=failed), note=said)]


def _whole(stage: str, ended: Ended, *, failed: bool = False) -> Row:
    return Row(stage=stage, cost=ended.cost, note=ended.last_line if failed else "", failed=failed)


@dataclass(slots=True)
class Phases:
    """Which part of the run is going on, by the last line of its metrics, and what each part has cost."""

    training: Training
    run: Path
    kill: bool
    rows: list[Row] = field(default_factory=list)
    killed: bool = False
    step: int = 0
    first_step: int = 0

    _name: str = "start-up"
    _since: Cost = field(default_factory=Cost)
    _since_step: int = 0
    _peak: Cost = field(default_factory=Cost)
    _old_lines: int = 0

    def follow(self, watched: Watched) -> Ended:
        """Let the run end, or kill it in its last epoch."""
        self.step = self.first_step = self._since_step = _newest_checkpoint(self.run)
        self._old_lines = _modified(self.run)
        ended = watched.run(self._look)
        self._close(ended.cost)
        self._note_compaction(ended.errors)
        return ended

    def _look(self, watched: Watched) -> None:
        line = self._last_line()
        if line and line["step"] > self.first_step:
            self.step, name = line["step"], self._phase(line)
            if name != self._name:
                self._close(watched.cost)
                self._name = name
        self._peak = larger(self._peak, watched.cost)
        if self.kill and not self.killed and self.step >= self.training.kill_step:
            watched.kill()
            self.killed = True

    def _phase(self, line: Mapping[str, Any]) -> str:
        epoch, layout = line["epoch"], "scores" if line["epoch"] == 0 else f"top {TOP}"
        ends = (epoch + 1) * self.training.steps
        if line["kind"] == "train" and line["step"] + self.training.log_steps <= ends:
            return f"epoch {epoch}, {layout}"
        compacts = ", compaction" if epoch == 0 else ""
        return f"end of epoch {epoch}: selection, commit{compacts}, validation, checkpoint"

    def _close(self, cost: Cost) -> None:
        """End the part that went on until now."""
        used = replace(
            cost.since(self._since), rss_tree=self._peak.rss_tree, rss_process=self._peak.rss_process
        )
        images = (self.step - self._since_step) * self.training.batch
        is_epoch = self._name.startswith("epoch")
        name = f"{'' if self.kill else 'resumed: '}{self._name}"
        self.rows.append(Row(stage=name, cost=used, images=images if is_epoch else None))
        self._since, self._since_step, self._peak = cost, self.step, Cost()

    def _note_compaction(self, log: str) -> None:
        found = re.search(r"kept heatmaps .*? in ([\d.]+) s", log)
        for place, row in enumerate(self.rows):
            if found and "compaction" in row.stage:
                self.rows[place] = replace(row, note=f"compaction {found[1]} s")

    def _last_line(self) -> dict[str, Any] | None:
        """The last whole line of the metrics, if this start of the run has touched them."""
        path = self.run / "metrics.jsonl"
        if _modified(self.run) == self._old_lines:
            return None
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 10_000))
            lines = [line for line in file.read().split(b"\n")[:-1] if line.startswith(b"{")]
        return json.loads(lines[-1]) if lines else None


def _modified(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.stat().st_mtime_ns if path.exists() else 0


def _newest_checkpoint(run: Path) -> int:
    found = sorted(path.name for path in run.glob("checkpoints/step-*"))
    return int(found[-1].removeprefix("step-")) if found else 0
