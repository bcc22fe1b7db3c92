"""One flipped byte in every kind of file of a run: an error that names the file, or the same result.

The files are found by walking the folder of a run, their readers by watching which files each of them opens:
a new file that is read has to be checked, and one that nobody reads has to be named here.
"""

import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from bigscl.common.user_error import UserError
from bigscl.data.answers import Answer, AnswersFile
from bigscl.store import StoreError
from bigscl.tools.shared.open_store import DataFlags, StorageFlags
from bigscl.tools.viewer.open_run import OpenRun, Places
from tests.builders import TWO_EPOCHS, index_of, make_shards, write_config
from tests.forks import ForkServer
from tests.integration.moments import InterruptedTrainer
from tests.integration.runs import assert_same_runs, copy_run
from tests.test_tools.conftest import Answer as Said
from tests.test_tools.conftest import bigscl

pytestmark = pytest.mark.timeout(600)
NOT_CHECKED = {
    "metrics.jsonl": "a log; lines that are not JSON are skipped, the others are only plotted",
    "environment.jsonl": "a log of starts, for people",
    "samples.json": "for readers without bigscl; ours take names from the index",
    "tensorboard/": "TensorBoard's",
    "pictures/": "for people",
    "evaluation/report.md": "for people",
    "evaluation/scores.png": "for people",
    "evaluation/report.json": "the figures of an evaluation, for people and tables",
}
"""Kinds of files, or folders of them, that have no digest, and why."""
REBUILT = ("config.yaml", "run.json", "store/history/")
"""Files that a resume reads, and whose damage never stops it."""
QUIET = ("--log.trackers", "[]", "--log.pictures_every", 0)


def kind_of(name: str) -> str:
    """The name of a file without its numbers."""
    return re.sub(r"(?<![a-z])[0-9a-f]{8,}|\d+", "N", name)


# Who opens which file


class Watch:
    """Notes the files that this process opens for reading. Hooks stay for ever, so there is one."""

    def __init__(self) -> None:
        self._seen: set[str] | None = None
        sys.addaudithook(self._note)

    def _note(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._seen is None or event != "open":
            return
        file, _, flags = arguments
        if isinstance(file, str | os.PathLike) and flags & os.O_ACCMODE != os.O_WRONLY:
            self._seen.add(os.fspath(file))

    @contextmanager
    def files(self) -> Iterator[set[str]]:
        """The names of the files that are opened in the block."""
        self._seen = found = set()
        try:
            yield found
        finally:
            self._seen = None


def resume(seen: str, *arguments: str) -> int:
    """Resume a run in a child of the server; write the names of the files that it opens."""
    from bigscl.train import main

    sys.argv = ["bigscl.train", *arguments]
    with Watch().files() as found:
        try:
            return main(list(arguments))
        finally:
            Path(seen).write_text(json.dumps(sorted(found)))


@pytest.fixture(scope="module")
def watch() -> Watch:
    return Watch()


# The run and its readers


@dataclass(frozen=True)
class Made:
    """A run that was killed, the same run uninterrupted, and what trains it.

    Beside them is `dense`, a run that was killed in its first epoch.
    """

    folder: Path
    whole: Path
    shards: Path
    config: Path
    server: ForkServer

    def name_of(self, file: Path) -> str:
        """The kind of a file: its path in the folder of the run."""
        return kind_of(os.path.relpath(file, self.folder))

    def resume(self, folder: Path) -> tuple[Said, list[str]]:
        """Resume a copy; return what it said, and the files that it read."""
        seen = folder.with_suffix(".seen")
        words = (self.config, "--run", folder, "--data.answers", folder / "answers.jsonl", *QUIET)
        done = self.server.run("tests.integration.test_flipped_bytes:resume", seen, *words)
        return Said(done.returncode, done.stdout, done.stderr), json.loads(seen.read_text())


@pytest.fixture(scope="module")
def made(tmp_path_factory, trainer_server) -> Made:
    """Two epochs, dense and then of the highest classes; killed in the second, with two checkpoints."""
    folder = tmp_path_factory.mktemp("made")
    shards = make_shards(folder / "shards", 24, 12, val=8)
    config = write_config(
        folder / "run.yaml",
        shards,
        data={"val": str(shards / "val-*.tar"), "workers": 0, "batch_size": 6, "shorter": 55},
        store={"slots": 3, "history_samples": 2},
        schedule=TWO_EPOCHS,
        checkpoint={"every_steps": 3},
        log={"trackers": ["tensorboard"], "pictures_every": 1, "every_steps": 1},
    )
    index, when = index_of(shards), "2025-01-31T12:00:00+00:00"
    given = [Answer(index.key(n), index.class_names[n], n % 2 == 0, "ann", when) for n in range(4)]
    train = InterruptedTrainer(trainer_server)
    commit = "bigscl.store.heatmap_store:HeatmapStore.commit"
    for name, kill in (("whole", ""), ("run", f"{commit} before 4"), ("dense", f"{commit} before 2")):
        AnswersFile(folder / name / "answers.jsonl").append(given)
        words = ("--run", folder / name, "--data.answers", folder / name / "answers.jsonl")
        code, output = train(config, *words, *(() if name == "run" else QUIET), kill=kill)
        assert kill or code == 0, output
    run = folder / "run"
    assert bigscl("evaluate", run, "--workers", 0).code == 0
    assert look_at(run).code == 0
    return Made(run, folder / "whole", shards, config, trainer_server)


def look_at(run: Path) -> Said:
    """The page's index of a run."""
    try:
        opened = OpenRun(str(run), Places(source=DataFlags(), storage=StorageFlags(), cache=None))
        opened.update(now=True)
    except (UserError, StoreError) as error:
        return Said(2, "", f"bigscl: {error}")
    assert opened.index is not None
    pairs = {name: order.tolist() for name, order in opened.index.orders.items()}
    return Said(0, repr((pairs, opened.index.part(0, 10**6).tolist(), opened.index.classes)), "")


def verify(run: Path) -> Said:
    said = bigscl("verify", run, "--all", "--json")
    return replace(said, out=re.sub(r'"seconds": [^,]+', "", said.out))


READERS: dict[str, Callable[[Path], Said]] = {
    "evaluate": lambda run: bigscl(
        "evaluate", run, "--workers", 0, "--json", "--output", run.parent / "evaluated"
    ),
    "audit": lambda run: bigscl("review", "list", run, "--json"),
    "verify": verify,
    "show": lambda run: bigscl("show", run, "--json"),
    "report": lambda run: bigscl("report", run / "evaluation", "--json"),
    "view": look_at,
}


# Flips


@contextmanager
def flipped(file: Path, place: int, *, put_back: bool = True) -> Iterator[None]:
    """Change the lowest bit of a byte: a digit becomes another one, a letter another letter."""
    whole = file.read_bytes()
    data = bytearray(whole)
    data[place] ^= 1
    file.write_bytes(data)
    try:
        yield
    finally:
        if put_back:
            file.write_bytes(whole)


def places(file: Path) -> tuple[int, ...]:
    """The first byte, one in the middle, and the last."""
    length = file.stat().st_size
    return 0, length // 2, length - 1


def one_of_each(seen: Iterable[str], made: Made, kind: Callable[[str], str] = kind_of) -> list[Path]:
    """One file of each kind of those that a reader has opened: of the run, or an index of its shards."""
    found: dict[str, Path] = {}
    for file in map(Path, seen):
        ours = file.is_relative_to(made.folder.parent) and file.suffix != ".tar" and file != made.config
        if ours and file.is_file() and not is_not_checked(made.name_of(file)):
            found.setdefault(kind(str(file)), file)
    return list(found.values())


def is_not_checked(name: str) -> bool:
    return any(name == one or (one.endswith("/") and name.startswith(one)) for one in NOT_CHECKED)


def is_named(file: Path, text: str) -> bool:
    """Whether a message names a file; a chunk may be named by its array, a prediction by its group."""
    names = {file.name, file.parent.name if file.name.startswith("c.") else file.name}
    if "predictions.zarr" in file.parts:
        names = {"predictions.zarr"}
    return any(name in text for name in names)


def fault_of(said: Said, file: Path, expected: str | None) -> str:
    """What is wrong with how a reader took a flipped byte; nothing if it named it, or was not misled."""
    text = said.out + said.err
    if "Traceback" in text:
        return "a traceback"
    if said.code == 0 and said.out == expected:
        return ""
    if said.code == 2 and len(re.findall(r"^bigscl\S*: ", said.err, re.MULTILINE)) != 1:
        return "not one line"
    return "" if is_named(file, said.err if said.code in (0, 2) else text) else "not named"


@pytest.mark.parametrize(
    ("folder", "name"), [*(("run", name) for name in READERS), ("dense", "verify"), ("dense", "show")]
)
def test_reader_names_a_file_with_a_flipped_byte_or_is_not_misled(made, watch, caplog, folder, name):
    read, run = READERS[name], made.folder.with_name(folder)
    with watch.files() as seen:
        expected = read(run)
    assert expected.code == 0, expected.err
    faults = []
    for file in one_of_each(sorted(seen), made):
        # An evaluation takes as long as ten looks; other readers try three bytes of most of its files.
        for place in places(file)[1 if name == "evaluate" else 0 :]:
            caplog.clear()
            with flipped(file, place):
                said = read(run)
            said = replace(said, err=said.err + caplog.text)
            if fault := fault_of(said, file, expected.out):
                faults.append(f"{file}, byte {place}: {fault}: {said}")
    assert not faults


def kind_of_resume(name: str) -> str:
    """The kind of a file that a resume opens; one array stands for all, since `verify` tries every one."""
    return re.sub(r"/\w+/(c|zarr\.json)[N.]*$", r"/\1", kind_of(name))


def test_resume_names_a_file_with_a_flipped_byte_or_is_not_misled(made, watch, tmp_path):
    with watch.files() as used:  # by the newest snapshot
        READERS["audit"](made.folder)
    said, seen = made.resume(copy_run(made.folder, tmp_path / "run"))
    assert said.code == 0, said.err
    assert_same_runs(tmp_path / "run", made.whole, made.shards)
    names = {name.replace(str(tmp_path / "run"), str(made.folder)) for name in seen}
    newest_first = sorted(names, key=lambda name: (name in used, name), reverse=True)
    chosen = one_of_each(newest_first, made, kind_of_resume)
    rebuilt = [file for file in chosen if made.name_of(file).startswith(REBUILT)]
    assert {made.name_of(file).split("/")[0] for file in rebuilt} == {"config.yaml", "run.json", "store"}
    faults = []
    for number, files in enumerate([rebuilt, *([file] for file in chosen if file not in rebuilt)]):
        folder = copy_run(made.folder, tmp_path / f"copy-{number}")
        with ExitStack() as flips:
            for file in files:
                own = file.is_relative_to(made.folder)
                target = folder / file.relative_to(made.folder) if own else file
                flips.enter_context(flipped(target, places(target)[1], put_back=not own))
            said, _ = made.resume(folder)
        if said.code == 0:
            assert_same_runs(folder, made.whole, made.shards)
        elif fault := "refused" if files is rebuilt else fault_of(said, files[0], None):
            faults.append(f"{files}: {fault}: {said}")
        shutil.rmtree(folder)
    assert not faults


def test_every_kind_of_file_of_a_run_has_a_reader_that_checks_it_or_is_listed(made, watch):
    with watch.files() as seen:
        for read in READERS.values():
            read(made.folder)
    checked = {made.name_of(Path(name)) for name in seen}
    there = {made.name_of(file) for file in made.folder.rglob("*") if file.is_file()}
    assert {name for name in there - checked if not is_not_checked(name)} == set()
    assert not [one for one in NOT_CHECKED if not any(name.startswith(one) for name in there)]
