"""Pure parts of the layout against slow, obvious references."""

import numpy as np
import pytest

from bigscl.store.layout import choose_classes


@pytest.mark.parametrize("num_columns", [5, 300_000])
def test_the_classes_chosen_are_the_annotated_then_the_highest_ties_to_the_lowest(num_columns):
    random = np.random.default_rng(0)
    # Few different scores, so that most rows have ties at the cut; so many columns need wider keys.
    scores = (random.integers(0, 4, (6, num_columns)) / 4).astype(np.float16)
    annotated = np.zeros(scores.shape, bool)
    annotated[np.arange(6), random.integers(0, num_columns, 6)] = True
    annotated[:3, num_columns - 1] = True
    chosen = choose_classes(scores, annotated, 3)
    for row, found in enumerate(chosen):
        keys = (np.arange(num_columns), -scores[row].astype(float), ~annotated[row])
        assert found.tolist() == sorted(np.lexsort(keys)[:3].tolist())
