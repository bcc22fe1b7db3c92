"""Answers of people in rows that are stored: the rule, row by row, and nothing else changes."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from bigscl.common.user_error import UserError
from bigscl.store import Answered, GroupSpec, HeatmapStore, StoreError, update, with_answers
from bigscl.store.errors import StorageFailed
from tests.test_store.conftest import all_ids, assert_same_rows, make_annotations, random_update
from tests.test_store.ranks import run_threads

ANNOTATIONS = make_annotations()
IDS = all_ids(ANNOTATIONS)
STORED = IDS[IDS < 10]
"""The samples of the first two of three shards, which the stores of these tests hold."""
LAYOUTS = ["dense", "topk", "scores"]


def positives_of(row, annotations=ANNOTATIONS):
    return set(annotations.given[row].tolist())


def answered(*answers):
    """Answers from (row, class, what is said)."""
    rows, classes, says = zip(*answers, strict=True) if answers else ((), (), ())
    return Answered.of(
        rows, classes, says, named=[c in positives_of(r) for r, c in zip(rows, classes, strict=True)]
    )


def drawn(seed, count):
    """Answers about some pairs, among them labels that are confirmed, refuted and withdrawn."""
    random = np.random.default_rng(seed)
    pairs = random.permutation(len(IDS) * 7)[:count]
    return answered(*((int(IDS[pair // 7]), int(pair % 7), int(random.integers(-1, 2))) for pair in pairs))


def create(path, layout, top=5, ranking=True, top_scores=None):
    HeatmapStore.create(
        path,
        ANNOTATIONS,
        heatmap_size=4,
        top_scores=top_scores,
        group=GroupSpec(layout=layout, top=top if layout == "topk" else None, spatial_score=ranking),
    )
    with HeatmapStore.open(path, annotations=ANNOTATIONS, mode="w", run="test") as store:
        update(store, 0, STORED, random_update(store, len(STORED), 0))
        store.commit(epoch=0, step=3, attributes={"momentum": 0.7, "mine": [1]})


def opened(path, mode="w", transport=None):
    return HeatmapStore.open(path, annotations=ANNOTATIONS, mode=mode, run="test", transport=transport)


def label(row, number, says):
    """1 present, 0 absent, None unknown, after an answer or without one."""
    return says if says in (0, 1) else 1 if number in positives_of(row) else None


def slow_answer(before, row, known, new):
    """The arrays of one row after its answers: {class: what is said}, before and now."""
    found = {name: array.copy() for name, array in before.items()}
    labels = {number: label(row, number, new.get(number)) for number in range(7)}
    kept = list(found["classes"]) if "classes" in found else list(range(7))
    for number in sorted(new):
        now, was = labels[number], label(row, number, known.get(number))
        if now is None or now == was:
            continue
        if number not in kept and now == 1:
            free = [
                (found["scores"][other], -place) for place, other in enumerate(kept) if labels[other] != 1
            ]
            place = -min(free)[1]
            kept[place] = number
            found["heatmaps"][place] = found["scores"][number]
        found["scores"][number] = now
        if number in kept and "heatmaps" in found:
            found["spatial_score"][kept.index(number)] = now
            if now == 0:
                found["heatmaps"][kept.index(number)] = 0
    if "classes" in found:
        order = np.argsort(kept)
        found["classes"] = np.array(kept, found["classes"].dtype)[order]
        found["heatmaps"], found["spatial_score"] = found["heatmaps"][order], found["spatial_score"][order]
    return found


def slow_sparse_answer(before, row, known, new):
    """({class: score}, floor) of a row that keeps few scores, after its answers."""
    scores = dict(zip(before["score_classes"].tolist(), before["scores"].tolist(), strict=True))
    floor = float(before["score_floor"])
    labels = {number: label(row, number, new.get(number)) for number in range(7)}
    for number in sorted(new):
        now, was = labels[number], label(row, number, known.get(number))
        if now is None or now == was:
            continue
        if number not in scores and now == 1:
            out = min(scores, key=lambda c: (labels[c] == 1, scores[c], -c))
            floor = max(floor, scores.pop(out))
        if number in scores or now == 1:
            scores[number] = float(now)
    return scores, floor


@pytest.mark.parametrize("seed", range(3))
def test_rows_with_few_scores_make_room_for_what_people_name(tmp_path, seed):
    create(tmp_path / "store", "scores", top_scores=5)
    first, second = drawn(seed, 9), drawn(seed, 18)
    known = Answered.of()
    for new in (first, second):
        before = opened(tmp_path / "store", "r").read(STORED)
        with opened(tmp_path / "store") as store:
            store.answer(new)
        after = opened(tmp_path / "store", "r").read(STORED)
        for place, row in enumerate(STORED.tolist()):
            own = {name: array[place] for name, array in before.items()}
            scores, floor = slow_sparse_answer(own, row, by_row(known).get(row, {}), by_row(new).get(row, {}))
            assert after["score_classes"][place].tolist() == sorted(scores)
            assert after["scores"][place].tolist() == [scores[number] for number in sorted(scores)]
            assert after["score_floor"][place] == floor
        known = new


def test_a_row_with_few_scores_and_heatmaps_keeps_the_scores_of_those(tmp_path):
    create(tmp_path / "store", "topk", top=4, top_scores=5)
    with opened(tmp_path / "store") as store:
        row = next(n for n in STORED.tolist() if len(positives_of(n)) < 3)
        found = store.read([row])
        number = next(c for c in range(7) if c not in found["score_classes"][0] and c not in found.classes[0])
        store.answer(answered((row, number, 1)))
        after = store.read([row])
        assert number in after.classes[0]
        assert after.scores[0, number] == 1
        left = set(after.classes[0].tolist()) & set(found["score_classes"][0].tolist())
        assert left <= set(after["score_classes"][0].tolist())
        with pytest.raises(UserError, match=r"top(_scores)?: [45] would lose given labels"):
            store.answer(answered(*((row, c, 1) for c in range(7))))


def by_row(answers):
    found = {}
    for row, number, says in zip(answers.rows, answers.classes, answers.says, strict=True):
        found.setdefault(int(row), {})[int(number)] = int(says)
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed", range(2))
def test_rows_follow_the_rule_and_others_keep_their_bits(tmp_path, layout, seed):
    create(tmp_path / "store", layout, top=6)
    first, second = drawn(seed, 12), drawn(seed, 25)
    known = Answered.of()
    for new in (first, second):
        before = opened(tmp_path / "store", "r").read(STORED)
        with opened(tmp_path / "store") as store:
            store.answer(new)
            assert store.snapshot.attributes["mine"] == [1]
            assert (store.snapshot.epoch, store.snapshot.step) == (0, 3)
        after = opened(tmp_path / "store", "r").read(STORED)
        for place, row in enumerate(STORED.tolist()):
            own = {name: array[place] for name, array in before.items()}
            expected = slow_answer(own, row, by_row(known).get(row, {}), by_row(new).get(row, {}))
            for name, array in after.items():
                np.testing.assert_array_equal(array[place], expected[name], err_msg=f"{name} of {row}")
        known = new


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_answers_again_change_nothing_and_write_nothing(tmp_path, layout):
    create(tmp_path / "store", layout, top=6)
    with opened(tmp_path / "store") as store:
        store.answer(drawn(1, 20))
        number, rows = store.snapshot.id, store.read(IDS)
        again = store.answer(drawn(1, 20))
        assert store.snapshot.id == number
        assert again.late.tolist() == Answered.at(store.snapshot).late.tolist()
        assert_same_rows(store.read(IDS), rows)


def test_rows_that_were_never_stored_start_with_the_answers(tmp_path):
    create(tmp_path / "store", "dense")
    row = 10
    number = next(one for one in range(7) if one not in positives_of(row))
    wrong = min(positives_of(row))
    new = answered((row, number, 1), (row, wrong, 0), (0, 0, 0 if 0 in positives_of(0) else 1))
    with opened(tmp_path / "store") as store:
        found = store.answer(new)
        rows = store.read(np.array([row]))
        assert rows.heatmaps[0, number].min() == 1 == rows.scores[0, number]
        assert rows.heatmaps[0, wrong].max() == 0 == rows.scores[0, wrong]
        assert found.late.tolist() == [True, False, False]
        assert store.initial_values.annotations.is_given(np.array([row]), np.array([number])).all()


@pytest.mark.parametrize("seed", range(5))
def test_positives_after_answers_equal_those_of_sets(seed):
    answers = replace(drawn(seed, 30), late=np.random.default_rng(seed).random(30) < 0.5)
    now, started = with_answers(ANNOTATIONS, answers), with_answers(ANNOTATIONS, answers, from_start=True)
    for row in range(15):
        own = by_row(answers).get(row, {})
        expected = {number for number in range(7) if label(row, number, own.get(number)) == 1}
        assert positives_of(row, now) == expected
        late = {
            int(c)
            for r, c, one in zip(answers.rows, answers.classes, answers.late, strict=True)
            if r == row and one
        }
        assert positives_of(row, started) == expected - late


def test_heatmaps_that_were_learnt_before_the_answer_are_shown_as_they_are(tmp_path):
    create(tmp_path / "store", "dense")
    number = next(one for one in range(7) if one not in positives_of(0))
    with opened(tmp_path / "store") as store:
        store.answer(answered((0, number, 1)))
    store = opened(tmp_path / "store", "r")
    assert number in positives_of(0, store.annotations)
    raw, seen = store.read([0]), store.read_without_initial_value([0])
    np.testing.assert_array_equal(seen.heatmaps[0, number], raw.heatmaps[0, number])


def test_answers_that_are_lost_are_refused(tmp_path):
    create(tmp_path / "store", "dense")
    with opened(tmp_path / "store") as store:
        store.answer(drawn(2, 10))
        with pytest.raises(StoreError, match="answers that are not given now, first about class"):
            store.answer(drawn(2, 9))


def test_more_positives_than_places_are_refused_before_anything_is_written(tmp_path):
    create(tmp_path / "store", "topk", top=4)
    all_of_it = answered(*((0, number, 1) for number in range(7)))
    with opened(tmp_path / "store") as store:
        number = store.snapshot.id
        with pytest.raises(UserError, match="would lose given labels"):
            store.answer(all_of_it)
        assert store.snapshot.id == number


def test_a_failed_write_leaves_the_rows_and_the_same_answers_can_be_given_again(tmp_path, monkeypatch):
    create(tmp_path / "store", "dense")
    with opened(tmp_path / "store") as store:
        before = store.read(IDS)
        write = type(store.arrays).write
        calls = []

        def failing(self, *arguments):
            calls.append(1)
            if len(calls) == 2:
                raise StorageFailed("disk full")
            return write(self, *arguments)

        monkeypatch.setattr(type(store.arrays), "write", failing)
        with pytest.raises(StorageFailed, match="disk full"):
            store.answer(drawn(3, 30))
    monkeypatch.undo()
    assert_same_rows(opened(tmp_path / "store", "r").read(STORED), before.take(np.arange(len(STORED))))
    with opened(tmp_path / "store") as store:
        store.answer(drawn(3, 30))
        assert Answered.at(store.snapshot).rows.tolist() == drawn(3, 30).rows.tolist()


def test_ranks_share_the_work(tmp_path):
    for name in ("one", "two"):
        create(tmp_path / name, "topk", top=6)

    def answer(name, transport=None):
        with opened(tmp_path / name, transport=transport) as store:
            store.answer(drawn(4, 30))

    answer("one")
    run_threads(partial(answer, "two"), 2)
    one, two = (opened(tmp_path / name, "r") for name in ("one", "two"))
    assert_same_rows(two.read(IDS), one.read(IDS))
    assert two.snapshot.attributes == one.snapshot.attributes


def test_answers_that_cannot_be_read_are_named(tmp_path):
    create(tmp_path / "store", "dense")
    snapshot = opened(tmp_path / "store", "r").snapshot
    for bad in (3, {"rows": "x"}, {"rows": [1], "classes": [2], "says": []}, {"late": [5]}):
        with pytest.raises(StoreError, match="its answers cannot be read"):
            Answered.at(replace(snapshot, attributes={"answers": bad}))
