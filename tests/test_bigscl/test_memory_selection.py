"""What the memory selects: by scores or by heatmaps too, with one K or one for each class."""

import numpy as np
import pytest
import torch

from bigscl.config import StoreConfig
from bigscl.distributed.ranks import process_group
from bigscl.memory.heatmaps import spatial_score
from bigscl.memory.memory import Memory, MemoryStart
from bigscl.selection.ranking import at_level, class_ratios, selection_rule
from bigscl.store import Answered, StoreError, with_answers
from tests.test_bigscl.test_memory import (
    ANNOTATIONS,
    IDS,
    SIDE,
    K,
    batches_of,
    learn,
    open_memory,
    rows_at,
    train_epoch,
)
from tests.test_store.conftest import assert_same_rows

ANNOTATED = np.zeros((len(ANNOTATIONS.given), 7), bool)
for row in range(len(ANNOTATED)):
    ANNOTATED[row, ANNOTATIONS.given[row]] = True

RULES = {
    "per class": {"k_per_class": True},
    "both": {"rank_by": "spatial", "k_per_class": True},
    "given per class": {"k_per_class": np.array([1.0, 2, 1.5, 1, 4, 1, 2])},
    "pseudo-positives": {"rank_by": "spatial", "pseudo_positive_share": 0.5},
}


def slow_selection(values, num_expected):
    """Which samples [n,L] are expected: for each class the best by (value, lowest id), annotated first."""
    values = values.astype(np.float64)
    values[ANNOTATED[IDS]] = 1
    chosen = np.zeros(values.shape, bool)
    for c in range(values.shape[1]):
        chosen[np.lexsort((IDS, -values[:, c]))[: num_expected[c]], c] = True
    return chosen


def evidence_ranking(rows, momentum=0.8):
    """The ranking of stored rows, from the formulas."""
    classes = None if rows.classes is None else rows.classes.astype(np.int64)
    annotated = ANNOTATED[IDS]
    kept = annotated if classes is None else np.take_along_axis(annotated, classes, 1)
    start = kept[:, :, None, None] * momentum ** rows["cell_visits"][:, None].astype(np.float64)
    heat = np.maximum(rows.heatmaps.astype(np.float64) - start, 0)
    found = spatial_score(
        torch.from_numpy(rows.scores),
        torch.from_numpy(heat),
        torch.from_numpy(annotated),
        None if classes is None else torch.from_numpy(classes),
    ).numpy()
    if classes is None:
        return found
    values = rows.scores.copy()
    np.put_along_axis(values, classes, found, 1)
    return values


@pytest.mark.parametrize("settings", [{}, {"top": 4, "compact_after": 1}], ids=["dense", "topk"])
def test_spatial_ranking_is_written_with_each_update_and_decides_what_is_expected(tmp_path, settings):
    with open_memory(tmp_path / "store", rank_by="spatial", settings=settings) as memory:
        for _ in range(3):
            train_epoch(memory)
            memory.end_epoch()
        rows = rows_at(tmp_path / "store")
        np.testing.assert_allclose(rows.ranked_by(), evidence_ranking(rows), atol=2e-3)
        assert (rows.ranked_by()[ANNOTATED[IDS]] == 1).all()
        expected = slow_selection(rows.ranked_by(), np.rint(K * ANNOTATIONS.counts()).astype(int))
        found = np.concatenate([memory.lookup(ids).expected for ids in batches_of(IDS)])
        np.testing.assert_array_equal(found, expected)


def test_k_of_each_class_is_that_of_the_selection_before(tmp_path):
    with open_memory(tmp_path / "store", k_per_class=True) as memory:
        ratios = np.full(7, K)
        for epoch in range(3):
            train_epoch(memory)
            memory.end_epoch()
            rows = rows_at(tmp_path / "store")
            counts = ANNOTATIONS.counts()
            expected = slow_selection(rows.scores, np.rint(ratios * counts).astype(int))
            positives = np.array([expected[ANNOTATED[IDS][:, c]].sum() for c in range(7)])
            ratios = class_ratios(K, counts, positives)
            np.testing.assert_allclose(memory.class_ratios, ratios)
            found = np.concatenate([memory.lookup(ids).expected for ids in batches_of(IDS)])
            unnamed = ~ANNOTATED[IDS]
            np.testing.assert_array_equal(found & unnamed, expected & unnamed, err_msg=f"epoch {epoch}")
            memory.load_state_dict(memory.state_dict())
        np.testing.assert_allclose((ratios * counts).sum() / counts.sum(), K)


@pytest.mark.parametrize("settings", [{}, {"top": 4, "compact_after": 1}], ids=["dense", "topk"])
def test_given_k_of_each_class_is_used_at_the_level(tmp_path, settings):
    given, counts = np.array([1.0, 2, 1.5, 1, 4, 1, 2]), ANNOTATIONS.counts()
    num_expected = np.rint(at_level(given, counts, K) * counts).astype(int)
    with open_memory(tmp_path / "store", k_per_class=given, settings=settings) as memory:
        for _ in range(2):
            train_epoch(memory)
            memory.end_epoch()
            assert memory.class_ratios is None
            expected = slow_selection(rows_at(tmp_path / "store").scores, num_expected)
            found = np.concatenate([memory.lookup(ids).expected for ids in batches_of(IDS)])
            unnamed = ~ANNOTATED[IDS]
            np.testing.assert_array_equal(found & unnamed, expected & unnamed)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("k_per_class", [False, True])
def test_expected_positives_of_high_score_are_pseudo_positives(tmp_path, share, k_per_class):
    options = {"pseudo_positive_share": share, "k_per_class": k_per_class, "rank_by": "spatial"}
    with open_memory(tmp_path / "store", **options) as memory:
        assert not memory.lookup(IDS[:4]).pseudo_positives.any()
        for _ in range(2):
            ratios = K if memory.class_ratios is None else memory.class_ratios
            train_epoch(memory)
            memory.end_epoch()
        counts = ANNOTATIONS.counts()
        num_expected = np.rint(ratios * counts).astype(int)
        fewer = counts + np.rint(share * (num_expected - counts)).astype(int)
        rows = rows_at(tmp_path / "store")
        found = np.concatenate([memory.lookup(ids).pseudo_positives for ids in batches_of(IDS)])
        np.testing.assert_array_equal(found, slow_selection(rows.ranked_by(), fewer))
        expected = np.concatenate([memory.lookup(ids).expected for ids in batches_of(IDS)])
        assert (expected | ~found).all(), "pseudo-positives are expected"


@pytest.mark.parametrize("rule", ["both", "given per class", "pseudo-positives"])
def test_a_resumed_memory_selects_as_an_uninterrupted_one(tmp_path, rule):
    rule = RULES[rule]
    with open_memory(tmp_path / "whole", **rule) as memory:
        for _ in range(4):
            train_epoch(memory)
            memory.end_epoch()
        whole = memory.selection.to_json(), memory.class_ratios
    state = None
    for _ in range(4):
        with open_memory(tmp_path / "parts", **rule) as memory:
            if state is not None:
                memory.load_state_dict(state)
            train_epoch(memory)
            memory.end_epoch()
            state = memory.state_dict()
    assert memory.selection.to_json() == whole[0]
    np.testing.assert_array_equal(memory.class_ratios, whole[1])
    assert_same_rows(rows_at(tmp_path / "parts"), rows_at(tmp_path / "whole"))


def test_ratios_of_a_run_that_is_resumed_without_k_per_class_are_forgotten(tmp_path):
    with open_memory(tmp_path / "store", k_per_class=True) as memory:
        train_epoch(memory)
        memory.end_epoch()
        state = memory.state_dict()
        assert (memory.class_ratios != K).any()
    with open_memory(tmp_path / "store") as memory:
        memory.load_state_dict(state)
        train_epoch(memory)
        memory.end_epoch()
        assert memory.class_ratios is None
        num_expected = memory.selection.num_expected
    np.testing.assert_array_equal(num_expected, np.rint(K * ANNOTATIONS.counts()))


def test_a_store_that_ranks_in_another_way_is_refused(tmp_path):
    with open_memory(tmp_path / "store") as memory:
        train_epoch(memory)
        memory.end_epoch()
    with pytest.raises(StoreError, match="was created to rank by score, found spatial"):
        open_memory(tmp_path / "store", rank_by="spatial")


def test_visits_are_those_of_the_sample_also_after_an_epoch_that_left_it_out(tmp_path):
    with open_memory(tmp_path / "store") as memory:
        for left_out in ([], [0, 7], [0]):
            train_epoch(memory, np.setdiff1d(IDS, left_out))
            memory.end_epoch()
        visits = np.concatenate([memory.lookup(ids).arrays["sample_visits"] for ids in batches_of(IDS)])
    assert dict(zip(IDS.tolist(), visits.tolist(), strict=True)) == {
        **dict.fromkeys(IDS.tolist(), 3),
        0: 1,
        7: 2,
    }


def test_corrected_targets_are_the_mean_of_what_was_seen(tmp_path):
    """Whole images with one value in all cells: what was seen is known, whatever a heatmap started with."""
    with open_memory(tmp_path / "store") as memory:
        for value in (0.25, 0.75):
            for ids in batches_of(IDS):
                stored = memory.lookup(ids)
                maps = torch.full((len(ids), 7, 3, 3), value)
                memory.update(stored, logits=torch.logit(maps.mean((2, 3))), maps=maps)
            memory.end_epoch()
        target, weight = memory.lookup(IDS[:4]).corrected_target(3)
    # mu 0.8: weights 0.8 * 0.2 of the first look, 0.2 of the second, 0.64 of the start.
    torch.testing.assert_close(weight, torch.full((4, 1, 3, 3), 0.36), rtol=1e-3, atol=1e-3)
    seen = (0.16 * 0.25 + 0.2 * 0.75) / 0.36
    torch.testing.assert_close(target, torch.full((4, 7, 3, 3), seen), rtol=2e-3, atol=2e-3)


def test_a_cell_that_was_never_seen_has_no_weight(tmp_path):
    with open_memory(tmp_path / "store") as memory:
        left = torch.tensor([[0.0, 0.0, 0.5, 1.0, 0.0]]).expand(4, -1)
        for ids in batches_of(IDS):
            learn(memory, memory.lookup(ids, left[: len(ids)]))
        memory.end_epoch()
        _, weight = memory.lookup(IDS[:4]).corrected_target(6)
    assert (weight[..., 3:] == 0).all()
    torch.testing.assert_close(weight[..., :3], torch.full((4, 1, 6, 3), 0.2), rtol=1e-3, atol=1e-3)


def some_answers():
    """Yes to six pairs that no label names, no to one label and to one unnamed pair."""
    unnamed = [pair for pair in np.argwhere(~ANNOTATED).tolist() if pair[0] in IDS]
    pairs = [*unnamed[:42:7], np.argwhere(ANNOTATED)[3].tolist(), unnamed[50]]
    says = [1] * 6 + [0, 0]
    places = tuple(np.transpose(pairs))
    return Answered.of(*places, says, named=ANNOTATED[places])


class AnsweredMemory(Memory):
    """A memory that starts with answers, as that of a run."""

    def __init__(self, annotations, settings, answered, *, heatmap_size, positives_per_image, **options):
        rule = {
            "start_epoch": 1,
            "rank_by": "score",
            "k_per_class": False,
            "pseudo_positive_share": None,
            **options,
        }
        start = MemoryStart(run="mine", snapshot=0, epoch=0, answered=answered)
        self._open(
            annotations,
            settings,
            selection_rule(positives_per_image, **rule),
            heatmap_size,
            "score",
            torch.device("cpu"),
            process_group(),
            start,
        )


@pytest.mark.parametrize("rule", ["one K", "per class", "given per class", "pseudo-positives"])
def test_answers_say_which_images_are_positives_and_not_that_there_are_more(tmp_path, rule):
    answered = some_answers()
    annotations = with_answers(ANNOTATIONS, answered)
    options = {"heatmap_size": 2 * SIDE, "positives_per_image": K, **RULES.get(rule, {})}
    settings = StoreConfig(url=str(tmp_path / "store"), history_samples=0)
    with AnsweredMemory(annotations, settings, answered, **options) as memory:
        for _ in range(3):
            train_epoch(memory)
            memory.end_epoch()
        selected = memory.selection.num_expected
    # The labels that stand: the refuted one was none.
    labels = ANNOTATIONS.counts()
    labels[answered.classes[(answered.says == 0) & answered.named]] -= 1
    counts = annotations.counts()
    assert (counts > labels).sum() >= 3
    ratios = np.full(len(labels), K)
    if rule == "given per class":
        ratios = at_level(RULES[rule]["k_per_class"], labels, K)
    if rule == "per class":
        assert abs(selected.sum() - K * labels.sum()) <= len(labels)
        assert selected.sum() < K * counts.sum() - 4
    else:
        np.testing.assert_array_equal(selected, np.maximum(np.rint(ratios * labels), counts))
