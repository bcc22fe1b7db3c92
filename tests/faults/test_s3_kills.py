"""Stores on an object store, killed at their requests: before they are sent, and after they are answered."""

import itertools

import pytest

from tests.builders import make_shards
from tests.faults import kills
from tests.faults.injector import read_log
from tests.faults.life import Life
from tests.faults.store_life import check_end
from tests.faults.training import Training, small_config
from tests.integration.runs import assert_same_runs

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def lives(store_server, tmp_path_factory, s3_endpoint):
    """Makes lives of stores in the bucket."""
    numbers, folder = itertools.count(), tmp_path_factory.mktemp("lives")

    def make():
        name = f"s3-{next(numbers)}"
        return Life(store_server, folder / name, url=f"s3://bucket/{name}", endpoint=s3_endpoint)

    return make


@pytest.fixture(scope="module")
def requests(lives):
    """The requests of an undisturbed life that change something."""
    life = lives()
    assert life.run(at=None).code == 0, life.output.read_text()
    check_end(life.url, life.ledger, life.endpoint)
    return read_log(life.log)


def kill_at(lives):
    def kill(number, how):
        life = lives()
        ended = life.run(at=number, how=how)
        assert ended.killed or ended.code == 0, life.last_words()
        kills.count("store on S3", life.hit)
        life.check_committed()
        life.run_to_the_end()

    return kill


def test_an_object_store_killed_at_a_request_of_each_kind_loses_nothing(lives, requests):
    wanted = kills.one_of_each_kind(requests)
    kills.try_all([(each.number, how) for each in wanted for how in ("before", "after")][::8], kill_at(lives))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_an_object_store_killed_at_every_few_requests_loses_nothing(lives, requests):
    kills.try_all(
        [(each.number, how) for each in requests for how in ("before", "after")][::5], kill_at(lives)
    )


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_with_its_store_on_s3_killed_at_a_request_of_each_kind_ends_identical(
    trainer_server, tmp_path, s3_endpoint, processes
):
    """Identical to a run whose store is on disk."""
    shards = make_shards(tmp_path / "shards", 22, 6)
    names = (f"run-{processes}-{number}" for number in itertools.count())

    def make():
        name = next(names)
        url = f"s3://bucket/{name}"
        store = {"url": url, "endpoint": s3_endpoint, "region": "us-east-1"}
        return Training(
            trainer_server, small_config(tmp_path / f"{name}.yaml", shards, store=store), places=(url,)
        )

    counted = make()
    assert {each.code for each in counted.run(processes=processes, at=None)} == {0}, counted.last_words()

    def kill(number, how):
        run = make()
        run.run(processes=processes, at=number, how=how)
        kills.count(f"training on S3, {processes} processes", run.hit)
        run.run_to_the_end(processes=processes)
        assert_same_runs(run.folder, counted.folder, shards)

    wanted = kills.one_of_each_kind(counted.hit)
    kills.try_all([(each.number, how) for each in wanted for how in ("before", "after")], kill)
