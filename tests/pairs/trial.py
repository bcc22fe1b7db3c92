"""One row of the table as a run: killed in mid-epoch, resumed, compared with its twin, and looked at."""

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from bigscl.data.answers import AnswersFile
from tests.builders import settings
from tests.forks import (
    PATIENCE_SECONDS,
    TRAINER_MODULES,
    Child,
    ForkServer,
    free_port,
    started_server,
    trainer_server,
)
from tests.pairs.places import BUCKET, Places, some_answers
from tests.pairs.table import DIMENSIONS, TOOL_REFUSALS

COMPILING_SECONDS = 600.0
"""Patience with a run that compiles: on two cores with a load of 20 two processes need 3 minutes for it."""
FEW_ANSWERS = 5
"""Answers that a run starts with, if more come later."""
LAUNCHERS = {
    "accelerate": (
        "accelerate.commands.launch", "--num_processes", "{count}", "--num_machines", "1",
        "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "{port}",
    ),
    "torchrun": ("torch.distributed.run", "--nproc_per_node", "{count}", "--master_port", "{port}"),
}  # fmt: skip
WARM_MODULES = (*TRAINER_MODULES, "torch._inductor.compile_fx", "tests.pairs.bf16")
"""Imported before a process compiles, or tries bf16: either takes longer than the run."""
LATER = {"top at the resume": {"store.top": 4, "store.compact_after": 2}}
"""Settings that a run is not started with, but resumed, by the layout."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A row, and a folder of its own in which it is tried."""

    row: Mapping[str, str]
    folder: Path
    places: Places

    def run(self) -> None:
        """Train it in every way, compare, and use all tools on what it leaves."""
        if self.row["store"] == "memory":
            looked_at = self.trained_in_ram()
        else:
            looked_at, twin = self.answered_later() if self.row["answers"] == "later" else self.resumed()
            self.call("compare", looked_at, twin)
        self.evaluate(looked_at)
        self.use_tools(looked_at)

    # Training

    def resumed(self) -> tuple[Path, Path]:
        """Return the run, killed and resumed, and its uninterrupted twin."""
        self.answer(0, None)
        twin = self.train(self.config("twin", later=True))
        self.kill(self.config("run", {"checkpoint.every_steps": 1}), epoch=1)
        return self.launch(self.config("run", later=True)), twin

    def answered_later(self) -> tuple[Path, Path]:
        """Return the same if people answer before it is resumed.

        No uninterrupted run can know these answers. So the twin is a copy of the killed run, and the run is
        killed once more.
        """
        self.answer(0, FEW_ANSWERS)
        self.kill(self.config("run", {"checkpoint.every_steps": 1}), epoch=1)
        twin = self.config("twin", later=True)
        shutil.copytree(self.folder / "run", twin.with_suffix(""))
        if self.url("twin") is not None:
            self.call("copy_store", self.url("run"), self.url("twin"))
        self.answer(FEW_ANSWERS, None)
        self.kill(self.config("run", {"checkpoint.every_steps": 1}, later=True), epoch=2)
        return self.launch(self.config("run", later=True)), self.train(twin)

    def trained_in_ram(self) -> Path:
        """Return a whole run; one that was killed is refused in one line."""
        self.answer(0, None)
        self.kill(self.config("run", {"checkpoint.every_steps": 1}), epoch=1)
        # One process: without a launcher, which ends the others, they wait for half a minute.
        code, output = self.start("bigscl.train", self.config("run", later=True), processes=1)
        assert code == 2, output
        assert is_one_line(output, "its store was in memory .* so it cannot be resumed"), output
        name = json.loads((self.folder / "run" / "run.json").read_text())["id"]
        assert not list(Path("/dev/shm").glob(f"*{name}*"))
        return self.launch(self.config("twin", later=True))

    def train(self, config: Path) -> Path:
        """Return the folder of a run that was trained to its end."""
        code, output = self.start("bigscl.train", config)
        assert code == 0, output
        return config.with_suffix("")

    def kill(self, config: Path, epoch: int) -> None:
        """Train until all ranks are killed in the middle of an epoch."""
        code, output = self.start("tests.pairs.killed", epoch, config)
        killed = list(self.folder.glob(f"run.killed-{epoch}-*"))
        assert code != 0, output
        assert len(killed) == self.processes, output

    @property
    def processes(self) -> int:
        return int(self.row["processes"])

    @property
    def patience_seconds(self) -> float:
        return COMPILING_SECONDS if self.row["compile"] == "true" else PATIENCE_SECONDS

    @property
    def server(self) -> ForkServer:
        """What the processes are forked from."""
        is_slow_to_start = self.row["compile"] == "true" or self.row["precision"] == "bf16"
        return started_server(*WARM_MODULES) if is_slow_to_start else trainer_server()

    def start(self, module: str, *arguments: object, processes: int | None = None) -> tuple[int, str]:
        """Return the (exit code, output) of a module on the row's processes, which are forked."""
        done = self.server.run_module(
            module,
            *arguments,
            processes=processes or self.processes,
            environment=self.environment,
            seconds=self.patience_seconds,
        )
        return done.returncode, done.stdout + done.stderr

    def launch(self, config: Path) -> Path:
        """Return the folder of a run that the row's launcher has trained to its end.

        Its processes import torch themselves, which takes longer than the run.
        """
        if self.row["launcher"] == "python":
            return self.train(config)
        launcher, *words = LAUNCHERS[self.row["launcher"]]
        words = [word.format(count=self.processes, port=free_port()) for word in words]
        if launcher.startswith("accelerate") and self.processes > 1:
            words.append("--multi_gpu")
        output, given = self.folder / "launched.txt", [*words, "-m", "bigscl.train", config]
        child = Child(trainer_server(), launcher, *given, output=output, environment=self.environment)
        try:
            code = child.wait(self.patience_seconds)
        finally:
            child.kill()
        assert code == 0, output.read_text()
        return config.with_suffix("")

    @property
    def environment(self) -> dict[str, str]:
        # What one run has compiled, the next need not compile again.
        return {**self.places.environment, "TORCHINDUCTOR_CACHE_DIR": str(self.places.shards / "compiled")}

    # Settings

    def config(self, name: str, others: Mapping[str, Any] | None = None, *, later: bool = False) -> Path:
        """Write the config of a run of this name."""
        path = self.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(self.values(name, others, later=later)))
        return path

    def values(
        self, name: str, others: Mapping[str, Any] | None = None, *, later: bool = False
    ) -> dict[str, Any]:
        """Return the settings of a run of this name."""
        values: dict[str, Any] = settings(self.places.shards)
        given = {key: value for name, own in self.row.items() for key, value in DIMENSIONS[name][own].items()}
        given |= (
            self.places_of(name) | dict(others or {}) | (LATER.get(self.row["layout"], {}) if later else {})
        )
        values["store"] = {"slots": 4} if self.row["store"] != "none" else {}
        values["model"] = {"backbone": "tests.integration.tiny:noisy_net"}
        for dotted, value in given.items():
            *sections, last = dotted.split(".")
            inner = values
            for section in sections:
                inner = inner.setdefault(section, {})
            inner[last] = value
        return {"run": str(self.folder / name), **values}

    def places_of(self, name: str) -> dict[str, Any]:
        """Return the settings that name files and servers."""
        row, shards = self.row, self.places.shards
        given: dict[str, Any] = {
            "data.train": self.tars("train"),
            "data.train_index": str(self.index("train")),
        }
        if row["validation"] != "none":
            given |= {"data.val": self.tars("val"), "data.val_index": str(self.index("val"))}
        if row["validation"] == "file":
            given["data.val_labels_file"] = str(shards / "val.csv")
        if row["labels"] == "file":
            given["data.labels_file"] = str(shards / "train.csv")
        if row["answers"] != "none":
            given["data.answers"] = str(self.folder / "answers.jsonl")
        if self.url(name) is not None:
            given["store.url"] = self.url(name)
        return given

    def tars(self, part: str) -> str:
        return self.places.pattern(self.row["tars"], part)

    def index(self, part: str) -> Path:
        return self.places.shards / f"bigscl-index-{part}.npz"

    def url(self, name: str) -> str | None:
        """Return where the store of a run is, if it is on a server."""
        kind = self.row["store"]
        return f"{kind}://{BUCKET}/{self.folder.name}/{name}" if kind in ("s3", "az") else None

    def answer(self, first: int, last: int | None) -> None:
        if self.row["answers"] != "none":
            AnswersFile(self.folder / "answers.jsonl").append(some_answers(self.places.shards)[first:last])

    # What is looked at

    def call(self, function: str, *arguments: object) -> str:
        """Return what a function of `tests.pairs.looks` prints in a process that reaches the servers."""
        done = trainer_server().run(f"tests.pairs.looks:{function}", *arguments, environment=self.environment)
        assert done.returncode == 0, f"{function}: {done.stdout}{done.stderr}"
        return done.stdout

    def evaluate(self, run: Path) -> None:
        """Evaluate the run on the row's processes."""
        words = ["--shards", self.tars("val"), "--index", self.index("val"), "--workers", self.row["workers"]]
        words += ["--labels-file", self.places.shards / "val.csv"] if self.row["validation"] == "file" else []
        code, output = self.start("bigscl.evaluate", run, *words, "-o", self.folder / "evaluation")
        assert code == 0, output
        assert (self.folder / "evaluation" / "report.json").exists()

    def use_tools(self, run: Path) -> None:
        """Use every tool on the run; those that cannot say so in one line."""
        ended: dict[str, Any] = json.loads(self.call("use_tools", run, self.folder / "tools"))
        refusals = [(names, refusal) for names, refusal in TOOL_REFUSALS if refusal.forbids(self.row)]
        expected = {name: refusal.says for names, refusal in refusals for name in names}
        problems = [
            f"{name} ended with {code}, expected {expected.get(name, 'no refusal')}: {output}"
            for name, (code, output) in ended.items()
            if (code != 2 or not is_one_line(output, expected[name]) if name in expected else code != 0)
        ]
        assert not problems, "\n".join(problems)


def is_one_line(output: str, says: str) -> bool:
    """Whether a line says so, and there is no traceback."""
    return "Traceback" not in output and re.search(says, output) is not None
