import json
import pickle
import subprocess
import sys

import pytest

from bigscl.store import HeatmapStore, seal
from bigscl.store.backends.backend import open_backend
from bigscl.store.lease import KEY, read_holder
from tests.test_tools.conftest import bigscl

HOLD = """
import sys, pickle
from bigscl.store import HeatmapStore
annotations = pickle.load(open(sys.argv[2], "rb"))
store = HeatmapStore.open(sys.argv[1], annotations=annotations, mode="w", run="doomed")
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def dead(run, index, tmp_path):
    """A run whose process was killed while it held the store."""
    (tmp_path / "annotations").write_bytes(pickle.dumps(index.annotations()))
    command = [sys.executable, "-c", HOLD, str(run / "store"), str(tmp_path / "annotations")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        process.kill()
    return run


def held(run):
    return read_holder(open_backend(run / "store")) is not None


def test_a_free_store_needs_no_unlocking(run):
    answer = bigscl("unlock", run)
    assert (answer.code, answer.out.strip()) == (0, f"{run}/store: no run uses it")


def test_a_dead_holder_is_named_and_its_lease_broken_only_when_told(dead):
    answer = bigscl("unlock", dead)
    assert answer.code == 0
    assert "'doomed'" in answer.out
    assert "which is dead; add --apply" in answer.out
    assert held(dead)
    assert bigscl("unlock", dead, "--apply", "--json").json()["broken"]
    assert not held(dead)


def test_a_living_holder_keeps_its_lease_unless_forced(run, index):
    with HeatmapStore.open(run / "store", annotations=index.annotations(), mode="w", run="busy"):
        for arguments in ([], ["--apply"]):
            answer = bigscl("unlock", run, *arguments)
            assert answer.code == 1
            assert "may be alive" in answer.out
            assert held(run)
        assert bigscl("unlock", run, "--force", "--apply").code == 0
        assert not held(run)


def test_a_silent_holder_on_another_host_is_dead(run):
    holder = {
        "run": "far",
        "host": "elsewhere",
        "pid": 1,
        "started": "",
        "since": 0.0,
        "token": "t",
        "machine": "",
    }
    (run / "store" / KEY).write_text(json.dumps(seal(holder)))
    assert bigscl("unlock", run, "--patience", 0.2, "--json").json()["dead"]


def test_a_place_without_a_store_is_refused(tmp_path):
    assert bigscl("unlock", tmp_path).code == 2


@pytest.mark.parametrize("content", [b"", bytes(200), b'{"run": "far", "ho', b"[]", b'{"pid": "x"}'])
def test_a_damaged_lease_is_said_and_cleared_by_force(run, index, content):
    (run / "store" / KEY).write_bytes(content)
    for arguments in ([], ["--apply"]):
        answer = bigscl("unlock", run, *arguments)
        assert answer.code == 1
        assert f"{run}/store/{KEY}" in answer.out
        assert "add --force --apply" in answer.out
    assert (run / "store" / KEY).read_bytes() == content
    assert bigscl("unlock", run, "--force", "--apply", "--json").json()["broken"]
    assert bigscl("unlock", run).out.strip() == f"{run}/store: no run uses it"
    HeatmapStore.open(run / "store", annotations=index.annotations(), mode="w").close()
