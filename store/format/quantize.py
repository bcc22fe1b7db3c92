"""Heatmaps in 255 levels from 0 to 1, a byte each: what the codec `uint8` keeps of them.

Levels are dense near 0 and 1, where many cells of a heatmap are almost equal: with as many even steps the
pointing game of the quickstart loses 2 points, with these 0.4. A value between two levels goes to either by
chance, more often to the nearer one, so that its mean over epochs is exact. The nearest level alone would
swallow every update of a running average that is smaller than half a step.

The chance is a function of sample, epoch and place in the row, so it is the same in any batch, on any number
of processes and after a resume. Rows are rounded once, when they enter the store; a value on a level stays.
"""

import numpy as np
from numpy.typing import NDArray

from bigscl.store.format.spec import Array, GroupSpec, Rows

# In 257 steps of the angle the squared sine has 255 different float16: all that a byte has room for.
LEVELS: NDArray[np.float16] = np.unique((np.sin(np.arange(258) * np.pi / 514) ** 2).astype(np.float16))
MISSING = 255
"""The byte that is no level: it fills chunks that are missing."""
BLOCK = 2**18
"""Cells that are looked up at a time."""


def _places() -> NDArray[np.uint16]:
    """Where each float16 lies, by its bits: 256 times the level below it, plus 256ths towards the next."""
    places = np.full(2**16, MISSING * 256, np.uint16)
    # In [0, 1] the bits of halves count up with their values, which are whole multiples of 2**-24.
    halves = np.arange(np.float16(1).view(np.uint16) + 1, dtype=np.uint16).view(np.float16)
    values, levels = ((array * np.float64(2**24)).astype(np.int64) for array in (halves, LEVELS))
    below = np.searchsorted(levels, values, "right") - 1
    steps = np.diff(levels, append=levels[-1] + 1)[below]
    places[: len(halves)] = below * 256 + (512 * (values - levels[below]) + steps) // (2 * steps)
    return places


_PLACES = _places()
_VALUES = np.append(LEVELS, np.float16(np.nan))
_NEAREST = ((_PLACES + np.uint16(128)) >> 8).astype(np.uint8)


def to_bytes(values: Array) -> NDArray[np.uint8]:
    """The nearest levels of float16 values in [0, 1]; MISSING for all others."""
    return _looked_up(_NEAREST, values.view(np.uint16))


def from_bytes(levels: Array) -> NDArray[np.float16]:
    return _looked_up(_VALUES, levels)


def _looked_up(table: Array, places: Array) -> Array:
    """`table[places]`, block by block: numpy makes eight bytes of each place first."""
    flat = places.reshape(-1)
    found = np.empty(flat.shape, table.dtype)
    for first in range(0, len(flat), BLOCK):
        found[first : first + BLOCK] = table.take(flat[first : first + BLOCK])
    return found.reshape(places.shape)


def as_stored(rows: Rows, group: GroupSpec, ids: NDArray[np.int64], epoch: int) -> Rows:
    """The rows of these samples as a group of this codec holds them, after an update in this epoch."""
    if group.codec != "uint8" or rows.heatmaps is None:
        return rows
    return rows.replace(heatmaps=rounded(rows.heatmaps, ids, epoch))


def rounded(values: Array, ids: NDArray[np.int64], epoch: int) -> NDArray[np.float16]:
    """Rows of float16 values in [0, 1], each value on one of the two levels around it."""
    flat = values.reshape(len(ids), -1)
    # Multiples of the golden ratio cover a row evenly; each sample and epoch shifts them by its own amount.
    spread, shifts = (np.arange(flat.shape[1]) * 40503).astype(np.uint16), _shifts(ids, epoch)
    found = np.empty(flat.shape, np.float16)
    step = max(1, BLOCK // max(1, flat.shape[1]))
    for first in range(0, len(ids), step):
        rows = slice(first, first + step)
        places = _PLACES.take(flat[rows].view(np.uint16)) + ((shifts[rows, None] + spread) >> 8)
        found[rows] = _VALUES.take(places >> 8)
    return found.reshape(values.shape)


def _shifts(ids: NDArray[np.int64], epoch: int) -> NDArray[np.uint16]:
    """A number of each sample and epoch that looks random: the finalizer of splitmix64."""
    mixed = ids.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed += np.uint64((epoch * 0xD1B54A32D192ED03) % 2**64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return ((mixed ^ (mixed >> np.uint64(31))) >> np.uint64(48)).astype(np.uint16)
