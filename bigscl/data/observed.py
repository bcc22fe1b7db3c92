"""Draw observed labels from full ones, as if annotators had named only a few classes of each image."""

import numpy as np
from numpy.typing import NDArray

from bigscl.data.ragged import Ragged

BLOCK = 4096


def draw_positives(full: Ragged, count: int, random: np.random.Generator) -> Ragged:
    """Return at most `count` values of each row, drawn uniformly, ascending."""
    rows = np.repeat(np.arange(len(full)), full.lengths)
    order = np.lexsort((random.random(len(rows)), rows))
    place_in_row = np.arange(len(rows)) - full.offsets[rows]
    kept = np.sort(order[place_in_row < count])
    return Ragged.from_lengths(np.minimum(full.lengths, count), full.values[kept])


def draw_negatives(
    full: Ragged, ids: NDArray[np.int64], count: int, num_classes: int, random: np.random.Generator
) -> Ragged:
    """Return at most `count` classes that are not in each row of `ids`, drawn uniformly, ascending."""
    lengths = np.zeros(len(full), np.int64)
    drawn = [np.empty(0, full.values.dtype)]
    # In blocks, so that memory does not grow with the number of samples.
    for block in np.array_split(ids, -(-len(ids) // BLOCK)) if count else []:
        places = random.random((len(block), num_classes))
        places[full.entries(block)] = 2.0
        ranks = np.argsort(np.argsort(places, axis=1), axis=1)
        chosen = (ranks < count) & (places < 2.0)
        lengths[block] = chosen.sum(axis=1)
        drawn.append(np.nonzero(chosen)[1].astype(full.values.dtype))
    return Ragged.from_lengths(lengths, np.concatenate(drawn))
