"""The selection against a brute-force sort, with ties, any order of chunks, and classes at the extremes."""

import json
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bigscl.selection.ranking import SAMPLE_SCORES, given_first, select
from bigscl.selection.thresholds import Thresholds, expected_counts
from bigscl.store import Annotations
from bigscl.store.transport import SingleProcess
from tests.test_bigscl.test_loss_state import ThreadGroup, ThreadRank


def brute_force(ids, scores, num_expected):
    """Expected positives bool [N,L]: each class sorted by falling score, then rising id, and cut."""
    expected = np.zeros(scores.shape, dtype=bool)
    for i, count in enumerate(num_expected):
        order = sorted(range(len(ids)), key=lambda n: (-float(scores[n, i]), ids[n]))
        expected[order[:count], i] = True
    return expected


def in_chunks(ids, scores, size):
    return [(ids[start : start + size], scores[start : start + size]) for start in range(0, len(ids), size)]


def selected(selection, ids, scores):
    """The expected positives, the same by numpy and by torch."""
    expected = selection.expected(scores, ids)
    moved = selection.to("cpu").expected(torch.from_numpy(scores), torch.from_numpy(ids))
    assert np.array_equal(moved.numpy(), expected)
    return expected


@st.composite
def samples(draw):
    """Up to 60 samples in any order, ids with gaps, 1 to 5 classes, scores with many ties or none."""
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    num_samples, num_classes = draw(st.integers(0, 60)), draw(st.integers(1, 5))
    ids = rng.permutation(3 * num_samples)[:num_samples]
    levels = draw(st.sampled_from([1, 2, 3, 10, 10_000]))
    scores = rng.integers(0, levels, (num_samples, num_classes)) / max(1, levels - 1)
    num_expected = rng.integers(0, num_samples + 5, num_classes)
    return ids, scores.astype(np.float16), num_expected, draw(st.integers(1, 70))


@settings(max_examples=200, deadline=None)
@given(drawn=samples())
def test_selection_equals_a_brute_force_sort(drawn):
    ids, scores, num_expected, chunk = drawn
    selection = select(in_chunks(ids, scores, chunk), num_expected, SingleProcess())
    assert np.array_equal(selected(selection, ids, scores), brute_force(ids, scores, num_expected))


@settings(max_examples=60, deadline=None)
@given(drawn=samples(), data=st.data())
def test_ranks_find_what_a_brute_force_sort_of_all_samples_gives(drawn, data):
    """With ties, pseudo-positives, given ones first, counted positives, and ranks without samples."""
    ids, scores, num_expected, chunk = drawn
    random = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    world_size = data.draw(st.integers(1, 4))
    options = {}
    if data.draw(st.booleans()):
        options["num_pseudo_positives"] = random.integers(0, num_expected + 1)
    annotations = None
    if data.draw(st.booleans()):
        num_rows, num_classes = 3 * max(1, len(ids)), scores.shape[1]
        given_classes = [np.flatnonzero(random.random(num_classes) < 0.3).tolist() for _ in range(num_rows)]
        annotations = Annotations.of(given_classes, num_classes, rows_per_shard=num_rows)
        options["annotations"] = annotations
    how = {
        "sample_scores": data.draw(st.sampled_from([0, 40, SAMPLE_SCORES])),
        "gather_keys": data.draw(st.sampled_from([0, 3, 2**17])),
    }
    owners = random.integers(0, world_size, len(ids))
    group = ThreadGroup(world_size)

    def select_on(rank):
        mine = owners == rank
        chunks = in_chunks(ids[mine], scores[mine], chunk)
        chunks = chunks if annotations is None else given_first(chunks, annotations)
        return select(chunks, num_expected, ThreadRank(group, rank), **options, **how)

    is_given = np.zeros(scores.shape, bool) if annotations is None else annotations.of_rows(ids)
    ranked = np.where(is_given, np.float16(1), scores)
    expected = brute_force(ids, ranked, num_expected)
    first, *others = group.run(select_on)
    assert all(other.to_json() == first.to_json() for other in others)
    for found in (first, *others):
        assert np.array_equal(found.expected(ranked, ids), expected)
        if "num_pseudo_positives" in options:
            fewer = brute_force(ids, ranked, options["num_pseudo_positives"])
            assert np.array_equal(found.pseudo_positives.expected(ranked, ids), fewer)
        if annotations is None:
            assert found.positives is None
        else:
            # Of the images with a label of a class, how many classes are given or expected.
            given_rows = annotations.of_rows(np.arange(annotations.num_rows))
            positives = given_rows.copy()
            positives[ids] |= expected
            assert found.positives.tolist() == (given_rows * positives.sum(1, keepdims=True)).sum(0).tolist()


@pytest.mark.parametrize("sample_scores", [1, SAMPLE_SCORES])
@pytest.mark.parametrize("order", ["rising", "falling", "shuffled"])
@pytest.mark.parametrize("kind", ["all equal", "all zero", "two values", "rising", "random"])
def test_selection_is_exact_when_most_samples_are_ruled_out_early(kind, order, sample_scores):
    num_samples, num_classes = 8000, 40
    rng = np.random.default_rng(7)
    scores = {
        "all equal": np.full((num_samples, num_classes), 0.7),
        "all zero": np.zeros((num_samples, num_classes)),
        "two values": rng.integers(0, 2, (num_samples, num_classes)) * 0.5,
        "rising": np.repeat(np.linspace(0, 1, num_samples)[:, None], num_classes, 1),
        "random": rng.random((num_samples, num_classes)) ** 4,
    }[kind].astype(np.float16)
    ids = np.arange(num_samples) * 3 + 1
    visits = {
        "rising": np.arange(num_samples),
        "falling": np.arange(num_samples)[::-1],
        "shuffled": rng.permutation(num_samples),
    }[order]
    numbers = [0, 1, 17, 300, num_samples - 1, num_samples, 2 * num_samples, *[2**n for n in range(9)]]
    num_expected = np.resize(numbers, num_classes)
    chunks = in_chunks(ids[visits], scores[visits], 700)
    selection = select(chunks, num_expected, SingleProcess(), sample_scores=sample_scores)
    # Rank by sorting: equal scores keep the order of their ids.
    ranks = np.argsort(np.argsort(-scores.astype(np.float32), axis=0, kind="stable"), axis=0)
    assert np.array_equal(selected(selection, ids, scores), ranks < num_expected)


def test_without_samples_or_positives_nothing_is_decided():
    empty = select([], np.array([0, 3]), SingleProcess())
    scores = np.array([[1.0, 0.0]], np.float16)
    assert empty.expected(scores, np.array([0])).tolist() == [[False, True]]
    assert not Thresholds.none(2).expected(scores, np.array([0])).any()


def test_negative_zero_ranks_as_zero():
    scores = np.array([[0.0], [-0.0], [0.0]], np.float16)
    selection = select([(np.arange(3), scores)], np.array([2]), SingleProcess())
    assert selected(selection, np.arange(3), scores)[:, 0].tolist() == [True, True, False]


@pytest.mark.parametrize("value", [np.nan, -0.5, 1.001, np.inf])
def test_a_score_that_is_no_probability_is_refused_by_name(value):
    scores = np.full((3, 2), 0.5, np.float16)
    scores[1, 1] = value
    with pytest.raises(ValueError, match=r"sample 41 has .*expected 0 to 1"):
        select([(np.arange(40, 43), scores)], np.array([1, 1]), SingleProcess())


@pytest.mark.parametrize(
    ("ids", "scores"),
    [
        (np.arange(2), np.zeros((2, 3), np.float16)),
        (np.arange(2), np.zeros((2, 2), np.float32)),
        (np.array([-1, 0]), np.zeros((2, 2), np.float16)),
        (np.array([0, 2**60]), np.zeros((2, 2), np.float16)),
    ],
)
def test_chunks_that_do_not_fit_are_refused(ids, scores):
    with pytest.raises(ValueError, match="expected"):
        select([(ids, scores)], np.array([1, 1]), SingleProcess())


def test_selection_survives_json_bit_for_bit():
    rng = np.random.default_rng(3)
    scores = rng.random((500, 40)).astype(np.float16)
    selection = select([(np.arange(500), scores)], np.resize([0, 1, 30, 900], 40), SingleProcess())
    again = Thresholds.from_json(json.loads(json.dumps(selection.to_json(), allow_nan=False)))
    assert again.same_as(selection)
    assert (again.score.dtype, again.tie_id.dtype) == (np.float16, np.int64)
    with pytest.raises(ValueError, match="1 values of score but 2"):
        Thresholds.from_json({"score": [0.5], "tie_id": [1, 2]})


def test_expected_counts_round_k_times_the_annotated():
    assert expected_counts(np.array([0, 1, 3, 1000]), 1.2).tolist() == [0, 1, 4, 1200]


def peak_memory(num_samples, num_classes=200, chunk=1000):
    """Bytes at the peak of a selection of 50 samples per class, beyond what was held before.

    Up to `sample_scores`, memory holds the first chunks.
    """

    def chunks():
        for start in range(0, num_samples, chunk):
            rng = np.random.default_rng(start)
            yield (
                np.arange(start, start + chunk),
                rng.random((chunk, num_classes), np.float32).astype(np.float16),
            )

    tracemalloc.start()
    select(chunks(), np.full(num_classes, 50), SingleProcess(), sample_scores=2**21)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def test_memory_does_not_grow_with_the_samples():
    assert peak_memory(90_000) < 1.1 * peak_memory(30_000)
