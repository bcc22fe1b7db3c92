"""What people see of a run: log lines, a progress bar, metrics.jsonl and the trackers. Rank 0 speaks."""

import json
import logging
import math
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from bigscl.files import append_lines, read_json_lines, write_whole
from bigscl.objective import Loss
from bigscl.ranks import Ranks

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
        self._bar: Progress | None = None

    def keep_until(self, step: int) -> None:
        """Forget what was logged after this step: the run goes on from there and will log it again."""
        if self._speaks and self._path.exists():
            kept = (line for line in read_json_lines(self._path) if _step_of(line) <= step)
            write_whole(self._path, "".join(json.dumps(line) + "\n" for line in kept))

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
        if not (self._speaks and sys.stderr.isatty()):
            self._bar = None
            return nullcontext()
        self._bar = Progress(
            TextColumn("epoch {task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[state]}"),
            console=Console(stderr=True),
            transient=True,
        )
        self._bar.add_task(f"{epoch + 1}/{epochs}", total=total, completed=done, state="")
        return self._bar

    def advance(self) -> None:
        """One more step is done."""
        if self._bar is not None:
            self._bar.advance(self._bar.task_ids[0])

    def step(self, epoch: int, step: int, values: Mapping[str, float]) -> None:
        """The state of training: in the bar on a terminal, as a line elsewhere, and in the metrics."""
        self.write("train", step, {"epoch": epoch, **values})
        shares = (f"{name.removeprefix('wait_')} {values[name]:.0%}" for name in values if "wait_" in name)
        rate = f"{values['images_per_second']:.0f} images/s"
        text = f"loss {values['total']:.4f}, {rate}, waits: {' '.join(shares)}"
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], state=text)
        elif self._speaks:
            logger.info("epoch %d step %d: %s", epoch, step, text)


def _step_of(line: Mapping[str, Any]) -> float:
    """The step that a line of metrics belongs to; none that a run has reached, where it does not say."""
    step = line.get("step")
    return step if isinstance(step, int) else math.inf


def _tensorboard_layout(tracker: str) -> dict[str, str]:
    return {"dataformats": "NHWC"} if tracker == "tensorboard" else {}


class Meter:
    """Mean losses and speed over all ranks since they were last read."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._waits: dict[str, float] = {}
        self._reset()

    def _reset(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._count = 0
        self._since = time.perf_counter()

    def add(self, loss: Loss) -> None:
        """Count a batch. Nothing waits for the device here."""
        for name, values in loss._asdict().items():
            total = values.detach().sum()
            self._sums[name] = self._sums[name] + total if name in self._sums else total
        self._count += len(loss.total)

    def read(self, waits: Mapping[str, float]) -> dict[str, float]:
        """The means since the last reading, images/s, and the shares of the time spent waiting."""
        seconds = time.perf_counter() - self._since
        sums = [float(self._sums.get(name, 0.0)) for name in Loss._fields]
        *totals, count = self._ranks.sum([*sums, self._count])
        means = {name: total / max(1, count) for name, total in zip(Loss._fields, totals, strict=True)}
        shares = {name: (value - self._waits.get(name, 0.0)) / seconds for name, value in waits.items()}
        self._waits = dict(waits)
        self._reset()
        return {**means, "images_per_second": count / seconds, **shares}
