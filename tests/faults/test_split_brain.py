"""A writer that was frozen and comes back touches nothing of what its successor has written.

A is frozen at one of its operations; B breaks its lease, commits twice, and stops with writes under way; A is
thawed and must end with an error; then B finishes.
"""

import contextlib
import shutil

import numpy as np
import pytest

from tests.faults import kills
from tests.faults.injector import read_log
from tests.faults.life import Life
from tests.faults.store_life import check_committed, check_end, check_snapshots
from tests.fork_server import STORE_ERROR

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def operations(store_server, tmp_path_factory):
    life = Life(store_server, tmp_path_factory.mktemp("whole") / "frozen")
    assert life.run(at=None).code == 0, life.last_words()
    check_end(life.url, life.ledger)
    return read_log(life.log)


def freeze_and_thaw(server, folder, number):
    """One split brain, with A frozen before an operation."""
    a = Life(server, folder / f"{number}-a")
    frozen = a.start(at=number, action="stop")
    if not server.wait(frozen).stopped:
        return  # threads make the order vary a little: it was over before
    kills.count("split brain, frozen", a.hit)
    had_all = a.ledger.done
    b = Life(server, folder / f"{number}-b", url=a.url)
    if a.ledger_path.exists():
        shutil.copy(a.ledger_path, b.ledger_path)
    successor = b.start("usurp")
    try:
        take_over(server, a, b, frozen, successor, had_all)
    except Exception as error:
        raise AssertionError(f"{str(error)[:300]}\n{a.hit[0]}") from error
    finally:
        for pid in (frozen, successor):
            with contextlib.suppress(ProcessLookupError):
                server.kill(pid)


def take_over(server, a, b, frozen, successor, had_all):
    assert server.wait(successor).stopped, f"B could not take over: {b.last_words()}"
    before = check_snapshots(b.url)
    ended = a.thaw(frozen)
    assert_same_snapshots(before, check_snapshots(b.url))
    assert b.thaw(successor).code == 0, f"B could not go on: {b.last_words()}"
    check_committed(b.url, b.ledger)
    assert ended.code == STORE_ERROR or (had_all and ended.code == 0), f"only A's error: {a.last_words()}"


def assert_same_snapshots(before, after):
    """Bit for bit."""
    assert after.keys() == before.keys(), f"B had snapshots {sorted(before)}, now there are {sorted(after)}"
    for number, rows in before.items():
        for name, array in rows.items():
            np.testing.assert_array_equal(after[number][name], array, err_msg=f"snapshot {number}: {name}")


def freeze_at_all(server, folder, operations):
    def attempt(number):
        freeze_and_thaw(server, folder, number)

    kills.try_all([(each.number,) for each in operations], attempt)


def test_a_thawed_writer_leaves_its_successors_snapshots_alone(store_server, tmp_path, operations):
    freeze_at_all(store_server, tmp_path, kills.distinct(kills.one_of_each_kind(operations)))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_writer_thawed_at_any_operation_leaves_its_successors_snapshots_alone(
    store_server, tmp_path, operations
):
    freeze_at_all(store_server, tmp_path, operations)
