"""Compare mined positives (expected, but not given) with the full labels."""

# Shapes: n images of a shard, L classes.

from dataclasses import dataclass

import torch

from bigscl.config import Config
from bigscl.data.index import Index, true_labels
from bigscl.memory.snapshot_state import SnapshotState
from bigscl.selection.k import estimate_k
from bigscl.selection.ranking import select
from bigscl.selection.thresholds import expected_counts
from bigscl.store import NOT_KEPT, Answered, HeatmapStore, KeptScores, SingleProcess, label_counts
from bigscl.training.run_folder import open_data, read_store


@dataclass(frozen=True, slots=True, kw_only=True)
class Mined:
    """Pairs of image and class that are expected positives but not given ones."""

    num_mined: int
    num_missing: int
    """Pairs that are positive by the full labels, but not given."""
    precision: float
    """Fraction of the mined pairs that are positive; NaN if none is mined."""
    recall: float
    """Fraction of the missing positives that are mined; NaN if none is missing."""


def mined_by_run(config: Config) -> Mined | None:
    """Return what the memory of a run has found, by its own K or that of its validation set.

    None if the run has no memory on disk, saw all labels, or nothing says what is missing.
    """
    if config.store.kind != "disk" or config.data.labels != "given":
        return None
    data = open_data(config)
    expected = data.positives_per_image
    if data.train.full is None:
        return None
    if expected is None:
        if data.val is None:
            return None
        expected = estimate_k(torch.from_numpy(true_labels(data.val, data.val.ids())[0]))
    with read_store(config, data.labelled) as store:
        return mined_positives(store, data.train, expected, data.answered)


def mined_positives(
    store: HeatmapStore, index: Index, positives_per_image: float, answered: Answered | None = None
) -> Mined:
    """Return what the run's own selection finds, or what one with K = `positives_per_image` would find.

    So runs that never select can be compared too. `answered` are answers of people in the index: K
    counts labels without them.
    """
    shards = range(store.spec.num_shards)
    state = SnapshotState.of(store.snapshot, store.spec.num_classes)
    if state.selection.any and not state.within_epoch:
        selection = state.selection
    else:
        num_expected = expected_counts(
            label_counts(index.annotations("given"), answered or Answered.of()), positives_per_image
        )
        selection = select(store.ranked_by_shard(shards), num_expected, SingleProcess())
    mined = missing = found = 0
    for ids, ranked in store.ranked_by_shard(shards):
        values = ranked.spread(NOT_KEPT) if isinstance(ranked, KeptScores) else ranked
        expected = selection.expected(values, ids)
        truth = index.labels_of(ids, "full")
        if index.hidden is not None:  # they test the mining, and are not missing
            truth[index.hidden.entries(ids)] = -1
        # Pairs that are unknown in the full labels do not count.
        open_pairs = (index.labels_of(ids, "given") != 1) & (truth != -1)
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
