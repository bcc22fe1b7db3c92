"""Scores of few visits: their initial values are no evidence."""

import numpy as np
import pytest

from bigscl.evaluation.review import score_history, suspicion
from bigscl.store import Annotations, Rows
from bigscl.store.reader import InitialValues
from bigscl.tools.shared.terminal import few_visits_note

MOMENTUM = 0.8
SEEN = np.array([[0.0, 0.9, 0.1], [0.7, 0.2, 0.0]])
"""Predictions of every visit; class 0 is the label of both images. The first shows class 1 instead."""


def annotations():
    return Annotations.of([[0], [0]], 3)


def stored(visits):
    """Running averages after some visits with the same prediction."""
    start = np.array([[1.0, 0, 0], [1.0, 0, 0]])
    return MOMENTUM**visits * start + (1 - MOMENTUM**visits) * SEEN


@pytest.mark.parametrize("visits", [1, 2, 4, 18])
def test_scores_without_initial_value_are_the_mean_prediction(visits):
    start = InitialValues(annotations=annotations(), momentum=MOMENTUM, debiased=False)
    counts = np.full(2, visits, np.uint8)
    rows = Rows(scores=stored(visits).astype(np.float16), sample_visits=counts)
    found = start.scores_without_initial_value(rows, np.arange(2))
    # Stored as float16, and the rest of one visit is enlarged five times.
    np.testing.assert_allclose(found, SEEN, atol=0.003)


def test_a_sample_that_was_never_visited_has_no_score():
    start = InitialValues(annotations=annotations(), momentum=MOMENTUM, debiased=False)
    rows = Rows(scores=stored(0).astype(np.float16), sample_visits=np.zeros(2, np.uint8))
    assert not start.scores_without_initial_value(rows, np.arange(2)).any()


def test_four_epochs_of_a_label_that_was_never_predicted_are_no_evidence_for_it():
    kind = np.dtype([("class", "<u2"), ("score", "<f2")])
    epochs = []
    for visits in (1, 2, 3, 4):
        pairs = np.zeros((2, 3), kind)
        pairs["class"], pairs["score"] = np.arange(3), stored(visits)
        epochs.append(pairs)
    shares = [MOMENTUM**visits for visits in (1, 2, 3, 4)]
    as_stored = score_history(epochs, annotations(), np.arange(2))
    assert as_stored.mean[0] == pytest.approx(0.59, abs=0.01)
    history = score_history(epochs, annotations(), np.arange(2), shares)
    np.testing.assert_allclose(history.mean.reshape(2, 3), SEEN, atol=0.003)
    assert suspicion(history)[0] == pytest.approx(1, abs=0.003)
    assert suspicion(history)[1] == pytest.approx(0.9, abs=0.003)


def test_few_visits_are_told_and_many_are_not():
    assert "41% of a stored score is still its initial value" in few_visits_note(MOMENTUM**4)[0]
    assert few_visits_note(MOMENTUM**18) == []
