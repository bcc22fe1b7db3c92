"""Runs killed at their storage operations end as if nothing had happened, on one to four processes.

A failure names the operation; `Training(...).run(at=number, how=how)` repeats it. Threads make the order of
operations vary a little from run to run, so the same number may hit a neighbour.
"""

import itertools
import os

import pytest

from bigscl.training.checkpoint_folder import Checkpoints
from tests.builders import make_shards
from tests.faults import kills
from tests.faults.training import Training, small_config
from tests.integration.runs import assert_same_runs
from tests.integration.test_resume import assert_each_sample_once, visited_by_checkpoint

# The first test also pays for the server and for the runs that the others compare with.
pytestmark = pytest.mark.timeout(400)
ALTERNATING = ("before", "after", "torn")


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Four shards, the last one shorter: 22 images."""
    return make_shards(tmp_path_factory.mktemp("shards"), 22, 6)


@pytest.fixture
def trainings(trainer_server, shards, tmp_path):
    """Makes runs, each in a folder of its own; sections of the config may differ."""
    numbers = itertools.count()
    return lambda **sections: Training(
        trainer_server, small_config(tmp_path / f"run-{next(numbers)}.yaml", shards, **sections)
    )


@pytest.fixture(scope="module")
def whole(trainer_server, shards, tmp_path_factory):
    """(folder, operations of one rank) of an uninterrupted run, by number of processes and rank."""
    made, folder = {}, tmp_path_factory.mktemp("whole")

    def make(processes, rank=0):
        if (processes, rank) not in made:
            config = small_config(folder / f"whole-{processes}-{rank}.yaml", shards)
            run = Training(trainer_server, config)
            codes = [each.code for each in run.run(processes=processes, rank=rank, at=None)]
            assert codes == [0] * processes, run.output.read_text()
            made[processes, rank] = run.folder, run.hit
        return made[processes, rank]

    return make


class Kill:
    """Kills a run at an operation, resumes it, and compares it with one that was not killed."""

    def __init__(self, trainings, whole, shards, processes=1, rank=0):
        self._trainings, self._shards = trainings, shards
        self._processes, self._rank = processes, rank
        self._reference = whole(processes)[0]

    def __call__(self, number, how, *again):
        """`again`: operations at which the starts that follow are killed, too."""
        run = self._trainings()
        for at in (number, *again):
            ended = run.run(processes=self._processes, rank=self._rank, at=at, how=how)
            killed = ended[self._rank].killed
            assert killed or {each.code for each in ended} == {0}, f"{run.last_words()}\n{run.hit}"
        twice = ", killed again at once" if again else ""
        kills.count(f"training, {self._processes} processes{twice}", run.hit)
        hit = "\n".join(map(str, run.hit))
        try:
            run.run_to_the_end(processes=self._processes)
            assert_same_runs(run.folder, self._reference, self._shards)
        except Exception as error:
            raise AssertionError(f"{kills.said(error)[:300]}\n{hit}") from error


def alternating(operations):
    """(number, how) of each: before it, after it, half-way through it, in turn."""
    return [(each.number, how) for each, how in zip(operations, itertools.cycle(ALTERNATING), strict=False)]


def test_run_killed_at_each_kind_of_operation_ends_identical(trainings, whole, shards):
    wanted = kills.one_of_each_kind(whole(1)[1], by_name=False)
    kills.try_all(alternating(wanted), Kill(trainings, whole, shards))


def test_run_on_two_processes_killed_at_a_commit_a_checkpoint_and_a_drop_ends_identical(
    trainings, whole, shards
):
    operations = kills.one_of_each_kind(whole(2)[1])
    wanted = {("commit", "link"): "after", ("checkpoint", "rename"): "after", ("drop", "unlink"): "before"}
    points = [
        (each.number, wanted[each.kind, each.name]) for each in operations if (each.kind, each.name) in wanted
    ]
    kills.try_all(points, Kill(trainings, whole, shards, processes=2))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_run_killed_at_operations_all_over_its_life_ends_identical(trainings, whole, shards):
    """`BIGSCL_KILL_STRIDE=1` kills at every single operation."""
    stride = int(os.environ.get("BIGSCL_KILL_STRIDE", "4"))
    kills.try_all(alternating(whole(1)[1])[::stride], Kill(trainings, whole, shards))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("processes", "rank"), [(2, 0), (2, 1), (3, 0), (4, 0), (4, 3)])
def test_rank_killed_at_each_kind_of_operation_ends_identical(trainings, whole, shards, processes, rank):
    wanted = kills.one_of_each_kind(whole(processes, rank)[1], by_name=processes == 2)
    kills.try_all(alternating(wanted), Kill(trainings, whole, shards, processes, rank))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["create", "commit", "checkpoint", "drop", "compaction"])
def test_run_killed_again_while_it_resumes_ends_identical(trainings, whole, shards, kind):
    """First in the midst of something, then at each operation of the start that follows, and once more."""
    operations = [
        each for each in whole(1)[1] if each.kind == kind and each.name in ("link", "rename", "unlink")
    ]
    first = operations[len(operations) // 2].number
    points = [(first, "before", again, again + 1) for again in range(1, start_up(trainings, first), 2)]
    kills.try_all(points, Kill(trainings, whole, shards))


def start_up(trainings, first):
    """How many operations a start has before it trains, after a kill at the operation given."""
    run = trainings()
    run.run(at=first)
    killed = len(run.hit)
    run.run(at=None)
    later = run.hit[killed:]
    return next((each.number for each in later if each.kind == "shard"), len(later))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_killed_run_resumes_with_other_numbers_of_processes_each_sample_once(trainings, whole, shards):
    def kill_and_change(number, how, processes):
        run = trainings(log={"trackers": [], "pictures_every": 0, "every_steps": 1, "ids": True})
        ended = run.run(processes=2, at=number, how=how)
        assert ended[0].killed, f"{run.last_words()}\n{run.hit}"
        kills.count("training, changed number of processes", run.hit)
        epoch, had = 0, set()
        if Checkpoints(run.folder / "checkpoints", 1).latest() is not None:
            epoch, had = visited_by_checkpoint(run.folder, shards)
        for file in run.folder.glob("ids-*.txt"):
            file.unlink()
        run.run_to_the_end(processes=processes)
        assert_each_sample_once(run.folder, shards, epoch, had)

    wanted = [
        each
        for each in kills.one_of_each_kind(whole(2)[1])
        if each.name in ("link", "rename", "unlink", "write")
    ]
    points = [
        (*point, size) for point, size in zip(alternating(wanted), itertools.cycle((1, 3, 4)), strict=False)
    ]
    kills.try_all(points, kill_and_change)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_full_disk_at_each_kind_of_operation_is_one_line_and_the_run_resumes(trainings, whole, shards):
    def fill_up(number, action):
        run = trainings()
        (ended,) = run.run(at=number, action=action, lasting=action == "ENOSPC")
        text = run.output.read_text()
        assert ended.code in (0, 2), f"code {ended.code}: {run.last_words()}\n{run.hit[0]}"
        assert "Traceback" not in text, f"{run.last_words()}\n{run.hit[0]}"
        run.run_to_the_end()
        assert_same_runs(run.folder, reference, shards)

    reference, operations = whole(1)
    wanted = kills.one_of_each_kind(operations)
    kills.try_all([(each.number, action) for each in wanted for action in ("ENOSPC", "EIO")], fill_up)
