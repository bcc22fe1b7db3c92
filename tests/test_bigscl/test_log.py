"""Metrics over ranks, by ranks that share a process."""

from types import SimpleNamespace

import pytest
import torch

from bigscl.distributed.ranks import SingleProcess
from bigscl.losses.objective import Loss
from bigscl.training import metrics_log
from bigscl.training import metrics_log as log
from bigscl.training.metrics_log import Meter


class Ranks:
    """One of several ranks: its sums add what the others said before it."""

    world_size = 3

    def __init__(self, rank, said):
        self.rank, self._said = rank, said
        self.wait_seconds = 100.0 + rank

    def sum(self, values):
        self._said.append(values)
        return [sum(column) for column in zip(*self._said, strict=True)]


@pytest.fixture
def now(monkeypatch):
    seconds = [0.0]
    monkeypatch.setattr(log.time, "perf_counter", lambda: seconds[0])
    return seconds


def loss_of(*totals):
    values = torch.tensor(totals)
    return Loss(**dict.fromkeys(Loss._fields, values))


def test_meter_reports_the_longest_wait_of_any_rank_in_one_sum(now):
    said = []
    meters = [Meter(Ranks(rank, said)) for rank in range(3)]
    for meter, totals in zip(meters, [(1.0, 2.0), (3.0,), ()], strict=True):
        if totals:
            meter.add(loss_of(*totals))
    meters[1]._ranks.wait_seconds += 5.0
    now[0] = 10.0
    waits = [{"wait_data": 1.0, "wait_writeback": 0.0}, {"wait_data": 0.5, "wait_writeback": 2.0}]
    waits.append({"wait_data": 4.0, "wait_writeback": 1.0})
    *_, last = [meter.read(wait) for meter, wait in zip(meters, waits, strict=True)]
    assert len(said) == 3
    assert last["total"] == 2.0
    assert last["images_per_second"] == 0.3
    assert {name: last[name] for name in last if "wait_" in name} == {
        "wait_data": 0.4,
        "wait_writeback": 0.2,
        "wait_ranks": 0.5,
    }


def test_wait_for_others_at_a_reading_belongs_to_the_next_one(now):
    """Else it could be more than all the time there was."""

    class Late(Ranks):
        def sum(self, values):
            now[0] += 6.0
            self.wait_seconds += 6.0
            return list(values)

    meter = Meter(Late(0, []))
    now[0] = 10.0
    assert meter.read({})["wait_ranks"] == 0.0
    now[0] += 2.0
    assert meter.read({})["wait_ranks"] == 6.0 / 8.0


def test_meter_of_a_single_process_waits_for_nobody_else_and_starts_over_when_read(now):
    meter = Meter(SingleProcess())
    meter.add(loss_of(1.0, 2.0))
    now[0] = 2.0
    assert meter.read({"wait_data": 1.0})["wait_data"] == 0.5
    meter.add(loss_of(5.0))
    now[0] = 4.0
    seen = meter.read({"wait_data": 1.5})
    assert (seen["total"], seen["images_per_second"], seen["wait_data"]) == (5.0, 0.5, 0.25)
    assert "wait_ranks" not in seen


def test_the_work_after_an_epoch_is_measured_for_the_time_left(tmp_path, now, monkeypatch):
    monkeypatch.setattr(metrics_log.time, "perf_counter", lambda: now[0])
    metrics = log.MetricsLog(tmp_path, SimpleNamespace(is_main_process=False))
    with metrics.progress(0, 3, 2, 0):
        for _ in range(2):
            now[0] += 10
            metrics.advance()
    now[0] += 4  # validation, say
    metrics.progress(1, 3, 2, 0)
    now[0] += 10
    metrics.advance()
    assert metrics._pace.seconds_left() == (10.0, 10.0 + 20.0 + 2 * 4.0)


def test_a_machine_without_git_can_log_its_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert log.environment(["train"])["revision"] is None
