"""Exact cuts over all ranks: for each class the lowest key that is selected.

A sample competes for a class with one integer, its key: class, bits of the score, and id. Scores lie in 0 to
1, so their float16 bits order like the scores and need 14 bits; ids are stored inverted, so that of equal
scores the lowest id wins. Keys are unique, so no tie is left: the lowest selected key of a class says which
samples are selected.

Ranks find the cuts together, from the highest bits to the lowest. They count their keys by the next 7 bits
and sum the counts: that gives the next bits of each cut, and only keys with these bits are looked at further.
As soon as few keys are left, mostly after the bits of the score, rank 0 gathers them and picks the cuts.
"""

# Shapes: L classes, n samples, k keys.

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bigscl.common.user_error import UserError
from bigscl.selection.thresholds import ONE, Thresholds
from bigscl.store import Array, KeptScores, Ranked, Transport

SCORE_BITS = 14
DIGIT_BITS = 7
"""Keys are counted by so many bits at a time: 128 counts a class."""
NOTHING = np.uint64(2**64 - 1)
"""A cut that no key reaches: that of a class that expects no positives."""
GATHER_KEYS = 2**17
"""So many keys of all ranks are few."""

Keys = NDArray[np.uint64]


class KeyLayout:
    """Where class, score and id are in a key: as many bits as possible are left to ids."""

    def __init__(self, num_classes: int) -> None:
        self.num_classes = num_classes
        self.class_shift = 64 - max(1, (num_classes - 1).bit_length())
        self.id_bits = self.class_shift - SCORE_BITS
        self.max_id = (1 << self.id_bits) - 1
        """Ids are below this one: the key 0 is the cut of a class that takes all."""
        self.first_keys = np.arange(num_classes, dtype=np.uint64) << np.uint64(self.class_shift)
        """[L]: below all keys of each class."""

    def pack(self, classes: NDArray[np.int64], bits: NDArray[np.uint16], ids: NDArray[np.int64]) -> Keys:
        """Return the keys [k] of samples for classes, by the bits of their scores."""
        inverted: Keys = (self.max_id - ids).astype(np.uint64)
        return self.first_keys[classes] | (bits.astype(np.uint64) << np.uint64(self.id_bits)) | inverted

    def classes_of(self, keys: Keys) -> NDArray[np.int64]:
        return (keys >> np.uint64(self.class_shift)).view(np.int64)

    def bits_of(self, keys: Keys) -> NDArray[np.uint16]:
        return ((keys >> np.uint64(self.id_bits)) & np.uint64(2**SCORE_BITS - 1)).astype(np.uint16)

    def ids_of(self, keys: Keys) -> NDArray[np.int64]:
        return self.max_id - (keys & np.uint64(self.max_id)).view(np.int64)

    def reaching(self, cuts: Keys, keys: Keys) -> Keys:
        """Return the keys that are not below the cut of their class."""
        return keys[keys >= cuts[self.classes_of(keys)]]

    def thresholds(self, cuts: Keys, numbers: NDArray[np.int64]) -> Thresholds:
        """Return the cuts as thresholds of so many positives of each class."""
        bits, ids = self.bits_of(cuts), self.ids_of(cuts)
        # The cut 0 of a class that takes all is score 0 and the largest id.
        bits[cuts == NOTHING], ids[cuts == NOTHING] = ONE, -1
        return Thresholds(score=bits.view(np.float16), tie_id=ids, num_expected=numbers)

    # From the scores of samples: what follows is all that knows how they are kept.

    def count(self, ids: NDArray[np.int64], scores: Ranked) -> NDArray[np.int64]:
        """Return how many scores there are by class and first digit, [128 L]; of kept ones only these."""
        classes, values = np.arange(self.num_classes), scores
        if isinstance(scores, KeptScores):
            classes, values = scores.classes.astype(np.int64), scores.values
        assert isinstance(values, np.ndarray)
        digits = self._checked(ids, values, classes.shape[-1])
        places = (classes << DIGIT_BITS) + (digits >> (SCORE_BITS - DIGIT_BITS))
        return np.bincount(places.ravel(), minlength=self.num_classes << DIGIT_BITS)

    def keys(self, ids: NDArray[np.int64], scores: Ranked, floor: Keys) -> Keys:
        """Return the keys of samples that are not below the floor of their class; of kept scores only."""
        if isinstance(scores, KeptScores):
            bits = self._checked(ids, scores.values, scores.classes.shape[1])
            packed = self.pack(scores.classes.astype(np.int64), bits, ids[:, None])
            return self.reaching(floor, packed.ravel())
        bits = self._checked(ids, scores, self.num_classes)
        # Blocks of half a megabyte: three passes over a block in the cache cost little more than one.
        rows = max(1, 2**18 // max(1, bits.shape[1]))
        parts = []
        for start in range(0, len(ids), rows):
            own_ids, own_bits = ids[start : start + rows], bits[start : start + rows]
            # A score equal to that of the floor needs an id as low, which most blocks do not have.
            needed = self.bits_of(floor) + (self.ids_of(floor) < own_ids.min())
            places, classes = np.divmod(np.flatnonzero(own_bits >= needed), bits.shape[1])
            parts.append(self.reaching(floor, self.pack(classes, own_bits[places, classes], own_ids[places])))
        return joined(parts)

    def _checked(self, ids: NDArray[np.int64], scores: Array, width: int) -> NDArray[np.uint16]:
        """Return the bits [n,width] of the scores; raise UserError if they cannot be ranked."""
        expected = (len(ids), width)
        if scores.dtype != np.float16 or scores.shape != expected:
            raise UserError(
                f"scores: found {scores.dtype} {list(scores.shape)}, expected float16 {list(expected)}"
            )
        if len(ids) and not 0 <= ids.min() <= ids.max() < self.max_id:
            raise UserError(f"ids: found {ids.min()} to {ids.max()}, expected 0 to {self.max_id - 1}")
        bits: NDArray[np.uint16] = np.ascontiguousarray(scores).view(np.uint16)
        if bits.max(initial=0) > ONE:
            bits = (scores + np.float16(0)).view(np.uint16)  # makes -0 a 0
        if bits.max(initial=0) > ONE:
            row = int(np.flatnonzero((bits > ONE).any(1))[0])
            value = scores[row][bits[row] > ONE][0]
            raise UserError(
                f"scores: sample {ids[row]} has {value}, expected 0 to 1. The run may have diverged: "
                f"resume from an earlier checkpoint, with a lower learning rate."
            )
        return bits


def joined(parts: list[Keys]) -> Keys:
    return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, np.uint64), *parts])


def find_cuts(
    keys: Keys,
    wanted: NDArray[np.int64],
    layout: KeyLayout,
    transport: Transport,
    gather_keys: int = GATHER_KEYS,
) -> Keys:
    """Return for each class i the lowest of the `wanted[i]` highest keys of all ranks, on every rank.

    It is 0 if there are fewer keys, and `NOTHING` if none is wanted. Each rank passes its own keys, in any
    order. Rank 0 gathers keys as soon as no more than `gather_keys` are left.
    """
    cuts, left, is_reached = layout.first_keys, wanted, wanted > 0
    shift = layout.class_shift
    while shift:
        width = min(DIGIT_BITS, shift)
        shift -= width
        # Number of the class and the next bits: the bits between them are those of the cut.
        places = keys >> np.uint64(layout.class_shift)
        places <<= np.uint64(width)
        places |= (keys >> np.uint64(shift)) & np.uint64(2**width - 1)
        counts = np.bincount(places.view(np.int64), minlength=layout.num_classes << width)
        part = part_of_cut(transport.sum_counts(counts), left)
        is_reached = is_reached & part.is_reached
        left = left - part.above
        cuts = cuts | (part.number.astype(np.uint64) << np.uint64(shift))
        is_in_part = np.zeros(len(counts), bool)
        is_in_part[((np.arange(layout.num_classes) << width) + part.number)[is_reached]] = True
        keys = keys[is_in_part[places]]
        if part.size[is_reached].sum() <= gather_keys:
            cuts = _pick(keys, left, is_reached, layout, transport)
            break
    return np.where(is_reached, cuts, np.where(wanted > 0, np.uint64(0), NOTHING))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PartOfCut:
    """The part of the range of a class in which its cut lies, [L]."""

    number: NDArray[np.int64]
    """Counted from the lowest part."""
    above: NDArray[np.int64]
    """Keys in higher parts."""
    size: NDArray[np.int64]
    """Keys in this part."""
    is_reached: NDArray[np.bool_]
    """Whether the class has as many keys as are wanted."""


def part_of_cut(counts: NDArray[np.int64], wanted: NDArray[np.int64]) -> PartOfCut:
    """Return where the `wanted[i]` highest keys of class i end, from counts of keys by class and part."""
    counts = counts.reshape(len(wanted), -1)
    from_above = counts[:, ::-1].cumsum(axis=1)[:, ::-1]
    reaches = from_above >= wanted[:, None]
    number = np.maximum(reaches.sum(axis=1) - 1, 0)
    size = np.take_along_axis(counts, number[:, None], 1)[:, 0]
    above = np.take_along_axis(from_above, number[:, None], 1)[:, 0] - size
    return PartOfCut(number=number, above=above, size=size, is_reached=reaches[:, 0])


def _pick(
    keys: Keys, wanted: NDArray[np.int64], is_reached: NDArray[np.bool_], layout: KeyLayout, ranks: Transport
) -> Keys:
    """Return the cuts of the classes that have one, from the few keys of all ranks that are left."""
    payloads = ranks.gather(keys.tobytes())
    answer = None
    if payloads is not None:
        few = np.sort(np.frombuffer(b"".join(payloads), np.uint64))
        ends = np.append(np.searchsorted(few, layout.first_keys)[1:], len(few))
        cuts = np.zeros(layout.num_classes, np.uint64)
        cuts[is_reached] = few[(ends - wanted)[is_reached]]
        answer = cuts.tobytes()
    return np.frombuffer(ranks.broadcast(answer), np.uint64)
