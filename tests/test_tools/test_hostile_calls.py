"""Every verb with every hostile thing: sense, or one line that names what is wrong; never a traceback."""

import contextlib
import os
import re
import shutil
import tempfile
from collections import Counter
from pathlib import Path

import pytest

from bigscl.common.digests import write_sealed
from bigscl.common.text import printable
from bigscl.common.user_error import UserError
from bigscl.store import HeatmapStore
from bigscl.store.lease import Lease
from tests.builders import make_store, scene_index
from tests.test_tools import hostile
from tests.test_tools.conftest import add_config, bigscl
from tests.test_tools.test_review import keep_scores

VERBS = list(hostile.verbs())
OVER_STORES = [(verb, one) for verb in VERBS for one in verb.parameters if one.kind == "store"]
# What changes a store is tried with its consent too; what has several jobs, with each of them.
VARIANTS = {
    "export": [["labels"], ["scores"], ["heatmaps", "--sample", "0"]],
    "compact": [[], ["--top", "3", "--apply"]],
    "repair": [[], ["--apply"]],
    "unlock": [["--patience", "0.05"], ["--patience", "0.05", "--force", "--apply"]],
    "show": [[], ["--sample", "3"], ["--histograms"]],
    "view": [["--prepare"]],
}
ROUND = 5
# What keeps a call short, or from starting others.
SHORT = {
    ("export",): ["labels"],
    ("study",): ["--dry-run"],
    ("index",): ["--jobs", "1"],
    ("view",): ["--prepare"],
    ("shards", "scenes"): ["--single", "1", "--train", "1", "--val", "1", "--test", "1"],
}
STORE_CALLS = [(verb, one, words) for verb, one in OVER_STORES for words in VARIANTS.get(verb.words[0], [[]])]


@pytest.fixture(scope="module")
def world():
    """Data and a run below a folder that an ordinary user may read."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    try:
        index = scene_index(folder / "data")
        make_store(folder / "run" / "store", index)
        add_config(folder / "run", index)
        keep_scores(folder / "run", index)
        checkpoint = folder / "run" / "checkpoints" / "step-00000030"
        checkpoint.mkdir(parents=True)
        newest = HeatmapStore.open(folder / "run" / "store").snapshot
        progress = {"step": newest.step, "epoch": 3, "snapshot": newest.id, "run": newest.run}
        write_sealed(checkpoint / "progress.json", progress)
        yield hostile.World(folder, folder / "run", index.urls[0].replace("000000", "*"))
    finally:
        for one in folder.rglob("*"):
            if one.is_dir() and not one.is_symlink():
                one.chmod(0o755)
        shutil.rmtree(folder)


@pytest.fixture(autouse=True)
def no_commands(monkeypatch):
    """Verbs that start others say that those failed."""

    def refuse(self, words, **options):
        raise UserError(f"this command failed: {' '.join(words)}")

    monkeypatch.setattr("bigscl.tools.shared.running.Runner.run", refuse)
    # Trying bf16 in another process takes seconds, and is tested with the code that does it.
    monkeypatch.setattr("bigscl.preflight.environment._bf16", lambda: True)
    # The lease of a damaged run is that of another host.
    monkeypatch.setitem(Lease.acquire.__func__.__kwdefaults__, "patience_seconds", 0.05)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")


@contextlib.contextmanager
def ordinary_user():
    """File access as a user who may not read and write everything."""
    if os.geteuid() == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(os.getuid())


def call(world, verb, given, extra=(), user=False):
    """A call of a verb with these parameters, good ones where they are needed, and these words."""
    words = list(verb.words)
    for one in verb.parameters:
        if one.name in given:
            words += [*([] if one.flag is None else [one.flag]), given[one.name]]
        elif one.required and not (one.kind == "choice" and extra):
            words += [*([] if one.flag is None else [one.flag]), world.good(one, verb, list(extra))]
        if one.kind == "store" and one.flag is None and one.name != "a":
            words += extra
    words = words if any(one.kind == "store" for one in verb.parameters) else [*words, *extra]
    with ordinary_user() if user else contextlib.nullcontext():
        return words, bigscl(*words)


def assert_sense(words, answer, names):
    """Exit code 0 or 1 with an answer, or 2 with one line that names what is wrong."""
    told = f"{words}\n{answer.out}\n{answer.err}"
    assert answer.code in (0, 1, 2), told
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f]", answer.out + answer.err), told
    if answer.code < 2:
        assert answer.out or answer.err, told
        return
    # Lines of progress may come before it; the mistakes of a config are listed below it.
    lines = [line for line in answer.err.splitlines() if line.startswith("bigscl")]
    assert len(lines) == 1, told
    after = answer.err.splitlines()[answer.err.splitlines().index(lines[0]) + 1 :]
    assert all(line.startswith("  ") for line in after), told
    text = "\n".join([lines[0], *after])
    assert "Errno" not in text, told
    assert any(name in text for name in names), f"names none of {names}: {told}"


def argument_cases():
    """All (verb, parameter, thing); in a fast run each thing meets one verb of those that take it."""
    takers: Counter[tuple[str, str]] = Counter()
    for verb in VERBS:
        for one in verb.parameters:
            for number, thing in enumerate(hostile.hostile(one)):
                turn = takers[one.kind, thing]
                takers[one.kind, thing] += 1
                marks = [] if turn == number % ROUND else [pytest.mark.slow]
                yield pytest.param(
                    verb, one, thing, id=f"{' '.join(verb.words)}-{one.name}-{thing}", marks=marks
                )


@pytest.mark.parametrize(("verb", "parameter", "thing"), list(argument_cases()))
def test_hostile_argument(world, verb, parameter, thing):
    value = str(hostile.hostile(parameter)[thing](world))
    short = SHORT.get(verb.words, [])
    extra = [] if parameter.name == "what" or parameter.flag in short else short
    # preflight starts another interpreter, `datasets` imports late: an ordinary user may not be allowed to.
    user = "read" in thing and verb.words not in (("preflight",), ("shards", "hf"))
    words, answer = call(world, verb, {parameter.name: value}, extra, user)
    names = [value or "expected", printable(value), parameter.flag or parameter.name]
    names += [f"'{parameter.name.upper()}", str(Path(value).parent), value.partition("=")[0] or "expected"]
    # Nothing here is a dataset of these two, and that is found first.
    names += [str(world.dataset)] if verb.words[-1] in ("voc", "coco") else []
    # The run has no weights, and that is found first.
    names += [str(world.run)] if verb.words == ("publish",) else []
    # The command that it would have started.
    names += ["this command failed"] if verb.words == ("quickstart",) else []
    assert_sense(words, answer, names)


def check_store_call(world, make, verb, one, words, user=False):
    run = make(world)
    if user:  # Modules and fonts are loaded late, from folders that such a user may not be allowed to read.
        call(world, verb, {one.name: str(shutil.copytree(world.run, run.with_name("warm")))}, words)
        shutil.rmtree(run.with_name("warm"))
    called, answer = call(world, verb, {one.name: str(run)}, words, user)
    # Half a config names other shards.
    # An ordinary user may have no cache for the page's index.
    assert_sense(called, answer, [str(run), "no index of these", "/bigscl/view/"])
    shutil.rmtree(run)


THINGS = {**hostile.damaged_runs(), **hostile.wrong_fields()}


@pytest.mark.parametrize("thing", list(THINGS)[::3])
def test_damaged_run_or_store(world, thing):
    """Each thing meets one verb over stores; all of them in the slow test."""
    place = list(THINGS).index(thing) // 3
    check_store_call(world, THINGS[thing], *STORE_CALLS[place % len(STORE_CALLS)], "unreadable" in thing)


@pytest.mark.slow
@pytest.mark.parametrize("thing", THINGS)
def test_damaged_run_or_store_and_every_verb(world, thing):
    for verb, one, words in STORE_CALLS:
        check_store_call(world, THINGS[thing], verb, one, words, "unreadable" in thing)
