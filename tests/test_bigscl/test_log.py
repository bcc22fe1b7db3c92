"""Metrics over ranks, by ranks that share a process."""

from types import SimpleNamespace
from typing import ClassVar

import accelerate.accelerator as accelerator_module
import pytest
import torch
from accelerate import Accelerator, tracking
from accelerate.tracking import GeneralTracker

from bigscl.distributed.ranks import SingleProcess
from bigscl.losses.objective import Loss
from bigscl.training import metrics_log
from bigscl.training import metrics_log as log
from bigscl.training.metrics_log import Meter
from tests.builders import config_of


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
    assert last["loss"] == 2.0
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
    assert (seen["loss"], seen["images_per_second"], seen["wait_data"]) == (5.0, 0.5, 0.25)
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


# Trackers


class Injected(GeneralTracker):
    """Notes how it is made and what it gets, in place of a tracker that is not installed."""

    requires_logging_directory = False
    made: ClassVar[list["Injected"]] = []

    def __init__(self, project, **options):
        super().__init__()
        self.project, self.options, self.settings, self.logged = project, options, None, []
        Injected.made.append(self)

    @property
    def tracker(self):
        return self

    def start(self):
        pass

    def store_init_configuration(self, values):
        self.settings = values

    def log(self, values, step=None, **_):
        self.logged.append((step, values))


class InjectedWandb(Injected):
    name = "wandb"


class InjectedMlflow(Injected):
    name = "mlflow"


def start(monkeypatch, folder, step, **log_settings):
    """The trackers of a run whose W&B and MLflow are injected, on a new accelerator."""
    Injected.made.clear()
    known = {**tracking.LOGGER_TYPE_TO_CLASS, "wandb": InjectedWandb, "mlflow": InjectedMlflow}
    monkeypatch.setattr(accelerator_module, "LOGGER_TYPE_TO_CLASS", known)
    folder.mkdir(exist_ok=True)
    own = {"trackers": ["wandb", "tensorboard", "mlflow"], **log_settings}
    config = config_of(run=str(folder), log=own)
    made = Accelerator(project_dir=str(folder), cpu=True)
    # The constructor leaves out what is not installed.
    made.log_with = list(config.log.trackers)
    log.start_trackers(made, config, "abc", step)
    return made, *Injected.made


def test_trackers_get_project_name_and_nested_settings(monkeypatch, tmp_path):
    accelerator, wandb, mlflow = start(monkeypatch, tmp_path / "first", 0)
    assert [tracker.name for tracker in accelerator.trackers] == ["wandb", "tensorboard", "mlflow"]
    assert (wandb.project, wandb.options["name"]) == ("bigscl", "first")
    assert (mlflow.project, mlflow.options) == ("bigscl", {"run_name": "first"})
    assert wandb.settings["data"]["crop"]["scale"] == [0.08, 1.0]
    assert mlflow.settings["data.crop.scale"] == "[0.08, 1.0]"
    assert mlflow.settings["model.weights"] == "None"
    assert mlflow.settings["data.batch_size"] == 64
    _, wandb, mlflow = start(monkeypatch, tmp_path / "first", 0, project="birds", name="try 3")
    assert (wandb.project, wandb.options["name"]) == ("birds", "try 3")
    assert (mlflow.project, mlflow.options["run_name"]) == ("birds", "try 3")


def test_a_resumed_run_continues_the_run_of_its_tracker(monkeypatch, tmp_path):
    _, before, _ = start(monkeypatch, tmp_path / "run", 0)
    _, after, _ = start(monkeypatch, tmp_path / "run", 40)
    assert before.options == after.options
    assert (after.options["id"], after.options["resume"]) == ("abc", "allow")


def test_tensorboard_shows_a_resumed_run_as_one_without_the_steps_that_are_trained_again(
    monkeypatch, tmp_path
):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for step, logged in ((0, range(1, 9)), (5, range(6, 11))):
        accelerator, *_ = start(monkeypatch, tmp_path / "run", step)
        metrics = log.MetricsLog(tmp_path / "run", accelerator)
        for number in logged:
            metrics.write("train", number, {"loss": float(step), "epoch": 1})
        accelerator.end_training()
    folder = tmp_path / "run" / "tensorboard"
    # The run, and the settings of its first start.
    assert len({path.parent for path in folder.rglob("events.*")}) == 2
    seen = event_accumulator.EventAccumulator(str(folder))
    seen.Reload()
    found = {event.step: event.value for event in seen.Scalars("train/loss")}
    assert found == {step: 0.0 if step <= 5 else 5.0 for step in range(1, 11)}
    assert len(seen.Scalars("train/loss")) == 10


def test_a_machine_without_git_can_log_its_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert log.environment(["train"])["revision"] is None
