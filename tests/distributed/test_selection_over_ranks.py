"""The selection over real gloo processes equals a brute-force sort and is the same on every rank."""

import json

import numpy as np
import pytest

from bigscl.selection.thresholds import Thresholds
from tests.distributed.select_over_ranks import NUM_EXPECTED, WORLD_SIZES, cases


@pytest.fixture(scope="module")
def cuts(tmp_path_factory, trainer_server):
    """What each rank of each world size selected, by (rank, world size)."""
    folder = tmp_path_factory.mktemp("ranks")
    run = trainer_server.run("tests.distributed.select_over_ranks:main", folder, processes=4)
    assert run.returncode == 0, run.stderr
    return {
        (rank, size): json.loads((folder / f"cuts-{rank}-of-{size}.json").read_text())
        for size in WORLD_SIZES
        for rank in range(size)
    }


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_selection_over_ranks_equals_a_brute_force_sort(cuts, world_size):
    ids, scores = cases()
    for name, found in cuts[0, world_size].items():
        values = scores[name.split(",")[0]]
        expected = np.zeros(values.shape, dtype=bool)
        for i, count in enumerate(NUM_EXPECTED):
            best_first = sorted(range(len(ids)), key=lambda n, i=i: (-values[n, i], ids[n]))
            expected[best_first[:count], i] = True
        selection = Thresholds.from_json(found)
        chosen = selection.expected(values, ids)
        assert np.array_equal(chosen, expected), name


def test_every_rank_of_every_world_size_has_the_same_cuts(cuts):
    alone = cuts[0, 1]
    assert len(alone) == 12
    assert all(found == alone for found in cuts.values())
