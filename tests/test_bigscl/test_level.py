"""The level K, estimated from remembered scores: against a loop over thresholds, and where it is known."""

import math

import numpy as np
import pytest

from bigscl.method.class_histograms import EDGES
from bigscl.method.level import DELTA, LARGEST, LOWEST, TAU, estimate_level
from bigscl.store import Annotations, SingleProcess

MOMENTUM = 0.8


class Together:
    """A group whose ranks are called one after the other: their parts are gathered at the last one."""

    def __init__(self, parts, rank):
        self.parts, self.rank, self.world_size = parts, rank, 1

    def gather(self, payload):
        self.parts.append(payload)
        return self.parts

    def broadcast(self, payload):
        return payload


def memory_of(seed, *, num_images=600, num_classes=5, separation=3.0, most=3):
    """(annotations, scores, visits, full labels): one label drawn for each image, 0 to 4 visits."""
    random = np.random.default_rng(seed)
    full = np.zeros((num_images, num_classes), bool)
    for labels in full:
        labels[random.choice(num_classes, random.integers(1, most + 1), replace=False)] = True
    observed = np.where(full, random.random(full.shape), -1).argmax(1)
    annotations = Annotations.of(observed[:, None].tolist(), num_classes, rows_per_shard=num_images)
    seen = 1 / (1 + np.exp(-random.normal(-3, 1, full.shape) - separation * full))
    visits = random.integers(0, 5, num_images)
    left = MOMENTUM ** visits[:, None]
    scores = left * (np.arange(num_classes) == observed[:, None]) + (1 - left) * seen
    return annotations, scores.astype(np.float16), visits, full


def chunks_of(scores, visits, size=100):
    remaining = (MOMENTUM**visits).astype(np.float32)
    ids = np.arange(len(scores))
    return [(ids[n : n + size], scores[n : n + size], remaining[n : n + size]) for n in ids[::size]]


def slow_level(annotations, scores, visits):
    """Garg et al.'s estimator for each class, threshold by threshold."""
    total = 0.0
    rows = np.flatnonzero(visits)
    for c in range(scores.shape[1]):
        values, named = [], []
        for n in rows:
            is_named = annotations.classes[n] == c
            left = np.float32(MOMENTUM ** visits[n])
            value = (np.float32(scores[n, c]) - left * is_named) / (1 - left)
            value = max(value, np.float32(0))
            values.append(np.float16(value) if is_named or value >= LOWEST else 0)
            named.append(is_named)
        values, named = np.array(values), np.array(named)
        slack = sum(math.sqrt(math.log(4 / DELTA) / 2 / n) for n in (len(values), named.sum()))
        bounds = []
        for z in EDGES:
            q, p = (values >= z).mean(), (values[named] >= z).mean()
            if p:
                bounds.append(((q + (1 + TAU) * slack) / p, q / p))
        total += max(min(bounds, key=lambda bound: bound[0])[1] * len(values), named.sum())
    return total / len(rows)


@pytest.mark.parametrize("seed", range(3))
def test_the_level_is_that_of_a_loop_over_thresholds(seed):
    annotations, scores, visits, _ = memory_of(seed)
    found = estimate_level(chunks_of(scores, visits), annotations, SingleProcess())
    assert found == pytest.approx(slow_level(annotations, scores, visits), rel=0.01)


@pytest.mark.parametrize("world_size", [2, 3, 7])
def test_the_level_is_the_same_for_any_division_of_the_samples(world_size):
    annotations, scores, visits, _ = memory_of(1)
    whole = estimate_level(chunks_of(scores, visits), annotations, SingleProcess())
    parts = []
    for rank in range(world_size):
        chunks = chunks_of(scores, visits, 37)[rank::world_size]
        found = estimate_level(chunks, annotations, Together(parts, rank))
    assert found == whole
    assert len(parts) == world_size


def test_where_scores_tell_present_from_absent_the_level_is_the_true_one():
    annotations, scores, visits, full = memory_of(0, num_images=6000, separation=8.0)
    found = estimate_level(chunks_of(scores, visits), annotations, SingleProcess())
    assert found == pytest.approx(full.sum() / len(full), rel=0.03)


def test_what_is_left_of_initial_scores_is_taken_out():
    """With it, every named image scores above all others after few visits, and K would be 1."""
    annotations, scores, visits, full = memory_of(0, separation=8.0)
    few = np.minimum(visits, 2)
    left = MOMENTUM ** few[:, None]
    named = np.eye(5)[annotations.classes]
    seen = (scores - MOMENTUM ** visits[:, None] * named) / np.maximum(1 - MOMENTUM ** visits[:, None], 0.1)
    scores = np.clip(left * named + (1 - left) * seen, 0, 1).astype(np.float16)
    found = estimate_level(chunks_of(scores, few), annotations, SingleProcess())
    assert found == pytest.approx(full.sum() / len(full), rel=0.1)
    ignored = chunks_of(scores, np.full(len(few), 10**6))
    assert estimate_level(ignored, annotations, SingleProcess()) < 1.1


def test_a_network_that_separates_nothing_does_not_expect_everything():
    annotations, _, visits, _ = memory_of(0)
    equal = np.full((600, 5), 0.5, np.float16)
    assert estimate_level(chunks_of(equal, visits * 0 + 50), annotations, SingleProcess()) == 3.0
    many = Annotations.of([[n % 40] for n in range(600)], 40, rows_per_shard=600)
    equal = np.full((600, 40), 0.5, np.float16)
    assert estimate_level(chunks_of(equal, visits * 0 + 50), many, SingleProcess()) == LARGEST


def test_nothing_seen_expects_nothing():
    annotations, scores, visits, _ = memory_of(0)
    assert estimate_level(chunks_of(scores, visits * 0), annotations, SingleProcess()) == 1.0
    assert estimate_level([], annotations, SingleProcess()) == 1.0
