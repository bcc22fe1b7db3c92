"""The benchmark of an epoch's end: it runs at a small size, and its merges find the same thresholds."""

import re

import numpy as np
import pytest

from bigscl.selection.ranking import select
from bigscl.store import SingleProcess
from tests.benchmarks import epoch_end
from tests.benchmarks.epoch_end_stages import Others
from tests.benchmarks.gathered_selection import select_gathered
from tests.benchmarks.selection import CHUNK, Scores

SMALL = ["--images", "5500", "--classes", "40", "--val-images", "300", "--backbone", "shufflenet_v2_x0_5"]


def test_table_has_all_stages(capsys):
    epoch_end.main(["--ranks", "3", *SMALL, "--most-scores", "50000"])
    printed = capsys.readouterr().out
    assert printed.startswith("3 ranks, 5,500 x 40, 300 images to validate")
    for stage in ("read scores", "commit", "selection: a rank's scores", "validation: metrics"):
        (row,) = re.findall(rf"^  {stage} +(.*)$", printed, re.MULTILINE)
        assert len(re.split("  +", row.strip())) == 6
    assert "1 of 2 shards of the rank were ranked, 2 were read" in printed


@pytest.mark.parametrize("world_size", [2, 5])
def test_what_stands_for_other_ranks_has_their_number_of_scores(world_size):
    """So that the merges before and after have the work of as many real ranks."""
    chunks = list(Scores(2 * CHUNK, 20, "any"))
    expected = np.full(20, 60)

    def of_rank(payload, rank):
        return (np.frombuffer(payload, np.uint64) - np.uint64(2 * CHUNK * rank)).tobytes()

    all_chunks = [(ids + 2 * CHUNK * rank, scores) for rank in range(world_size) for ids, scores in chunks]
    whole = select(all_chunks, expected, SingleProcess())
    merged = select_gathered(chunks, expected, Others(world_size, of_rank))
    counted = select(chunks, expected, Others(world_size, of_rank))
    assert merged.same_as(whole)
    assert counted.same_as(whole)
