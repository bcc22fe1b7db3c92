"""K of each class from the expected positives, and how close it comes on real label statistics."""

from pathlib import Path

import numpy as np
import pytest

from bigscl.selection.k import labelled_ratios
from bigscl.selection.ranking import (
    annotated_positives,
    at_level,
    class_ratios,
    expected_positives,
    given_first,
    select,
)
from bigscl.store import Annotations, SingleProcess
from tests.benchmarks.class_ratios import load_labels, measure


def draw(seed, num_samples=200, num_classes=6, most=3):
    random = np.random.default_rng(seed)
    positives = [
        random.choice(num_classes, random.integers(0, most + 1), replace=False) for _ in range(num_samples)
    ]
    return Annotations.of([each.tolist() for each in positives], num_classes, rows_per_shard=32), positives


def halved(ids):
    """The pairs of two ranks, which divide the samples."""
    return ids % 2 == 0, ids % 2 == 1


@pytest.mark.parametrize("seed", range(5))
def test_positives_are_counted_as_a_loop_would(seed):
    annotations, positives = draw(seed)
    random = np.random.default_rng(100 + seed)
    drawn = np.stack([random.integers(0, 200, 300), random.integers(0, 6, 300)], axis=1)
    expected = {(int(n), int(c)) for n, c in drawn}
    ids, classes = np.array(sorted(expected)).T
    slow = np.zeros(6, np.int64)
    for n, annotated in enumerate(positives):
        found = set(annotated.tolist()) | {c for m, c in expected if m == n}
        for c in annotated:
            slow[c] += len(found)
    halves = [expected_positives(annotations, ids[part], classes[part]) for part in halved(ids)]
    np.testing.assert_array_equal(annotated_positives(annotations) + sum(halves), slow)


def test_ratios_are_proportional_to_the_company_of_a_class_and_have_the_mean_k():
    counts, positives = np.array([10, 10, 20, 0]), np.array([10, 15, 40, 0])
    ratios = class_ratios(1.5, counts, positives)
    assert ratios[0] == 1
    np.testing.assert_allclose((ratios - 1)[1:3] / [0.5, 1.0], 0.8)
    np.testing.assert_allclose((ratios * counts).sum() / counts.sum(), 1.5)
    assert np.isfinite(ratios).all()


def test_ratios_of_another_level_keep_their_proportions():
    counts, positives = np.array([10, 10, 20, 0]), np.array([10, 15, 40, 0])
    moved = at_level(class_ratios(1.5, counts, positives), counts, 2.2)
    np.testing.assert_allclose(moved, class_ratios(2.2, counts, positives))
    np.testing.assert_array_equal(at_level(np.ones(4), counts, 1.7), np.full(4, 1.7))


def test_ratios_from_full_labels_are_those_of_the_training_images():
    """However labels are drawn: here the largest class number of an image is never named if there are two."""
    random = np.random.default_rng(0)
    shown = random.random((1000, 5)) < [0.6, 0.3, 0.2, 0.1, 0.02]
    named = np.array([row.argmax() if row.any() else -1 for row in shown])
    counts = np.bincount(named[named >= 0], minlength=5)
    found = labelled_ratios(shown.mean(0), counts, len(shown))
    np.testing.assert_allclose(found, shown.sum(0) / counts)
    np.testing.assert_array_equal(labelled_ratios(np.array([0.1, 0.5]), np.array([50, 0]), 100), [1, 1])


def test_without_expected_positives_every_class_has_k():
    counts = np.array([3, 5])
    np.testing.assert_array_equal(class_ratios(1.7, counts, counts), [1.7, 1.7])
    np.testing.assert_array_equal(class_ratios(1.0, counts, counts + 4), [1.0, 1.0])


def test_annotated_positives_come_first_and_are_counted_with_the_others():
    annotations, positives = draw(7)
    random = np.random.default_rng(7)
    values = random.random((len(annotations.given), 6)).astype(np.float16)
    ids = np.arange(200)
    chunks = [(part, values[part]) for part in np.array_split(ids, 7)]
    num_expected = 2 * annotations.counts()
    cuts = select(given_first(chunks, annotations), num_expected, SingleProcess(), annotations=annotations)
    forced = values[ids].astype(np.float64)
    for n, annotated in enumerate(positives):
        forced[n, annotated] = 1
    slow = np.zeros(6, np.int64)
    chosen = np.zeros((200, 6), bool)
    for c in range(6):
        order = np.lexsort((ids, -forced[:, c]))[: num_expected[c]]
        chosen[order, c] = True
    for n, annotated in enumerate(positives):
        assert chosen[n, annotated].all()
        slow[annotated] += chosen[n].sum()
    np.testing.assert_array_equal(cuts.positives, slow)
    assert (values <= 1).all(), "what is ranked is a copy"


LABELS = load_labels(Path(__file__).parents[3] / "shared" / "data")


@pytest.mark.skipif(not LABELS, reason="the label files are not here")
@pytest.mark.parametrize("name", LABELS)
def test_on_real_labels_k_of_each_class_is_closer_than_one_k_for_all(name):
    """With a memory that separates well: the statistics of the labels are real, the scores are simulated."""
    labels = LABELS[name][:8000]
    one, precision, recall = measure(labels, 0, 4.0, per_class=False, epochs=4)
    error, better_precision, better_recall = measure(labels, 0, 4.0, per_class=True, epochs=4)
    assert error < 0.5 * one
    assert better_precision > precision
    assert better_recall > recall
