"""The injector sees every operation once, in order, and strikes where it is told to."""

import os
import signal

import pytest

from tests.faults.few_operations import BYTES, NAMES
from tests.faults.injector import Plan, read_log
from tests.fork_server import OS_ERROR

FEW = "tests.faults.few_operations:perform"


@pytest.fixture
def strike(store_server, tmp_path):
    """How a child ended that was struck as told."""

    def run(**plan):
        given = Plan(places=(str(tmp_path / "few"),), log=str(tmp_path / "log"), **plan)
        child = store_server.start(FEW, tmp_path / "few", output=tmp_path / "output", plan=given)
        return child, store_server.wait(child)

    return run


def test_every_operation_is_seen_once_and_in_order(strike, tmp_path):
    assert strike()[1].code == 0, (tmp_path / "output").read_text()
    assert [each.name for each in read_log(tmp_path / "log")] == NAMES


@pytest.mark.parametrize(
    ("number", "how", "left"),
    [(3, "before", b""), (3, "torn", BYTES[:5]), (3, "after", BYTES), (2, "before", None), (2, "after", b"")],
)
def test_a_process_is_killed_before_after_and_in_the_midst_of_a_write(strike, tmp_path, number, how, left):
    assert strike(at=number, how=how)[1].killed
    file = tmp_path / "few" / "text"
    assert (file.read_bytes() if file.exists() else None) == left
    (hit,) = read_log(tmp_path / "log")
    assert (hit.number, hit.name, hit.how) == (number, NAMES[number - 1], how)


def test_a_process_is_frozen_and_thawed(strike, store_server, tmp_path):
    child, ended = strike(at=len(NAMES), action="stop")
    assert ended.stopped
    assert (tmp_path / "few" / "below").exists()
    os.kill(child, signal.SIGCONT)
    assert store_server.wait(child).code == 0
    assert not (tmp_path / "few" / "below").exists()


def test_an_error_is_raised_where_the_disk_is_full(strike, tmp_path):
    assert strike(at=6, action="ENOSPC", lasting=True)[1].code == OS_ERROR
    assert "No space left on device" in (tmp_path / "output").read_text()
    # A sync needs no space: the next file is the first that cannot be made.
    assert sorted(os.listdir(tmp_path / "few")) == ["bytes", "text"]
