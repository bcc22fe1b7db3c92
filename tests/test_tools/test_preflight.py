"""How `bigscl preflight` judges what was measured; tests/integration has real rehearsals."""

from types import SimpleNamespace

import pytest

from bigscl.config import make_config
from bigscl.store import StoreSpec
from bigscl.tools.shared import rehearsal_report
from bigscl.tools.shared.rehearsal_report import epoch_end_facts, epoch_end_lines

TOPK = SimpleNamespace(group=SimpleNamespace(layout="topk"), image_bytes=100.0)
NEEDS = SimpleNamespace(phases=(TOPK,), num_steps=50)
KIND = {
    "first_epoch": 1,
    "last_epoch": 3,
    "is_warmup": False,
    "layout": "topk",
    "steps": 10,
    "images": 640,
    "seconds": 4.0,
    "waits": {"wait_data": 0.1},
    "step_seconds": 0.2,
    "compute_seconds": 0.2,
    "save_seconds": 1.0,
    "end_seconds": 5.0,
}


def settings(**checkpoint):
    return SimpleNamespace(
        optimizer=SimpleNamespace(accumulate=1),
        checkpoint=SimpleNamespace(**{"every_steps": None, "every_minutes": None, **checkpoint}),
        validation=SimpleNamespace(every_epochs=2),
        schedule=SimpleNamespace(epochs=4),
    )


def kind(loader=1000.0, read=1e6, write=1e6, ranks=1, **changes):
    storage = [{"layout": "topk", "read": read, "write": write}]
    each = {"kinds": [{**KIND, **changes}], "storage": storage}
    return rehearsal_report._kind(settings(), NEEDS, [each] * ranks, 0, loader)


@pytest.mark.parametrize(
    ("changes", "bound"),
    [
        ({}, "step"),
        ({"loader": 100}, "decode"),
        ({"read": 2e4}, "heatmaps"),
        ({"write": 2e4}, "writeback"),
        # Two ranks read twice as fast.
        ({"write": 2e4, "ranks": 2}, "step"),
        ({"ranks": 2, "compute_seconds": 0.05}, "collectives"),
        ({"ranks": 2, "compute_seconds": 0.15}, "step"),
        # Without other ranks there is nothing to exchange, whatever the clock says.
        ({"compute_seconds": 0.05}, "step"),
    ],
)
def test_slowest_part_alone_bounds_the_speed(changes, bound):
    found = kind(**changes)
    assert found["bound"] == bound
    assert found["advice"] == rehearsal_report.ADVICE[bound]
    assert found["images_per_second"] == 160


def test_hours_count_steps_ends_of_epochs_saves_and_validations():
    trainer = SimpleNamespace(data=SimpleNamespace(val=SimpleNamespace(num_samples=640)))
    one = kind()
    steps = 3 * 50 * 0.4
    ends, validations = 3 * 5.0, 2 * 640 / one["stages"]["step"]
    hours = rehearsal_report._hours(settings(), trainer, NEEDS, [one])
    assert 3600 * hours == pytest.approx(steps + ends + validations)
    saves = 3 * 4 * 1.0
    hours = rehearsal_report._hours(settings(every_steps=12), trainer, NEEDS, [one])
    assert 3600 * hours == pytest.approx(steps + ends + validations + saves)
    hours = rehearsal_report._hours(settings(every_minutes=5 / 60), trainer, NEEDS, [one])
    assert 3600 * hours == pytest.approx(steps + ends + validations + saves)


def test_loader_that_is_slower_on_cold_shards_makes_the_run_longer():
    trainer = SimpleNamespace(data=SimpleNamespace(val=None))
    slow = rehearsal_report._hours(settings(), trainer, NEEDS, [kind(loader=80)])
    assert 3600 * slow == pytest.approx(2 * 3 * 50 * 0.4 + 3 * 5.0)


def facts(**changes):
    tolerated = {"quantity": "logits", "found": 0.001, "tolerance": 0.01, "ok": True}
    values = {"differences": [{"precision": "fp32", **tolerated}], "precision": "bf16", "kinds": [kind()]}
    return {**values, "skipped": 0, **changes}


def difference(precision, found):
    return [{"precision": precision, "quantity": "scores", "found": found, "tolerance": 0.01, "ok": False}]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"differences": difference("bf16", 0.5)}, "scores in bf16: differs from the CPU reference by 0.5"),
        ({"differences": difference("fp32", None)}, "by NaN or infinite, tolerated 0.01"),
        ({"kinds": [kind(write=2e4)]}, "it sustains 200 images/s"),
        ({"skipped": 2}, "2 images could not be read"),
    ],
)
def test_problems_are_named(changes, problem):
    assert list(rehearsal_report._problems(facts())) == []
    (found,) = rehearsal_report._problems(facts(**changes))
    assert problem in found


def test_precision_that_the_run_does_not_use_is_shown_but_no_problem():
    assert list(rehearsal_report._problems(facts(differences=difference("fp16", None)))) == []


# The end of an epoch


SPEC = StoreSpec(
    fingerprint="", num_classes=100, heatmap_size=4, rows_per_shard=1000, shard_sizes=(1000,) * 64
)
RUN = make_config(
    {
        "run": "run",
        "data": {"train": "shards"},
        "model": {"backbone": "resnet50"},
        "objective": {"base": "en", "consistency": "none"},
        "selection": {"K": 2.0},
    }
)
UNITS = {"rank_score": 1e-8, "predict_image": 1e-3, "measure_class": 0.02}


def end(processes=1, num_val=5000, ranks=1, layout="topk", **changes):
    """The end of an epoch by the measurements of some ranks, whose values are these."""
    measured = {
        "storage": [{"layout": "topk", "read": 1e8, "write": 5e7}],
        "loader_images_per_second": 500.0,
        "units": UNITS,
        **changes,
    }
    one = {"layout": layout, "images_per_second": 400.0 * ranks, "save_seconds": 0.5}
    phase = SimpleNamespace(group=SimpleNamespace(layout="topk"), shard_files=4)
    return epoch_end_facts(RUN, SPEC, (phase,), num_val, processes, [measured] * ranks, one)


def test_end_of_an_epoch_is_the_sum_of_its_stages():
    found = end()
    scores = 64_000 * 100
    logged = 64_000 * 10 * 4
    assert found["stages"] == pytest.approx(
        {
            "commit and copy of the checkpoint": 0.5,
            "selection": scores * 1e-8,
            "reading of scores": 2 * scores / 1e8,
            "log of scores": logged / 5e7,
            "validation: images": 10.0,
            "validation: network": 5.0,
            "validation: metrics": 2.0,
        }
    )
    # The network predicts while images are decoded.
    assert found["seconds"] == pytest.approx(sum(found["stages"].values()) - 5.0)
    assert found["longest"] == "validation: images"
    epoch = 64_000 / 400
    assert found["idle_share"] == pytest.approx(found["seconds"] / (epoch + found["seconds"]))
    assert found["creates_per_second"] == pytest.approx(64 * 4 / (epoch + found["seconds"]))
    assert found["requests_per_second"] == pytest.approx(2 * found["creates_per_second"])


def test_more_processes_than_were_rehearsed_divide_all_but_the_commit_and_the_log():
    few, many = end(ranks=2, processes=2), end(ranks=2, processes=64)
    found = {name: few["stages"][name] / seconds for name, seconds in many["stages"].items()}
    assert found == pytest.approx(
        {
            "commit and copy of the checkpoint": 1,
            "selection": 32,
            "reading of scores": 32,
            "log of scores": 1,
            "validation: images": 2500 / 79,
            "validation: network": 2500 / 79,
            # 50 classes and 2 of 100.
            "validation: metrics": 25,
        }
    )
    assert many["idle_share"] > few["idle_share"]
    assert many["creates_per_second"] > few["creates_per_second"]


def test_end_of_an_epoch_has_only_the_stages_of_the_run():
    without = end(num_val=0, storage=[], layout="none")
    assert set(without["stages"]) == {"commit and copy of the checkpoint"}
    assert without["creates_per_second"] == 0
    lines = "\n".join(epoch_end_lines(end(processes=8)))
    assert "end of an epoch with 8 processes" in lines
    assert "create a file" in lines
