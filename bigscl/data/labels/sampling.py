"""Draw given labels from full ones, as if people had labelled only a few classes of each image."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from bigscl.common.bounds import Count, CountOrZero, Share
from bigscl.data.index import Index, with_fingerprint
from bigscl.store import Ragged

BLOCK = 4096
HIDING = 2
"""Stream of random numbers of hidden labels; 0 and 1 are those of drawn ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenConfig:
    """Given labels drawn from the full ones, in place of those in the shards."""

    seed: CountOrZero
    """Seed of the draw."""
    positives: Count = 1
    """Given positives per image; images with fewer keep all."""
    negatives: CountOrZero = 0
    """Given negatives per image."""
    noise: Share = 0.0
    """Share of the images in which one given positive is replaced by a class that they do not show."""


def draw_given(
    index: Index,
    seed: int,
    positives: int = 1,
    negatives: int = 0,
    *,
    noise: float = 0.0,
    weights: NDArray[np.float64] | None = None,
) -> Index:
    """Return the same samples with other given labels, drawn from the full ones.

    A sample with fewer labels than requested keeps all of them. `weights` of the full labels make some of
    them likelier, and in a share `noise` of the images one positive is wrong; the others are the same as
    without noise.
    """
    full = index.full_labels()
    keys = (np.array([seed, stream], np.uint64) for stream in (0, 1))
    random, wrong = (np.random.Generator(np.random.Philox(key=key)) for key in keys)
    kept = draw_positives(full, positives, random, weights)
    if noise:
        # A class that is given by mistake is not drawn as absent.
        kept, full = flip_positives(kept, full, noise, index.num_classes, wrong)
    absent = draw_negatives(full, index.ids(), negatives, index.num_classes, random)
    return with_fingerprint(replace(index, given=kept, negatives=absent))


def hide_given(index: Index, share: float, seed: int = 0) -> Index:
    """Return the same samples without one given label of a share of those that have any.

    Exactly `round(share * samples)` of them, drawn uniformly; `hidden` of the index has these labels.
    """
    random = np.random.Generator(np.random.Philox(key=np.array([seed, HIDING], np.uint64)))
    given = index.given
    able = np.flatnonzero(given.lengths > 0)
    rows = np.sort(random.permutation(able)[: round(share * len(able))])
    places = given.offsets[rows] + random.integers(0, given.lengths[rows])
    lengths = np.zeros(len(given), np.int64)
    lengths[rows] = 1
    kept = Ragged.from_lengths(given.lengths - lengths, np.delete(given.values, places))
    hidden = Ragged.from_lengths(lengths, given.values[places])
    return with_fingerprint(replace(index, given=kept, hidden=hidden))


def with_hidden(index: Index) -> Index:
    """Return the samples with all their given labels, also those that are hidden from training."""
    if index.hidden is None:
        return index
    return replace(index, given=_joined(index.given, index.hidden), hidden=None)


def draw_positives(
    full: Ragged, count: int, random: np.random.Generator, weights: NDArray[np.float64] | None = None
) -> Ragged:
    """Return at most `count` values of each row, ascending, drawn one after the other by their weights.

    `weights` has one number of at least 0 for each of `full.values`; by default all are equal. Values of
    weight 0 come after all others of their row; among themselves they are equal.
    """
    rows = np.repeat(np.arange(len(full)), full.lengths)
    turns = random.random(len(rows))
    if weights is None:
        order = np.lexsort((turns, rows))
    else:
        # The first of several exponential waiting times is that of value i with probability w_i / sum of w.
        turns = -np.log1p(-turns) / np.where(weights > 0, weights, 1.0)
        order = np.lexsort((turns, weights <= 0, rows))
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


def flip_positives(
    given: Ragged, full: Ragged, share: float, num_classes: int, random: np.random.Generator
) -> tuple[Ragged, Ragged]:
    """Return `given` with wrong classes in a share of its rows, and `full` with these classes added.

    The share is of the rows that can be wrong: with a given positive, and a class that is not in the full
    labels. Exactly `round(share * rows)` of them, drawn uniformly, get one wrong class, drawn uniformly among
    those that they do not show, in place of one of their positives.
    """
    able = np.flatnonzero((given.lengths > 0) & (full.lengths < num_classes))
    rows = np.sort(random.permutation(able)[: round(share * len(able))])
    replaced = given.offsets[rows] + random.integers(0, given.lengths[rows])
    wrong = draw_negatives(full, rows, 1, num_classes, random)
    values = given.values.copy()
    values[replaced] = wrong.values
    return _ascending(Ragged(given.offsets, values)), _joined(full, wrong)


def _ascending(rows: Ragged) -> Ragged:
    owners = np.repeat(np.arange(len(rows)), rows.lengths)
    return Ragged(rows.offsets, rows.values[np.lexsort((rows.values, owners))])


def _joined(one: Ragged, other: Ragged) -> Ragged:
    """Return the values of both in each row, ascending."""
    owners = np.concatenate([np.repeat(np.arange(len(part)), part.lengths) for part in (one, other)])
    values = np.concatenate([one.values, other.values])
    order = np.lexsort((values, owners))
    return Ragged.from_lengths(one.lengths + other.lengths, values[order])
