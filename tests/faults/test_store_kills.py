"""A store killed at each of its storage operations loses nothing that was committed, and can be resumed.

The slow suite hits every operation of the small life, the normal run one of each kind. A failure names the
operation; `Life(...).run(at=number, how=how)` repeats it.
"""

import itertools

import pytest

from tests.faults import kills
from tests.faults.injector import read_log
from tests.faults.life import Life
from tests.faults.store_life import check_end
from tests.fork_server import OS_ERROR, STORE_ERROR

pytestmark = pytest.mark.timeout(400)


@pytest.fixture
def lives(store_server, tmp_path):
    """Makes lives, each in a folder of its own."""
    numbers = itertools.count()
    return lambda **options: Life(store_server, tmp_path / f"life-{next(numbers)}", **options)


@pytest.fixture(scope="module")
def operations(store_server, tmp_path_factory):
    """The operations of an undisturbed life."""
    life = Life(store_server, tmp_path_factory.mktemp("lives") / "whole")
    assert life.run(at=None).code == 0, life.output.read_text()
    check_end(life.url, life.ledger)
    return read_log(life.log)


def kill_and_go_on(life, number, how):
    """Threads make the order vary a little: a life may be over before its last operations are hit."""
    ended = life.run(at=number, how=how)
    assert ended.killed or ended.code == 0, life.last_words()
    kills.count("store", life.hit)
    life.check_committed()
    life.run_to_the_end()


def check_points(lives, points, kill=kill_and_go_on, **options):
    """Each point in a life of its own."""

    def attempt(*point):
        life = lives(**options)
        try:
            kill(life, *point)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{life.hit[0] if life.hit else ''}") from error

    kills.try_all(list(points), attempt)


def test_a_store_killed_at_each_kind_of_operation_loses_nothing(lives, operations):
    check_points(lives, kills.points(kills.distinct(kills.one_of_each_kind(operations))))


def test_a_compact_store_killed_at_a_few_operations_loses_nothing(lives, operations):
    points = list(kills.points(kills.one_of_each_kind(operations)))
    check_points(lives, points[::5], codec="uint8")


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_store_killed_at_every_operation_loses_nothing(lives, operations):
    check_points(lives, kills.points(operations))


def test_starts_that_each_live_a_little_longer_come_to_the_end(lives, operations):
    """Each start is killed a few operations later than the last, so start-ups are killed everywhere."""
    live_ever_longer(lives(), step=9, most=len(operations))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("step", [1, 2, 5])
def test_many_starts_that_each_live_a_little_longer_come_to_the_end(lives, operations, step):
    live_ever_longer(lives(), step, most=len(operations))


def live_ever_longer(life, step, most):
    for number in range(1, most + 1, step):
        ended = life.run(at=number)
        life.check_committed()
        if not ended.killed:
            assert ended.code == 0, f"{life.last_words()}\n{life.hit[-1]}"
            break
    kills.count("store, killed again and again", life.hit)
    check_end(life.url, life.ledger)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_store_killed_twice_in_a_row_loses_nothing(lives, operations):
    """First once at each kind of operation, then at each operation of the start that follows."""

    def kill_twice(life, number, how):
        life.run(at=number)
        life.run(at=int(how))
        kills.count("store, killed twice", life.hit)
        life.check_committed()
        life.run_to_the_end()

    first = [each.number for each in kills.one_of_each_kind(operations)]
    check_points(lives, [(n, str(m)) for n in first for m in range(1, 40, 3)], kill_twice)


def fail_and_go_on(life, number, action):
    """A full disk stays full until the process has ended; a bad one fails once."""
    ended = life.run(at=number, action=action, lasting=action == "ENOSPC")
    assert ended.code in (0, STORE_ERROR, OS_ERROR), life.last_words()
    life.check_committed()
    life.run_to_the_end()


def test_an_error_of_the_storage_is_clear_and_loses_nothing(lives, operations):
    wanted = kills.one_of_each_kind(operations, by_name=False)
    points = [(each.number, action) for each in wanted for action in ("ENOSPC", "EIO")]
    check_points(lives, points, fail_and_go_on)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("action", ["ENOSPC", "EIO"])
def test_an_error_of_the_storage_at_any_operation_is_clear_and_loses_nothing(lives, operations, action):
    check_points(lives, [(each.number, action) for each in operations[::3]], fail_and_go_on)
