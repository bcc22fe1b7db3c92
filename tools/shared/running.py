"""Commands that a verb starts, in the environment in which the verb itself runs; and the runs of a study."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from bigscl.common.files import read_json_object
from bigscl.common.url_secrets import environment
from bigscl.common.user_error import UserError
from bigscl.config import Config, changed_settings, load_config
from bigscl.config.load import FOLDER
from bigscl.evaluation.evaluate_options import Pooling

MODULES = {"bigscl": ("-m", "bigscl"), "accelerate": ("-m", "accelerate.commands.accelerate_cli")}
SECONDS_TO_SAVE = 120


def launcher() -> tuple[str, ...]:
    """Return the command that starts a run on this machine: `accelerate launch` for a GPU, or for the CPU."""
    import torch

    gpu = torch.cuda.is_available()
    config = FOLDER / "accelerate" / ("1gpu.yaml" if gpu else "cpu.yaml")
    # Runs on a CPU are small: a second thread would only compete with the loader.
    threads = () if gpu else ("--num_cpu_threads_per_process", "1")
    return ("accelerate", "launch", "--config_file", os.path.relpath(config), *threads)


class Runner:
    """Runs commands, in parallel if several threads call it, and stops them at the end of its block."""

    def __init__(self) -> None:
        self._running: set[subprocess.Popen[bytes]] = set()
        self._lock = Lock()
        self._stopped = False

    def run(
        self, words: Sequence[str], *, log: Path | None = None, variables: Mapping[str, str] | None = None
    ) -> None:
        """Run a command, with its output in a file if `log` is given; raise UserError if it fails."""
        command = [sys.executable, *MODULES.get(words[0], ()), *words[1:]]
        with _opened(log) as output:
            with self._lock:
                if self._stopped:
                    raise KeyboardInterrupt
                # In its own session, a launcher and all its processes receive a signal together.
                process = subprocess.Popen(
                    command,
                    stdout=output,
                    stderr=output and subprocess.STDOUT,
                    env={**os.environ, **environment(), **(variables or {})},
                    start_new_session=True,
                )
                self._running.add(process)
            code = process.wait()
        with self._lock:
            self._running.discard(process)
        if self._stopped:
            raise KeyboardInterrupt
        if code:
            where = f" Its output is in {log}." if log is not None else ""
            raise UserError(
                f"this command failed: {shlex.join(words)}.{where} Fix the cause and rerun the same command: "
                f"finished steps are skipped."
            )

    def stop(self) -> None:
        """Ask all running commands to save and exit, wait for them, and start no more."""
        with self._lock:
            self._stopped = True
            running = list(self._running)
        for process in running:
            _signal(process, signal.SIGTERM)
        deadline = time.monotonic() + SECONDS_TO_SAVE
        # The launcher leads the group; its children may outlive it.
        while any(_signal(process, 0) for process in running) and time.monotonic() < deadline:
            time.sleep(0.1)
        for process in running:
            _signal(process, signal.SIGKILL)

    def __enter__(self) -> "Runner":
        self._before = signal.signal(signal.SIGTERM, signal.default_int_handler)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        signal.signal(signal.SIGTERM, self._before)


@contextmanager
def _opened(log: Path | None) -> Iterator[Any]:
    if log is None:
        yield None
        return
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        yield file


def _signal(process: subprocess.Popen[bytes], number: int) -> bool:
    """Send a signal to all processes of a command; return False if none is left."""
    process.poll()
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return False
    return True


# Runs of a study


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    config: Path
    variant: str
    """The settings that differ from the config, as given; empty for the config itself."""
    seed: int
    folder: Path
    settings: tuple[str, ...]
    """Settings on the command line of the trainer."""
    test: tuple[str, ...] = ()
    """Shards to evaluate on; empty for the validation shards."""
    boxes: bool = True
    """Whether the shards have boxes, which the pointing game needs."""
    pooling: Pooling = "plain"
    """The pooling that is reported, beside the plain one."""

    @property
    def row(self) -> str:
        """The line of the table that the run belongs to."""
        return f"{self.config.stem} {self.variant}".strip()

    @property
    def trained(self) -> bool:
        return (self.folder / "done").exists()

    @property
    def done(self) -> bool:
        """Whether training and evaluation are finished, with map pooling if that is asked for."""
        if not self.trained or not self.report.exists():
            return False
        report = read_json_object(self.report) if self.pooling == "map" else None
        return report is None or self.pooling in report.get("poolings", ())

    @property
    def report(self) -> Path:
        """The report, in a separate folder for each choice of shards."""
        name = f"test-{slug(' '.join(self.test))}" if self.test else "validation"
        return self.folder / name / "report.json"

    def resolved(self) -> Config:
        return load_config(self.config, self.settings)

    def check_unchanged(self) -> None:
        """Refuse a run that was started with other settings: it would be in the wrong line of the table."""
        if changed := changed_settings(self.folder / "config.yaml", self.resolved()):
            raise UserError(
                f"{self.folder}: was started with other settings ({'; '.join(changed)}). Choose "
                f"another folder for the study, or delete the folder of the run."
            )

    def training(self) -> tuple[str, ...]:
        return (*launcher(), "-m", "bigscl.train", os.path.relpath(self.config), *self.settings)

    def evaluation(self) -> tuple[str, ...]:
        words = ["python", "-m", "bigscl.evaluate", str(self.folder), "-o", str(self.report.parent)]
        words += ["--workers", "1"]
        if self.test:
            words += ["--shards", *self.test]
        if self.boxes and self.resolved().store.kind == "disk":
            words += ["--heatmaps"]
        return tuple(words)


def slug(text: str) -> str:
    return re.sub(r"[^\w.=-]+", "_", text).strip("_")
