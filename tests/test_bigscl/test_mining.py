"""Mined positives equal a count by hand, pair by pair."""

import numpy as np
import pytest

from bigscl.data.labels.training_labels import with_answered
from bigscl.evaluation.memory_figures import mined_positives
from bigscl.store import Answered, GroupSpec, HeatmapStore, Rows, update
from tests.builders import scene_index


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    """30 scenes in 4 shards."""
    return scene_index(tmp_path_factory.mktemp("mined"))


def remember(folder, index, scores):
    """A store with these scores."""
    HeatmapStore.create(folder, index.annotations(), heatmap_size=4, group=GroupSpec(layout="scores"))
    with HeatmapStore.open(folder, annotations=index.annotations(), mode="w") as store:
        visits = np.ones(len(scores), np.uint8)
        update(store, 0, index.ids(), Rows(scores=scores.astype(np.float16), sample_visits=visits))
        store.commit(epoch=0)
    return HeatmapStore.open(folder, annotations=index.annotations())


def by_hand(index, scores, k):
    """(mined, missing, found), by sorting every class."""
    annotated = index.labels_of(index.ids()) == 1
    truth = index.labels_of(index.ids(), "full")
    mined = found = 0
    for number in range(index.num_classes):
        ranking = sorted(range(len(scores)), key=lambda row: (-np.float16(scores[row, number]), row))
        for row in ranking[: round(k * annotated[:, number].sum())]:
            if not annotated[row, number]:
                mined += 1
                found += int(truth[row, number] == 1)
    return mined, int(((truth == 1) & ~annotated).sum()), found


@pytest.mark.parametrize("k", [1.0, 2.5])
def test_precision_and_recall_equal_a_count_by_hand(tmp_path, index, k):
    scores = np.random.default_rng(3).random((index.num_samples, index.num_classes))
    scores += 0.5 * (index.labels_of(index.ids(), "full") == 1)
    found = mined_positives(remember(tmp_path / "store", index, scores / 1.5), index, k)
    mined, missing, right = by_hand(index, scores / 1.5, k)
    assert (found.num_mined, found.num_missing) == (mined, missing)
    assert found.precision == pytest.approx(right / mined)
    assert found.recall == pytest.approx(right / missing)


def test_nothing_beyond_the_annotated_is_mined_if_nothing_more_is_expected(tmp_path, index):
    annotated = (index.labels_of(index.ids()) == 1).astype(np.float64)
    found = mined_positives(remember(tmp_path / "store", index, annotated), index, 1.0)
    assert found.num_mined == 0
    assert np.isnan(found.precision)
    assert found.recall == 0


def test_answers_do_not_raise_the_number_of_expected_positives(tmp_path, index):
    """K counts labels: an answer says which image has the class, not that one more does."""
    missing = (index.labels_of(index.ids(), "full") == 1) & (index.labels_of(index.ids()) != 1)
    rows, classes = (numbers[:3] for numbers in np.nonzero(missing))
    answered = Answered.of(rows, classes, np.ones(3))
    scores = np.random.default_rng(5).random((index.num_samples, index.num_classes))
    store = remember(tmp_path / "store", index, scores)
    counted = mined_positives(store, with_answered(index, answered), 1.0, answered)
    expected = [mined_positives(store, index, 1.0).num_mined]
    for number, score in zip(classes, scores[rows, classes], strict=True):
        labels = int((index.labels_of(index.ids())[:, number] == 1).sum())
        ranks_before = int((scores[:, number] > score).sum())
        expected.append(-int(ranks_before < labels))  # an expected pair that was answered is mined no more
    assert counted.num_mined == sum(expected)
