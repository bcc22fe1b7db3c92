"""Comparisons: bootstrap figures equal those of the resampled sets themselves, and runs must match."""

from dataclasses import replace

import numpy as np
import pytest
from sklearn.metrics import average_precision_score, f1_score

from bigscl.evaluation.compare import align, compare, limits, resampled_maps
from bigscl.evaluation.main_metrics import METRICS, draw_counts
from bigscl.evaluation.report import score
from tests.test_bigscl.test_report import problem, saved


def resampled(images, counts):
    """Every main metric of every resample."""
    return {name: metric.resampled(images, counts) for name, metric in METRICS.items()}


def test_bootstrap_figures_equal_scikit_learn_on_each_resampled_set():
    logits, labels = problem(num_images=60, num_classes=6)
    labels[:, 5] = 0
    labels[0, 5] = 1  # many resamples lack this one
    predictions = saved(logits, labels)
    counts = draw_counts(60, 15, 0)
    figures = resampled(score(predictions), counts)
    assert (counts.sum(0) == 60).all()
    for place, count in enumerate(counts.T):
        rows = np.repeat(np.arange(60), count)
        truth, scores = labels[rows], logits[rows].astype(np.float64)
        present = truth.any(0)
        expected = average_precision_score(truth[:, present], scores[:, present])
        assert figures["map"][place] == pytest.approx(expected)
        assert figures["f1"][place] == pytest.approx(f1_score(truth, scores >= 0, average="micro"))
        images = truth.any(1)
        by_image = average_precision_score(truth[images], scores[images], average="samples")
        assert figures["image_ap"][place] == pytest.approx(by_image)
        best = truth[np.arange(60), predictions.ranked[rows, 0]]
        assert figures["top1"][place] == pytest.approx(best.sum() / truth.any(1).sum())


def test_unknown_pairs_count_in_no_resample():
    logits, labels = problem(num_images=50, num_classes=1, seed=3)
    known = np.flatnonzero(np.arange(50) % 3)
    labels[np.arange(50) % 3 == 0] = -1
    # A second class that is known to be nowhere: images of which nothing is known are left out altogether.
    logits = np.column_stack([logits, np.full(50, -99, logits.dtype)])
    labels = np.column_stack([labels, np.zeros(50, labels.dtype)])
    counts = draw_counts(50, 10, 0)
    found = resampled(score(saved(logits, labels)), counts)
    alone = resampled(score(saved(logits[known], labels[known])), counts[known])
    assert found["map"] == pytest.approx(alone["map"], nan_ok=True)
    assert found["f1"] == pytest.approx(alone["f1"], nan_ok=True)
    assert found["image_ap"] == pytest.approx(alone["image_ap"], nan_ok=True)


def test_resamples_depend_on_the_seed_alone():
    assert np.array_equal(draw_counts(100, 5, 7), draw_counts(100, 5, 7))
    assert not np.array_equal(draw_counts(100, 5, 7), draw_counts(100, 5, 8))


def test_a_better_run_is_beyond_chance_and_an_equal_one_is_not():
    logits, labels = problem(num_images=500)
    better = (logits + 2 * labels).astype(np.float16)
    # Less than the distance of two logits: ties are broken, and nothing else.
    noise = np.random.default_rng(5).normal(0, 0.01, (2, *logits.shape))
    runs = [logits + noise[0], better, logits + noise[1]]
    first, second, third = compare([saved(run, labels) for run in runs], num_resamples=100)
    assert (first.figures["map"].low, first.figures["map"].high) == (0.0, 0.0)
    assert first.changes == []
    for name in ("map", "image_ap", "top1", "f1"):
        change = second.figures[name]
        assert 0 < change.low < change.difference < change.high
        assert change.value == pytest.approx(first.figures[name].value + change.difference)
    assert third.figures["map"].low < 0 < third.figures["map"].high


def test_classes_that_changed_most_are_listed_from_gain_to_loss():
    logits, labels = problem(num_images=300)
    changed = logits.copy()
    changed[:, 4] = np.where(labels[:, 4], 9, -9)
    changed[:, 7] = np.where(labels[:, 7], -9, 9)
    changed[0, 2] += np.float16(0.3)
    _, other = compare([saved(logits, labels), saved(changed, labels)], num_resamples=10, num_classes=2)
    assert [change.name for change in other.changes] == ["class4", "class7"]
    assert other.changes[0].after == 1.0
    assert other.changes[1].after < other.changes[1].before


def test_runs_are_matched_by_key_whatever_their_order():
    logits, labels = problem(num_images=40)
    order = np.random.default_rng(0).permutation(40)
    shuffled = saved(logits[order], labels[order], keys=[f"image{n}" for n in order])
    _, other = compare([saved(logits, labels), shuffled], num_resamples=10)
    assert other.figures["map"].difference == pytest.approx(0)
    assert (other.figures["map"].low, other.figures["map"].high) == (0.0, 0.0)


def test_resampled_maps_of_runs_are_paired_whatever_their_order():
    logits, labels = problem(num_images=200)
    better = saved((logits + labels).astype(np.float16), labels)
    order = np.random.default_rng(0).permutation(200)
    shuffled = saved(logits[order], labels[order], keys=[f"image{n}" for n in order])
    _, other = compare([saved(logits, labels), better], num_resamples=50, seed=3)
    maps = [resampled_maps(run, num_resamples=50, seed=3) for run in (better, shuffled)]
    expected = (other.figures["map"].low, other.figures["map"].high)
    assert limits(maps[0] - maps[1]) == pytest.approx(expected)


def test_runs_on_other_images_classes_or_labels_are_refused():
    logits, labels = problem(num_images=10)
    run = saved(logits, labels)
    for other, complaint in [
        (saved(logits[1:], labels[1:], keys=[f"image{n}" for n in range(1, 10)]), "differ in image0"),
        (replace(run, class_names=tuple("abcdefghijkl")), "different classes"),
        (replace(run, labels=1 - run.labels), "different labels"),
    ]:
        with pytest.raises(ValueError, match=complaint):
            align([run, other])
