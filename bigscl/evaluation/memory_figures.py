"""Figures of a run from its memory: how good mined positives are, and an offset for its logits."""

from dataclasses import dataclass

import numpy as np
import torch

from bigscl.common.user_error import UserError
from bigscl.config import Config
from bigscl.data.index import Index, true_labels
from bigscl.data.labels.training_labels import hidden_counts
from bigscl.memory.snapshot_state import SnapshotState
from bigscl.selection.k import estimate_k, has_full_labels
from bigscl.selection.ranking import select
from bigscl.selection.thresholds import ONE, expected_counts
from bigscl.store import NOT_KEPT, Answered, HeatmapStore, KeptScores, SingleProcess, label_counts
from bigscl.training.run_folder import Data, open_data, read_store

# Shapes: n images of a shard, L classes.


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


# An offset of the logits
#
# Some losses leave all scores too high or too low, and rank well. K says how many positives the training
# images have, so the right threshold is the score that so many pairs of image and class reach; no full labels
# are needed. Scores are the mean of the last predictions of each image, without what is left of their initial
# values. Adding minus the logit of that score to all logits moves the threshold to 0.5, and changes no
# ranking. One number for all classes: one per class follows the errors of K of single classes.


@dataclass(frozen=True, slots=True, kw_only=True)
class Offset:
    """What is added to all logits, and why."""

    value: float
    positives: int
    """Positives that the training images are expected to have."""
    num_samples: int
    snapshot: int
    """Snapshot of the memory whose scores were counted."""

    @property
    def threshold(self) -> float:
        """The score before that has 0.5 after it."""
        return float(torch.sigmoid(torch.tensor(-self.value, dtype=torch.float64)))

    def __str__(self) -> str:
        return (
            f"{self.value:+.3f}: a score of {self.threshold:.3f} becomes 0.5, which "
            f"{self.positives / self.num_samples:.2f} classes per training image reach (snapshot "
            f"{self.snapshot})"
        )


def memory_offset(config: Config) -> Offset:
    """Return the offset that the memory of a run suggests; UserError if it cannot, with the reason."""
    if config.store.kind != "disk":
        raise UserError(f"offset: store.kind {config.store.kind} leaves no memory to take it from")
    data = open_data(config)
    positives = _expected_positives(config, data)
    with read_store(config, data.labelled) as store:
        score = score_reached_by(store, positives)
        return Offset(
            value=float(np.log(1 / score - 1)),
            positives=positives,
            num_samples=data.train.num_samples,
            snapshot=store.snapshot.id,
        )


def _expected_positives(config: Config, data: Data) -> int:
    """Return how many positives the training images have: K for each label, or all labels if known."""
    if config.data.labels == "full":
        return len(data.annotations.given.values)
    k = data.positives_per_image if config.selection.K == "auto" else float(config.selection.K)
    if k is None:
        if data.val is None or not has_full_labels(data.val):
            raise UserError(
                "offset: K is not known. Give selection.K, or data.val with all labels of each image."
            )
        k = estimate_k(torch.from_numpy(true_labels(data.val, data.val.ids())[0]))
    labels = label_counts(data.annotations, data.answered) + hidden_counts(data.train)
    return round(k * int(labels.sum()))


def score_reached_by(store: HeatmapStore, num_pairs: int) -> float:
    """Return the score that so many pairs of image and class reach, without initial values, in 0 to 1."""
    counts = np.zeros(ONE + 1, np.int64)
    for _, scores in store.seen_scores_by_shard(range(store.spec.num_shards)):
        bits = scores.astype(np.float16).view(np.uint16)
        counts += np.bincount(bits.reshape(-1), minlength=ONE + 1)
    reached = np.cumsum(counts[::-1])[::-1]
    score = np.uint16(np.flatnonzero(reached >= min(num_pairs, reached[0]))[-1]).view(np.float16)
    if not 0 < score < 1:
        raise UserError(
            f"offset: {num_pairs:,} pairs of image and class reach a score of {float(score):g} in the "
            f"memory, expected one between 0 and 1. Train for more epochs."
        )
    return float(score)
