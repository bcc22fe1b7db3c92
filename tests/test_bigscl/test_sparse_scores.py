"""Stores that keep the highest scores of a row and a floor: equal to dense ones wherever the floor allows."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bigscl.common.user_error import UserError
from bigscl.config import StoreConfig
from bigscl.memory.heatmaps import blend_scores
from bigscl.memory.lookup import highest_scores, to_rows
from bigscl.memory.memory import Memory
from bigscl.memory.score_history import ScoreLog, read_score_log
from bigscl.selection.ranking import given_first, select
from bigscl.selection.thresholds import FloorCounts, Thresholds
from bigscl.store import (
    NOT_KEPT,
    Annotations,
    GroupSpec,
    HeatmapStore,
    KeptScores,
    SingleProcess,
    StoreError,
    create,
    initial_shard,
    spec_for,
)
from bigscl.store.errors import OtherFormat
from tests.test_bigscl.test_memory import ANNOTATIONS, IDS, SIDE, batches_of, predict, rows_at, train_epoch
from tests.test_bigscl.test_selection import brute_force, in_chunks
from tests.test_store.conftest import assert_same_rows, make_annotations

KEPT, TOP = 5, 4
GIVEN = [set(ANNOTATIONS.given[row].tolist()) for row in range(len(ANNOTATIONS.given))]


def open_memory(path, *, annotations=ANNOTATIONS, k=1.5, **settings):
    own = {"url": str(path), "history_samples": 2, "warmup_heatmaps": "scores", "top_scores": KEPT}
    rank_by = settings.pop("rank_by", "score")
    options = {"heatmap_size": 2 * SIDE, "positives_per_image": k, "rank_by": rank_by}
    return Memory(annotations, StoreConfig(**{**own, **settings}), **options)


def slow_keep(scores, given, maps, count):
    """(kept classes, floor) of a row: given labels, then classes with a heatmap, then the highest."""
    order = sorted(range(len(scores)), key=lambda c: (c not in given, c not in maps, -float(scores[c]), c))
    return sorted(order[:count]), max(scores[c] for c in order[count:])


@st.composite
def rows_of_scores(draw):
    """Scores [N,L] with many ties or none, given labels [N,L], and how many scores are kept."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    num_rows, num_classes = draw(st.integers(1, 30)), draw(st.integers(2, 12))
    levels = draw(st.sampled_from([2, 3, 10, 10_000]))
    scores = (rng.integers(0, levels, (num_rows, num_classes)) / (levels - 1)).astype(np.float16)
    kept = draw(st.integers(1, num_classes - 1))
    named = np.zeros(scores.shape, bool)
    for row in range(num_rows):
        named[row, rng.choice(num_classes, rng.integers(0, kept + 1), replace=False)] = True
    return scores, named, kept, rng


def sparse(scores, named, kept, maps=None):
    second = None if maps is None else torch.from_numpy(maps)
    arrays = highest_scores(torch.from_numpy(scores), torch.from_numpy(named), second, kept)
    return to_rows({name: tensor.numpy() for name, tensor in arrays.items()}, scores.shape[1])


@settings(max_examples=80, deadline=None)
@given(drawn=rows_of_scores())
def test_a_row_keeps_its_labels_and_its_highest_scores_and_the_floor_of_the_rest(drawn):
    scores, named, kept, rng = drawn
    maps = np.stack([rng.choice(scores.shape[1], rng.integers(1, 2), replace=False) for _ in scores])
    rows = sparse(scores, named, kept, maps)
    for row, found in enumerate(rows["score_classes"]):
        labels = set(np.flatnonzero(named[row]).tolist())
        classes, floor = slow_keep(scores[row], labels, set(maps[row].tolist()), kept)
        assert found.tolist() == classes
        assert rows["scores"][row].tolist() == scores[row, classes].tolist()
        assert rows["score_floor"][row] == floor
    assert rows["score_classes"].dtype == np.uint16
    left_out = rows.scores != scores
    assert (rows.scores[left_out] > scores[left_out]).all()


def test_classes_beyond_the_signed_range_keep_their_numbers():
    for num_classes, dtype in ((50_000, np.uint16), (70_000, np.uint32)):
        scores = np.zeros((1, num_classes), np.float16)
        scores[0, [7, 40_000, num_classes - 1]] = [0.25, 0.5, 0.75]
        rows = sparse(scores, np.zeros(scores.shape, bool), 3)
        assert rows["score_classes"].dtype == dtype
        assert rows["score_classes"].tolist() == [[7, 40_000, num_classes - 1]]
        np.testing.assert_array_equal(rows.scores, scores)


@settings(max_examples=80, deadline=None)
@given(drawn=rows_of_scores())
def test_selection_equals_that_of_all_scores_wherever_the_floor_is_below_the_cut(drawn):
    scores, named, kept, rng = drawn
    ids = rng.permutation(3 * len(scores))[: len(scores)]
    num_expected = rng.integers(0, len(scores) + 2, scores.shape[1])
    rows, floors = sparse(scores, named, kept), FloorCounts()
    floors.note(ids, rows.ranked())
    parts = [slice(start, start + 7) for start in range(0, len(ids), 7)]
    chunks = [(ids[part], rows.take(part).ranked()) for part in parts]
    found = floors.marked(select(chunks, num_expected, SingleProcess()), SingleProcess())
    whole = select(in_chunks(ids, scores, 7), num_expected, SingleProcess())
    exact = found.approximate == 0
    assert np.array_equal(found.score[exact], whole.score[exact])
    assert np.array_equal(found.tie_id[exact], whole.tie_id[exact])
    expected = found.expected(rows.ranked_by(), ids)
    assert np.array_equal(expected[:, exact], brute_force(ids, scores, num_expected)[:, exact])
    # Elsewhere it is the best of what is kept: never more than asked for, never a score that is only a floor.
    assert not expected[rows.ranked_by() == NOT_KEPT].any()
    assert (expected.sum(0) <= num_expected).all()
    reached = (rows["score_floor"][:, None] >= found.score).sum(0)
    assert np.array_equal(found.approximate, np.where(num_expected > 0, reached, 0))
    again = Thresholds.from_json(json.loads(json.dumps(found.to_json())))
    assert np.array_equal(again.approximate, found.approximate)


def test_given_labels_come_first_in_kept_scores_too():
    rng = np.random.default_rng(0)
    scores = rng.random((len(IDS), 7)).astype(np.float16)
    rows = sparse(scores, ANNOTATIONS.of_rows(IDS), KEPT)
    ((_, kept),) = given_first([(IDS, rows.ranked())], ANNOTATIONS)
    ((_, dense),) = given_first([(IDS, rows.scores)], ANNOTATIONS)
    assert isinstance(kept, KeptScores)
    np.testing.assert_array_equal(kept.spread(rows["score_floor"]), dense)


@pytest.mark.parametrize("layout", [{}, {"top": TOP, "compact_after": 1}], ids=["scores", "topk"])
@pytest.mark.parametrize("ema", ["plain", "debiased"])
def test_updates_follow_the_rule_epoch_by_epoch(tmp_path, layout, ema):
    """Row by row: the new averages of all classes, with floors where scores were left out, then the best."""
    dense = np.zeros((len(GIVEN), 7), np.float16)
    dense[[n for n, own in enumerate(GIVEN) for _ in own], [c for own in GIVEN for c in sorted(own)]] = 1
    with open_memory(tmp_path / "store", ema=ema, **layout) as memory:
        for epoch in range(4):
            for stored in train_epoch(memory):
                np.testing.assert_array_equal(stored.scores.numpy(), dense[stored.rows])
                maps = [set()] * len(stored) if stored.classes is None else map(set, stored.classes.tolist())
                visits = torch.full((len(stored),), epoch, dtype=torch.uint8) if ema == "debiased" else None
                pooled = predict(stored.rows, epoch)[0].sigmoid()
                new = blend_scores(stored.scores, pooled, 0.8, visits).numpy()
                for n, scores, own in zip(stored.rows, new, maps, strict=True):
                    classes, floor = slow_keep(scores, GIVEN[n], own, KEPT)
                    dense[n] = floor
                    dense[n, classes] = scores[classes]
            memory.end_epoch()
            np.testing.assert_array_equal(rows_at(tmp_path / "store").scores, dense[IDS])


def test_rows_whose_view_shows_another_image_keep_their_bits(tmp_path):
    """With Mixup the whole view is left out; every second image has it."""
    with open_memory(tmp_path / "store") as memory:
        train_epoch(memory)
        memory.end_epoch()
        before = rows_at(tmp_path / "store")
        hidden = np.arange(len(IDS)) % 2 == 0
        erased = np.where(hidden[:, None], [0.0, 0.0, 1.0, 1.0], 0.0)
        stored = memory.lookup(IDS, erased=erased)
        memory.update(stored, logits=predict(IDS, 1)[0])
        memory.commit()
        after = rows_at(tmp_path / "store")
    for name in ("scores", "score_classes", "score_floor", "sample_visits"):
        np.testing.assert_array_equal(after[name][hidden], before[name][hidden])
    assert (after["scores"][~hidden] != before["scores"][~hidden]).any()


@pytest.mark.parametrize("rank_by", ["score", "spatial"])
def test_expected_positives_are_those_of_the_stored_rows(tmp_path, rank_by):
    with open_memory(tmp_path / "store", rank_by=rank_by, top=TOP, compact_after=1, k=3.0) as memory:
        for _ in range(3):
            train_epoch(memory)
            memory.end_epoch()
        rows = rows_at(tmp_path / "store")
        selection = Thresholds.from_json(memory.store.snapshot.attributes["selection"])
        stored = [memory.lookup(ids) for ids in batches_of(IDS)]
    ranked = rows.scores
    if rank_by == "spatial":
        np.put_along_axis(ranked, rows.classes.astype(np.int64), rows["spatial_score"], 1)
    kept = (rows["score_classes"][:, :, None] == np.arange(7)).any(1)
    ranked[~kept] = NOT_KEPT
    np.testing.assert_array_equal(rows.ranked_by(), ranked)
    if rank_by == "spatial":
        ranked[ANNOTATIONS.of_rows(IDS)] = 1
    num_expected = np.rint(3.0 * ANNOTATIONS.counts()).astype(int)
    expected = brute_force(IDS, ranked, num_expected) & kept
    np.testing.assert_array_equal(selection.expected(rows.ranked_by(), IDS), expected)
    np.testing.assert_array_equal(torch.cat([each.expected for each in stored]).numpy(), expected)


def test_classes_that_are_approximate_are_logged_and_recorded(tmp_path, caplog):
    with open_memory(tmp_path / "store", k=4.0, top_scores=3) as memory:
        train_epoch(memory)
        memory.end_epoch()
        recorded = memory.store.snapshot.attributes["selection"]["approximate"]
        floors = rows_at(tmp_path / "store")["score_floor"]
        cuts = memory.selection.score.numpy()
    reached = (floors[:, None] >= cuts).sum(0)
    assert recorded == {"classes": np.flatnonzero(reached).tolist(), "images": reached[reached > 0].tolist()}
    (line,) = [each.getMessage() for each in caplog.records if "approximate" in each.getMessage()]
    assert f"{len(recorded['classes'])} of 7 classes are approximate (class {recorded['classes'][0]}" in line


def test_a_run_that_goes_back_to_a_snapshot_equals_its_twin(tmp_path):
    with open_memory(tmp_path / "twin", top=TOP, compact_after=2) as memory:
        for _ in range(4):
            train_epoch(memory)
            memory.end_epoch()
    with open_memory(tmp_path / "run", top=TOP, compact_after=2) as memory:
        train_epoch(memory)
        memory.end_epoch()
        state = memory.state_dict()
        train_epoch(memory, IDS[:6])
    with open_memory(tmp_path / "run", top=TOP, compact_after=2) as memory:
        memory.load_state_dict(state)
        while memory.epoch < 4:
            train_epoch(memory)
            memory.end_epoch()
    assert_same_rows(rows_at(tmp_path / "run"), rows_at(tmp_path / "twin"))


@pytest.mark.parametrize("group", [GroupSpec(layout="scores"), GroupSpec(layout="topk", top=TOP)])
def test_rows_start_with_their_labels_then_the_lowest_classes(group):
    rows = initial_shard(spec_for(ANNOTATIONS, 4, 0, KEPT), group, ANNOTATIONS, 0)
    whole = initial_shard(spec_for(ANNOTATIONS, 4, 0), group, ANNOTATIONS, 0)
    np.testing.assert_array_equal(rows.scores, whole.scores)
    for row, classes in enumerate(rows["score_classes"]):
        assert classes.tolist() == slow_keep(whole.scores[row], GIVEN[row], set(), KEPT)[0]
        if rows.classes is not None:
            assert rows.classes[row].tolist() == slow_keep(whole.scores[row], GIVEN[row], set(), TOP)[0]


def test_readers_see_the_scores_of_all_classes(tmp_path):
    with open_memory(tmp_path / "store", top=TOP, compact_after=2) as memory:
        log = ScoreLog(tmp_path, ANNOTATIONS, SingleProcess(), 3)
        for _ in range(2):
            train_epoch(memory)
            memory.end_epoch(score_log=log)
    with HeatmapStore.open(tmp_path / "store", annotations=ANNOTATIONS) as store:
        rows = store.read(IDS)
        assert rows.scores.shape == (len(IDS), 7)
        by_shard = [scores for _, scores in store.scores_by_shard(range(3))]
        np.testing.assert_array_equal(np.concatenate(by_shard), rows.scores)
        np.testing.assert_array_equal(store.peek(IDS[3:5]).scores, rows.scores[3:5])
        tracked = store.spec.history_samples[0]
        np.testing.assert_array_equal(store.history(tracked)[1].scores, store.read([tracked]).scores)
        seen = store.scores_without_initial_value(rows, IDS)
        by_shard = [scores for _, scores in store.seen_scores_by_shard(range(3))]
        np.testing.assert_array_equal(np.concatenate(by_shard), seen)
        left = 0.8**2 * ANNOTATIONS.of_rows(IDS)
        np.testing.assert_allclose(seen, ((rows.scores - left) / (1 - 0.8**2)).clip(0, 1), atol=2e-3)
    pairs = read_score_log(tmp_path, ANNOTATIONS, before_epoch=2)[1]
    for n, row in zip(IDS, pairs, strict=True):
        scores = rows.scores[n == IDS][0]
        assert row["class"].tolist() == slow_keep(scores, GIVEN[n], set(), 3)[0]
        assert row["score"].tolist() == scores[row["class"]].tolist()


def test_the_store_says_that_scores_are_sparse_and_others_must_stop(tmp_path, monkeypatch):
    dense = spec_for(ANNOTATIONS, 4, 0)
    assert dense == spec_for(ANNOTATIONS, 4, 0, 7) == spec_for(ANNOTATIONS, 4, 0, 8)
    assert dense.to_json()["features"] == {"packed": ["sample_visits", "last_epoch"]}
    names = {field.name for field in dataclasses.fields(dense)} - {"top_scores"}
    assert set(dense.to_json()) == names | {"format", "features"}
    group = GroupSpec(layout="scores")
    HeatmapStore.create(tmp_path / "store", ANNOTATIONS, heatmap_size=4, group=group, top_scores=KEPT)
    root = json.loads((tmp_path / "store" / "zarr.json").read_text())["attributes"]["bigscl"]
    assert root["features"] == {"packed": ["sample_visits", "last_epoch"], "sparse_scores": KEPT}
    with HeatmapStore.open(tmp_path / "store") as store:
        assert store.spec.top_scores == KEPT
    monkeypatch.setattr(create, "SPARSE_SCORES", "something else")
    with pytest.raises(OtherFormat, match="uses sparse_scores, which this version does not read"):
        HeatmapStore.open(tmp_path / "store")


def one_line(error):
    return "\n" not in str(error.value)


def test_what_sparse_scores_cannot_do_is_refused_in_one_line(tmp_path):
    with pytest.raises(UserError, match="top_scores: 2 would lose given labels: sample") as error:
        open_memory(tmp_path / "a", top_scores=2)
    assert one_line(error)
    with pytest.raises(UserError, match="heatmaps of all classes are kept") as error:
        open_memory(tmp_path / "b", warmup_heatmaps="dense")
    assert one_line(error)
    open_memory(tmp_path / "c").close()
    for other, found in ((6, "6"), (7, "all"), (None, "all")):
        with pytest.raises(StoreError, match=f"scores of 5 classes per image, found {found}") as error:
            open_memory(tmp_path / "c", top_scores=other)
        assert one_line(error)
    with pytest.raises(UserError, match=r"store\.top: 6, expected at most 5"):
        open_memory(tmp_path / "c", top=6, compact_after=1)
    with (
        open_memory(tmp_path / "c") as memory,
        pytest.raises(UserError, match="the scores of 5 classes only"),
    ):
        memory.store.compact(6)


@pytest.mark.parametrize(
    ("num_classes", "heatmaps", "given", "kept"),
    [
        (4000, "scores", None, None),
        (4001, "scores", None, 64),
        (21_000, "scores", 200, 200),
        (21_000, "dense", None, None),
        (1000, "scores", 64, 64),
        (64, "scores", 64, None),
    ],
)
def test_the_default_follows_from_the_number_of_classes(num_classes, heatmaps, given, kept):
    config = StoreConfig(warmup_heatmaps=heatmaps, top_scores=given)
    assert config.kept_scores(num_classes) == kept


def test_many_classes_are_sparse_without_a_setting(tmp_path):
    annotations: Annotations = make_annotations((4, 3), num_classes=5000)
    config = StoreConfig(url=str(tmp_path / "store"), history_samples=0, warmup_heatmaps="scores")
    with Memory(annotations, config, heatmap_size=4, positives_per_image=1.5) as memory:
        ids = np.arange(4)
        stored = memory.lookup(ids)
        logits = torch.full((4, 5000), -2.0)
        logits[:, 4321] = 1.0
        memory.update(stored, logits=logits)
        memory.end_epoch()
        rows = memory.store.read(ids)
        assert rows["scores"].shape == (4, 64)
        assert (rows["score_classes"] == 4321).any(1).all()
        np.testing.assert_allclose(rows["score_floor"], 0.2 * torch.sigmoid(torch.tensor(-2.0)), rtol=1e-3)
