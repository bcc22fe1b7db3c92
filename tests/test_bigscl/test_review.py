"""Ranking for people: questions, their chances, the shortlist, doubtful labels; against slow references."""

import math
import statistics
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

import bigscl
from bigscl.evaluation import review
from bigscl.evaluation.review import (
    By,
    Pairs,
    area_under_curve,
    best_without_answers,
    chances,
    next_questions,
    rank,
    score_history,
    suspicion,
    worth,
)
from bigscl.memory.score_history import pair_type

NOTHING = np.empty(0, bool)


def some_pairs(count, seed=0, images=8, classes=4):
    random = np.random.default_rng(seed)
    confidence = random.random(count).astype(np.float32)
    return Pairs(
        ids=random.integers(0, images, count),
        classes=random.integers(0, classes, count),
        scores=random.random(count).astype(np.float32),
        confidence=confidence,
        labelled=random.random(count) < 0.3,
        expected=random.random(count) < 0.4,
    )


def test_without_answers_the_chance_of_a_missing_label_is_its_confidence():
    pairs = some_pairs(200)
    found = chances(pairs, Pairs.none(), NOTHING)
    np.testing.assert_allclose(
        found[~pairs.labelled], pairs.confidence[~pairs.labelled].clip(0.001, 0.999), rtol=1e-5
    )
    named = pairs.labelled
    assert (np.argsort(-found[named]) == np.argsort(pairs.confidence[named])).all()
    assert (found[named] < 1 - pairs.confidence[named]).all()


def slow_shift(odds, corrects, start, trust):
    """The most likely shift of a group by bisection of the slope."""

    def slope(shift):
        return sum(y - 1 / (1 + np.exp(-(x + shift))) for x, y in zip(odds, corrects, strict=True)) - (
            trust / 4 * (shift - start)
        )

    low, high = -30.0, 30.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if slope(middle) > 0 else (low, middle)
    return low


def log_odds(pairs):
    likely = pairs.confidence.astype(float).clip(0.001, 0.999)
    likely = np.where(pairs.labelled, 1 - likely, likely)
    return np.log(likely / (1 - likely))


@pytest.mark.parametrize("seed", range(5))
def test_answers_shift_the_chances_of_their_class_or_of_all_labels_most_likely(seed):
    pairs, told = some_pairs(50, seed), some_pairs(40, seed + 100)
    yes = np.random.default_rng(seed).random(40) < 0.6
    found = chances(pairs, told, yes)
    labels = np.log(review.WRONG_LABEL / (1 - review.WRONG_LABEL))
    groups = [(one.classes * 0 - 1) * one.labelled + one.classes * ~one.labelled for one in (pairs, told)]
    for group in range(-1, 4):
        start, trust = (labels, review.TRUST_LABELS) if group < 0 else (0.0, review.TRUST)
        own, asked = groups[1] == group, groups[0] == group
        shift = slow_shift(log_odds(told)[own], (yes != told.labelled)[own], start, trust)
        expected = 1 / (1 + np.exp(-(log_odds(pairs)[asked] + shift)))
        np.testing.assert_allclose(found[asked], expected, rtol=1e-4)


def test_cold_labels_are_tried_and_their_answers_decide():
    warm = np.full(10, 0.1, np.float32)
    ids = np.arange(10)
    pairs = Pairs(
        ids=ids,
        classes=ids % 3,
        scores=warm,
        confidence=warm,
        labelled=np.ones(10, bool),
        expected=np.zeros(10, bool),
    )
    before = chances(pairs, Pairs.none(), NOTHING)[0]
    right, wrong = (chances(pairs, pairs.take(ids[:3]), np.full(3, yes))[0] for yes in (True, False))
    assert wrong > before > 0.5 > right


def slow_order(values, pairs, asked):
    """The same discounts, counted one by one."""
    by_value = sorted(range(len(values)), key=lambda place: -values[place])
    counted = {}
    for turn, place in enumerate(by_value):
        before = by_value[:turn]
        images = (
            sum(pairs.ids[one] == pairs.ids[place] for one in before) + (asked.ids == pairs.ids[place]).sum()
        )
        same = sum(pairs.classes[one] == pairs.classes[place] for one in before)
        same += (asked.classes == pairs.classes[place]).sum()
        counted[place] = values[place] * review.AGAIN**images * (review.ENOUGH + same) ** -review.SPREAD
    return sorted(by_value, key=lambda place: -counted[place])


@pytest.mark.parametrize("seed", range(5))
def test_questions_are_spread_over_images_and_classes(seed):
    pairs, asked = some_pairs(60, seed), some_pairs(20, seed + 50, images=12, classes=6)
    values = np.random.default_rng(seed).random(60).round(2)
    order = rank(values, pairs, asked)
    assert order.tolist() == slow_order(values, pairs, asked)
    assert rank(values, pairs, asked, most=7).tolist() == order[:7].tolist()
    assert rank(np.empty(0), Pairs.none(), asked).tolist() == []
    assert rank(values, pairs, Pairs.none()).tolist() == slow_order(values, pairs, Pairs.none())


@pytest.mark.parametrize("by", get_args(By))
def test_the_best_of_each_class_and_kind_can_come_up(by):
    pairs = some_pairs(100)
    chance = chances(pairs, Pairs.none(), NOTHING)
    values = worth(pairs, chance) if by == "queue" else chance
    expected = []
    for number in range(4):
        for named in (False, True):
            own = np.flatnonzero((pairs.classes == number) & (pairs.labelled == named))
            expected += sorted(own, key=lambda place: (-values[place], place))[:3]
    assert best_without_answers(pairs, by, 3).tolist() == sorted(expected)


def gradient(logit, state):
    """Of the loss of one class by autograd: a label, nothing, or what EN makes of an unknown one."""
    if state == "left out":
        return 0.0
    value = torch.tensor(logit, dtype=torch.float64, requires_grad=True)
    log_f = torch.nn.functional.logsigmoid
    (-log_f(value) if state == "positive" else -log_f(-value)).backward()
    return value.grad.item()


def test_worth_is_the_expected_change_of_the_gradient_of_en():
    pairs = some_pairs(60)
    chance = np.random.default_rng(3).random(60)
    for place, found in enumerate(worth(pairs, chance)):
        score = float(pairs.scores[place])
        logit = np.log(score / (1 - score))
        named, expected = bool(pairs.labelled[place]), bool(pairs.expected[place])
        now = gradient(logit, "positive" if named else "left out" if expected else "negative")
        changes = {
            yes: abs(gradient(logit, "positive" if yes else "negative") - now) for yes in (True, False)
        }
        present = 1 - chance[place] if named else chance[place]
        assert found == pytest.approx(present * changes[True] + (1 - present) * changes[False], abs=1e-6)


def test_without_expected_positives_worth_is_the_chance():
    pairs = replace(some_pairs(30), expected=np.zeros(30, bool))
    chance = np.random.default_rng(1).random(30)
    np.testing.assert_array_equal(worth(pairs, chance), chance)


@pytest.mark.parametrize("by", get_args(By))
def test_next_questions_follow_the_answers(by):
    pairs, told = some_pairs(60), some_pairs(20, 1)
    yes = np.random.default_rng(0).random(20) < 0.5
    order, likely = next_questions(pairs, told, yes, most=9, by=by)
    np.testing.assert_array_equal(likely, chances(pairs, told, yes))
    values = worth(pairs, likely) if by == "queue" else likely
    assert order.tolist() == rank(values, pairs, told, most=9).tolist()


# Doubtful labels

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
def test_score_history_is_mean_spread_and_last_of_each_pair(problem, monkeypatch, block):
    epochs, annotations, named = problem
    monkeypatch.setattr(review, "BLOCK", block)
    found = score_history(epochs, annotations, np.arange(NUM_IMAGES))
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
        assert found.labelled[place] == (pair[1] in named[pair[0]])


def test_suspicion_is_what_the_score_of_a_named_class_lacks_or_the_score_of_another(problem):
    epochs, annotations, _ = problem
    found = score_history(epochs, annotations, np.arange(NUM_IMAGES))
    for place, value in enumerate(suspicion(found)):
        mean = found.mean[place]
        assert value == pytest.approx(1 - mean if found.labelled[place] else mean)


def test_an_image_without_any_heat_has_wrong_labels_only():
    pairs = np.zeros((1, 2), pair_type(2))
    pairs["class"] = [0, 1]
    found = score_history([pairs], bigscl.Annotations.of([[1]], 2), np.arange(1))
    assert suspicion(found).tolist() == [0.0, 1.0]


def test_area_under_the_curve_equals_scikit_learn():
    random = np.random.default_rng(1)
    for digits in (1, 8):
        values, truth = random.random(500).round(digits), random.random(500) < 0.1
        assert area_under_curve(values, truth) == pytest.approx(roc_auc_score(truth, values))
    assert math.isnan(area_under_curve(np.arange(3.0), np.zeros(3, bool)))
