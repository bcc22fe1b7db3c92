"""The training of the scale benchmark: one run through the real trainer, killed in mid-epoch and resumed."""

import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from tests.benchmarks.scale_measure import Row, Watched
from tests.benchmarks.scale_phases import Phases, newest_checkpoint

ROOT = Path(__file__).parents[2]
SIZE, TOP, SIDE, SLOTS = 28, 10, 14, 3
SLOTS_OF_A_SHARE = 4
"""One more checkpoint stays, that of the epoch before, so that two whole epochs can be compared."""
CHECKPOINT_AT = 0.25
"""Share of the last epoch after which it is saved: what is resumed is this, in mid-epoch."""
KILL_BETWEEN = (0.3, 0.6)
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
    consistency: str
    share: float
    """Of each epoch's images that are trained; the rest is filled in by `scale_fill`."""

    @property
    def steps(self) -> int:
        """Of a whole epoch."""
        return -(-self.images // self.batch)

    @property
    def slots(self) -> int:
        return SLOTS if self.share == 1 else SLOTS_OF_A_SHARE

    @property
    def save_steps(self) -> int:
        """Of a whole epoch: a number that is met once, in the last one. Of a share: that share."""
        if self.share < 1:
            return max(2, int(self.steps * self.share))
        return int((self.epochs + CHECKPOINT_AT) * self.steps)

    @property
    def kill_after(self) -> int:
        """Steps after the last save at which it is killed: a random moment, the same for a seed."""
        random = np.random.default_rng([self.seed, 3])
        if self.share < 1:
            return max(1, int(self.save_steps * random.uniform(0.2, 0.9)))
        return max(1, int((random.uniform(*KILL_BETWEEN) - CHECKPOINT_AT) * self.steps))

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
            "objective": {"consistency": self.consistency},
            "selection": {"K": 1.2},
            "store": {"top": TOP, "warmup_heatmaps": "scores", "slots": self.slots},
            "schedule": {
                "warmup": {"epochs": 1, "learning_rate": 1e-2, "decay": "constant"},
                "main": {"epochs": self.epochs, "learning_rate": 1e-2},
            },
            "checkpoint": {"every_steps": self.save_steps},
            "log": {
                "every_steps": max(1, int(self.steps * self.share) // LINES_PER_EPOCH),
                "trackers": [],
                "pictures_every": 0,
            },
        }

    def environment(self) -> dict[str, str]:
        return {**os.environ, "OMP_NUM_THREADS": str(self.threads), "ACCELERATE_USE_CPU": "true"}


def write_config(training: Training, shards: Path, run: Path, path: Path) -> None:
    path.write_text(yaml.safe_dump(training.config(shards, run)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """The same command, started again and again until the run is done."""

    training: Training
    config: Path
    run: Path
    logs: Path

    def rows(self) -> Iterator[Row]:
        """Warm-up, compaction and top-10 epochs, with a kill -9 and another start of the same command."""
        last = 1 + self.training.epochs
        stops = [last] if self.training.share == 1 else range(1, last + 1)
        for number, epoch in enumerate(stops, 1):
            yield from self._until(epoch, f"start {number}", kill=epoch == last)
            if self.training.share < 1:
                yield self._fill(epoch)
        yield from self._until(None, f"start {len(stops) + 1}", kill=False)

    def _until(self, epoch: int | None, name: str, *, kill: bool) -> Iterator[Row]:
        """Train up to a save in this epoch and a little more; without an epoch, to the end."""
        first = newest_checkpoint(self.run)
        phases = Phases(self.run, self.training.batch, first, name, top=TOP)
        if epoch is not None:
            phases.stop_in(epoch, self.training.kill_after, kill=kill)
        ended = phases.follow(self._start(name, "bigscl.train"))
        yield from _with_compaction(phases.rows, ended.errors)
        failed = not phases.stopped if epoch is not None else ended.returncode != 0
        note = f"resumed at step {first:,}, " if first else ""
        note += (
            f"{'kill -9' if kill else 'SIGTERM'} at step {phases.step:,}" if phases.stopped else "to the end"
        )
        yield Row(
            stage=f"{name}: the whole process",
            cost=ended.cost,
            note=f"exit code {ended.returncode}: {ended.last_line}" if failed else note,
            failed=failed,
        )

    def _fill(self, epoch: int) -> Row:
        ended = self._start(f"fill {epoch}", "tests.benchmarks.scale_fill").run()
        failed = ended.returncode != 0
        said = ended.last_line if failed else ended.output.strip()
        return Row(
            stage=f"fill epoch {epoch}, in place of training", cost=ended.cost, note=said, failed=failed
        )

    def _start(self, name: str, module: str) -> Watched:
        command = [sys.executable, "-m", module, str(self.config)]
        return Watched(command, ROOT, self.training.environment(), self.logs / name.replace(" ", "-"))


def _with_compaction(rows: list[Row], log: str) -> Iterator[Row]:
    found = re.search(r"kept heatmaps .*? in ([\d.]+) s", log)
    for row in rows:
        yield replace(row, note=f"compaction {found[1]} s") if found and "compaction" in row.stage else row
