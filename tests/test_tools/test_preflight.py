"""How `bigscl preflight` judges what was measured; tests/integration has real rehearsals."""

from types import SimpleNamespace

import pytest

from bigscl.tools.shared import rehearsal_report

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
