"""What the memory has found that no label said: expected positives against the full labels."""

# Shapes: n images of a shard, L classes.

from dataclasses import dataclass

import torch

from bigscl.data.index import Index
from bigscl.method.selection import expected_counts, select
from bigscl.store import HeatmapStore, SingleProcess


@dataclass(frozen=True, slots=True, kw_only=True)
class Mined:
    """Pairs of image and class that are expected positive without being annotated."""

    num_mined: int
    num_missing: int
    """Pairs that are positive by the full labels, and not annotated."""
    precision: float
    """Share of the mined pairs that are positive; NaN of none."""
    recall: float
    """Share of the missing positives that are mined; NaN of none."""


def mined_positives(store: HeatmapStore, index: Index, positives_per_image: float) -> Mined:
    """What a selection by the scores in the store would find, if it expected so many positives per image.

    The cut is that of EN's next epoch, so that runs which never select can be asked the same question.
    """
    shards = range(store.spec.num_shards)
    annotated = index.annotations("observed")
    num_expected = expected_counts(annotated.counts(), positives_per_image)
    selection = select(store.scores_by_shard(shards), num_expected, SingleProcess())
    mined = missing = found = 0
    for ids, scores in store.scores_by_shard(shards):
        expected = selection.expected(torch.from_numpy(scores), torch.from_numpy(ids)).numpy()
        truth = index.labels_of(ids, "labels")
        # What even the full labels leave open counts neither for nor against.
        open_pairs = (index.labels_of(ids, "observed") != 1) & (truth != -1)
        present = (truth == 1) & open_pairs
        mined += int((expected & open_pairs).sum())
        missing += int(present.sum())
        found += int((expected & present).sum())
    return Mined(
        num_mined=mined,
        num_missing=missing,
        precision=found / mined if mined else float("nan"),
        recall=found / missing if missing else float("nan"),
    )
