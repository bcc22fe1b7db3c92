"""The audit's figures: against slow references and scikit-learn."""

import math
import statistics

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

import bigscl
from bigscl.evaluation import audit
from bigscl.evaluation.audit import area_under_curve, suspicion, warmth
from bigscl.memory.score_history import pair_type

NUM_CLASSES, NUM_IMAGES, NUM_EPOCHS = 6, 40, 5


@pytest.fixture
def problem():
    """Epochs of four classes and scores of each image, and annotations with one class each."""
    random = np.random.default_rng(0)
    named = [[int(random.integers(NUM_CLASSES - 1))] for _ in range(NUM_IMAGES)]
    epochs = []
    for _ in range(NUM_EPOCHS):
        pairs = np.empty((NUM_IMAGES, 4), pair_type(NUM_CLASSES))
        for n, (own,) in enumerate(named):
            others = random.permutation([c for c in range(NUM_CLASSES) if c != own])[:3]
            pairs["class"][n] = sorted([own, *others])
        pairs["score"] = random.random(pairs.shape)
        epochs.append(pairs)
    return epochs, bigscl.Annotations.of(named, NUM_CLASSES, rows_per_shard=NUM_IMAGES), named


@pytest.mark.parametrize("block", [7, 8192])
def test_warmth_is_mean_spread_and_last_of_each_pair(problem, monkeypatch, block):
    epochs, annotations, named = problem
    monkeypatch.setattr(audit, "BLOCK", block)
    found = warmth(epochs, annotations, np.arange(NUM_IMAGES))
    expected = {}
    for n in range(NUM_IMAGES):
        for number in range(NUM_CLASSES):
            went = [
                dict(zip(pairs[n]["class"].tolist(), pairs[n]["score"].tolist(), strict=True)).get(number)
                for pairs in epochs
            ]
            if any(score is not None for score in went):
                expected[n, number] = [score or 0.0 for score in went]
    pairs = list(zip(found.ids.tolist(), found.classes.tolist(), strict=True))
    assert pairs == sorted(expected)
    for place, pair in enumerate(pairs):
        assert found.mean[place] == pytest.approx(statistics.fmean(expected[pair]))
        assert found.spread[place] == pytest.approx(statistics.pstdev(expected[pair]), abs=1e-7)
        assert found.last[place] == expected[pair][-1]
        assert found.named[place] == (pair[1] in named[pair[0]])


def test_suspicion_is_what_the_score_of_a_named_class_lacks_or_the_score_of_another(problem):
    epochs, annotations, _ = problem
    found = warmth(epochs, annotations, np.arange(NUM_IMAGES))
    for place, value in enumerate(suspicion(found)):
        mean = found.mean[place]
        assert value == pytest.approx(1 - mean if found.named[place] else mean)


def test_an_image_without_any_heat_has_wrong_labels_only():
    pairs = np.zeros((1, 2), pair_type(2))
    pairs["class"] = [0, 1]
    found = warmth([pairs], bigscl.Annotations.of([[1]], 2), np.arange(1))
    assert suspicion(found).tolist() == [0.0, 1.0]


def test_area_under_the_curve_equals_scikit_learn():
    random = np.random.default_rng(1)
    for digits in (1, 8):
        values, truth = random.random(500).round(digits), random.random(500) < 0.1
        assert area_under_curve(values, truth) == pytest.approx(roc_auc_score(truth, values))
    assert math.isnan(area_under_curve(np.arange(3.0), np.zeros(3, bool)))
