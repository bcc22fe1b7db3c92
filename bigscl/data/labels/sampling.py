"""Draw given labels from full ones, as if people had labelled only a few classes of each image."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from bigscl.common.bounds import Count, CountOrZero
from bigscl.data.index import Index, with_fingerprint
from bigscl.store import Ragged

BLOCK = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenConfig:
    """Given labels drawn from the full ones, in place of those in the shards."""

    seed: CountOrZero
    """Seed of the draw."""
    positives: Count = 1
    """Given positives per image; images with fewer keep all."""
    negatives: CountOrZero = 0
    """Given negatives per image."""


def draw_given(index: Index, seed: int, positives: int = 1, negatives: int = 0) -> Index:
    """Return the same samples with other given labels, drawn uniformly from the full ones.

    A sample with fewer labels than requested keeps all of them.
    """
    full = index.full_labels()
    random = np.random.Generator(np.random.Philox(key=np.array([seed, 0], np.uint64)))
    kept = draw_positives(full, positives, random)
    absent = draw_negatives(full, index.ids(), negatives, index.num_classes, random)
    return with_fingerprint(replace(index, given=kept, negatives=absent))


def draw_positives(full: Ragged, count: int, random: np.random.Generator) -> Ragged:
    """Return at most `count` values of each row, ascending, drawn uniformly."""
    rows = np.repeat(np.arange(len(full)), full.lengths)
    order = np.lexsort((random.random(len(rows)), rows))
    turn_in_row = np.arange(len(rows)) - full.offsets[rows]
    kept = np.sort(order[turn_in_row < count])
    return Ragged.from_lengths(np.minimum(full.lengths, count), full.values[kept])


def draw_negatives(
    full: Ragged, ids: NDArray[np.int64], count: int, num_classes: int, random: np.random.Generator
) -> Ragged:
    """Return at most `count` classes that are not in each row of `ids`, drawn uniformly, ascending."""
    lengths = np.zeros(len(full), np.int64)
    drawn = [np.empty(0, full.values.dtype)]
    # In blocks, so that memory does not grow with the number of samples.
    for block in np.array_split(ids, -(-len(ids) // BLOCK)) if count else []:
        turns = random.random((len(block), num_classes))
        turns[full.entries(block)] = 2.0
        ranks = np.argsort(np.argsort(turns, axis=1), axis=1)
        chosen = (ranks < count) & (turns < 2.0)
        lengths[block] = chosen.sum(axis=1)
        drawn.append(np.nonzero(chosen)[1].astype(full.values.dtype))
    return Ragged.from_lengths(lengths, np.concatenate(drawn))
