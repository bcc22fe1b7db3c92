"""What people see of a run: log lines, a progress bar, metrics.jsonl and the trackers. Rank 0 speaks."""

import json
import logging
import math
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from rich.console import Console
from torch import Tensor

from bigscl.files import append_lines, read_json_lines, write_text
from bigscl.method.objective import Loss
from bigscl.processes.ranks import Ranks
from bigscl.training.progress import EpochBar, Pace, describe, working

logger = logging.getLogger(__name__)
PACKAGES = ("bigscl", "torch", "torchvision", "accelerate", "zarr", "numpy", "webdataset")


def start_logging(rank: int) -> None:
    """Log lines with their time on rank 0; other ranks only say what goes wrong."""
    logging.basicConfig(
        level=logging.INFO if rank == 0 else logging.WARNING,
        format="%(asctime)s %(levelname).1s %(message)s" if rank == 0 else f"rank {rank}: %(message)s",
        datefmt="%H:%M:%S",
        force=True,
    )
    # Libraries that report every retry and request at INFO.
    for name in ("httpx", "urllib3", "matplotlib", "PIL", "h5py", "absl"):
        logging.getLogger(name).setLevel(logging.WARNING)


def environment(command: list[str]) -> dict[str, Any]:
    """What a run was made with: command, versions, revision of the sources."""
    here = Path(__file__).parent
    revision = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=40"],
        cwd=here,
        capture_output=True,
        text=True,
        check=False,
    )
    return {
        "command": command,
        "python": sys.version.split()[0],
        "versions": {name: version(name) for name in PACKAGES},
        "revision": revision.stdout.strip() or None,
        "time": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
    }


class Journal:
    """Metrics of a run, one object a line, and the same to the trackers. Only rank 0 writes."""

    def __init__(self, folder: Path, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._path = folder / "metrics.jsonl"
        self._speaks = accelerator.is_main_process
        self._console = Console(stderr=True) if self._speaks and sys.stderr.isatty() else None
        self._pace: Pace | None = None
        self._bar: EpochBar | None = None

    def keep_until(self, step: int) -> None:
        """Forget what was logged after this step: the run goes on from there and will log it again."""
        if self._speaks and self._path.exists():
            kept = (line for line in read_json_lines(self._path) if _step_of(line) <= step)
            write_text(self._path, "".join(json.dumps(line) + "\n" for line in kept))

    def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """One line of metrics."""
        if not self._speaks:
            return
        append_lines(self._path, [json.dumps({"kind": kind, "step": step, **values})])
        numbers = {
            f"{kind}/{name}": value for name, value in values.items() if isinstance(value, int | float)
        }
        self._accelerator.log(numbers, step=step)

    def show_picture(self, name: str, path: Path, step: int) -> None:
        """A picture for the trackers that take one."""
        if not self._speaks:
            return
        import matplotlib.image
        import numpy as np

        pixels = (matplotlib.image.imread(path)[..., :3] * 255).astype(np.uint8)
        for tracker in self._accelerator.trackers:
            if hasattr(tracker, "log_images"):
                tracker.log_images({name: pixels[None]}, step=step, **_tensorboard_layout(tracker.name))

    def progress(self, epoch: int, epochs: int, total: int, done: int) -> AbstractContextManager[Any]:
        """A progress bar over an epoch's steps on a terminal; nothing elsewhere."""
        self._pace = Pace(epoch, epochs, total, done)
        if self._console is None:
            return nullcontext()
        self._bar = EpochBar(self._pace, epoch, epochs, self._console)
        return self._bar.progress

    def advance(self) -> None:
        """One more step is done."""
        assert self._pace is not None
        self._pace.done += 1
        if self._bar is not None:
            self._bar.advance()

    def step(self, epoch: int, step: int, values: Mapping[str, float]) -> None:
        """The state of training: in the bar on a terminal, as a line elsewhere, and in the metrics."""
        assert self._pace is not None
        self.write("train", step, {"epoch": epoch, **values})
        if self._bar is not None:
            self._bar.show(values)
        elif self._speaks:
            logger.info("%s", describe(self._pace, values))

    def working(self, title: str, total: int | None = None) -> AbstractContextManager[Callable[[int], None]]:
        """Show that long work began, and how far it is: call what this gives with the units done."""
        if not self._speaks:
            return nullcontext(lambda done: None)
        return working(title, total, self._console)


def _step_of(line: Mapping[str, Any]) -> float:
    """The step that a line of metrics belongs to; none that a run has reached, where it does not say."""
    step = line.get("step")
    return step if isinstance(step, int) else math.inf


def _tensorboard_layout(tracker: str) -> dict[str, str]:
    return {"dataformats": "NHWC"} if tracker == "tensorboard" else {}


class Meter:
    """Mean losses and speed over all ranks since they were last read, and the longest waits of any rank."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._waits = self._with_ranks({})
        self._reset(time.perf_counter())

    def _reset(self, now: float) -> None:
        self._sums: dict[str, Tensor] = {}
        self._count = 0
        self._since = now

    def add(self, loss: Loss) -> None:
        """Count a batch. Nothing waits for the device here."""
        for name, values in loss._asdict().items():
            total = values.detach().sum()
            self._sums[name] = self._sums[name] + total if name in self._sums else total
        self._count += len(loss.total)

    def read(self, waits: Mapping[str, float]) -> dict[str, float]:
        """The means since the last reading, images/s, and the shares of the time spent waiting.

        `waits` are this rank's, in seconds of the epoch so far. Of each share the largest of all ranks
        counts: a step is as slow as its slowest rank.
        """
        now = time.perf_counter()
        seconds = now - self._since
        sums = [float(self._sums.get(name, 0.0)) for name in Loss._fields]
        waits = self._with_ranks(waits)
        shares = [(value - self._waits.get(name, 0.0)) / seconds for name, value in waits.items()]
        # Each rank adds its shares in a place of its own, so that one sum is also a gathering.
        places = [0.0] * len(shares) * self._ranks.world_size
        places[self._ranks.rank * len(shares) : (self._ranks.rank + 1) * len(shares)] = shares
        *totals, count = (gathered := self._ranks.sum([*sums, self._count, *places]))[: len(sums) + 1]
        of_ranks = gathered[len(sums) + 1 :]
        means = {name: total / max(1, count) for name, total in zip(Loss._fields, totals, strict=True)}
        largest = {name: max(of_ranks[place :: len(shares)]) for place, name in enumerate(waits)}
        self._waits = waits
        self._reset(now)  # the sum above is part of what is read next, with the wait in it
        return {**means, "images_per_second": count / seconds, **largest}

    def _with_ranks(self, waits: Mapping[str, float]) -> dict[str, float]:
        """With the seconds that this rank waited for the others, where there are others."""
        return {**waits, "wait_ranks": self._ranks.wait_seconds} if self._ranks.world_size > 1 else {**waits}
