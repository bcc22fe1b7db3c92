"""Every verb with every hostile thing: sense, or one line that names what is wrong; never a traceback."""

import contextlib
import os
import re
import shutil
import tempfile
from pathlib import Path

import pytest

from tests.test_tools import hostile
from tests.test_tools.conftest import add_config, bigscl
from tests.test_tools.quickstart import make_shards, make_store

VERBS = list(hostile.verbs())
OVER_STORES = [verb for verb in VERBS if any(one.kind == "store" for one in verb.parameters)]
# What changes a store is tried with its consent too; what has several jobs, with each of them.
VARIANTS = {
    "export": [["labels"], ["scores"], ["heatmaps", "--sample", "0"]],
    "compact": [[], ["--top", "3", "--apply"]],
    "repair": [[], ["--apply"]],
    "unlock": [["--patience", "0.05"], ["--patience", "0.05", "--force", "--apply"]],
    "show": [[], ["--sample", "3"], ["--histograms"]],
}


@pytest.fixture(scope="module")
def world():
    """Data and a run below a folder that an ordinary user may read."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    try:
        index = make_shards(folder / "data")
        make_store(folder / "run" / "store", index)
        add_config(folder / "run", index)
        checkpoint = folder / "run" / "checkpoints" / "step-00000030"
        checkpoint.mkdir(parents=True)
        (checkpoint / "progress.json").write_text('{"step": 30, "epoch": 3, "snapshot": 3}')
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
        raise ValueError(f"this command failed: {' '.join(words)}")

    monkeypatch.setattr("tools.running.Runner.run", refuse)
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
            words += [*([] if one.flag is None else [one.flag]), world.good(one, verb)]
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


CASES = [
    pytest.param(verb, one, name, id=f"{' '.join(verb.words)}-{one.name}-{name}")
    for verb in VERBS
    for one in verb.parameters
    for name in hostile.hostile(one)
]


@pytest.mark.parametrize(("verb", "parameter", "thing"), CASES)
def test_hostile_argument(world, verb, parameter, thing):
    value = str(hostile.hostile(parameter)[thing](world))
    extra = ["labels"] if verb.words == ("export",) and parameter.name != "what" else []
    extra += ["--dry-run"] if verb.words == ("study",) else []
    user = "read" in thing
    words, answer = call(world, verb, {parameter.name: value}, extra, user)
    shown = value.encode("unicode_escape", "surrogatepass").decode()
    names = [value or "expected", shown, parameter.flag or parameter.name, f"'{parameter.name.upper()}"]
    assert_sense(words, answer, names)


def broken_stores(verb):
    """(a call's other words, the parameter that is broken) of a verb over stores."""
    for words in VARIANTS.get(verb.words[0], [[]]):
        for one in verb.parameters:
            if one.kind == "store":
                yield words, one


@pytest.mark.parametrize("thing", hostile.damaged_runs())
def test_damaged_run(world, thing):
    for verb in OVER_STORES:
        for words, one in broken_stores(verb):
            run = hostile.damaged_runs()[thing](world)
            called, answer = call(world, verb, {one.name: str(run)}, words, "unreadable" in thing)
            assert_sense(called, answer, [str(run)])
            shutil.rmtree(run)


FIELDS = hostile.wrong_fields()


@pytest.mark.parametrize("thing", FIELDS)
def test_wrong_field_is_shown_or_refused(world, thing):
    run = FIELDS[thing](world)
    for words in (["show", str(run)], ["verify", str(run), "--all"]):
        assert_sense(words, bigscl(*words), [str(run)])


@pytest.mark.slow
@pytest.mark.parametrize("thing", FIELDS)
def test_wrong_field(world, thing):
    for verb in OVER_STORES:
        for words, one in broken_stores(verb):
            run = FIELDS[thing](world)
            called, answer = call(world, verb, {one.name: str(run)}, words)
            assert_sense(called, answer, [str(run)])
            shutil.rmtree(run)
