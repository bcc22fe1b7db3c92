"""The exact ranking behind a selection: for each class the samples of highest score, in numpy alone.

A sample competes for a class with one integer: its class, its score's bits and its id, packed so that larger
means earlier in the ranking. Scores lie in 0 to 1, so their float16 bits order like the scores and need 14
bits; ids are stored inverted, so that of equal scores the lowest id wins. Keys are unique, so no tie is left.

Each rank reads its scores once and keeps the best keys of every class. Lower keys are dropped at once, so
fewer and fewer new keys are kept. Rank 0 ranks the keys of all ranks.
"""

# Shapes: L classes, n rows of a chunk.

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bigscl.store import Transport
from bigscl.user_error import UserError

SCORE_BITS = 14
ONE = int(np.float16(1).view(np.uint16))
NOTHING = np.uint64(2**64 - 1)
"""A floor that no key exceeds: the floor of a class that expects no positives."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cuts:
    """A cut per class, as `bigscl.method.selection.Selection` has them, in numpy."""

    tau: NDArray[np.float16]
    last_id: NDArray[np.int64]
    num_expected: NDArray[np.int64]


def rank(
    chunks: Iterable[tuple[NDArray[np.int64], NDArray[np.float16]]],
    num_expected: NDArray[np.int64],
    transport: Transport,
    *,
    gather_bytes: int = 2**26,
) -> Cuts:
    """Return the cuts of `bigscl.method.selection.select`, on every rank."""
    contenders = _Contenders(num_expected)
    for ids, scores in chunks:
        contenders.add(ids, scores)
    cuts = _merge(contenders, transport, gather_bytes)
    payload = transport.broadcast(None if cuts is None else cuts.last_id.tobytes() + cuts.tau.tobytes())
    last_id = np.frombuffer(payload, np.int64, len(num_expected))
    tau = np.frombuffer(payload, np.float16, offset=last_id.nbytes)
    return Cuts(tau=tau.copy(), last_id=last_id.copy(), num_expected=num_expected)


def _merge(contenders: "_Contenders", transport: Transport, gather_bytes: int) -> Cuts | None:
    """Return the cuts over the contenders of all ranks, on rank 0; None elsewhere."""
    contenders.compact()
    merged = _Contenders(contenders.num_expected)
    keys_per_rank = gather_bytes // (contenders.best.itemsize * transport.world_size)
    for first, last in _blocks(contenders.num_expected, keys_per_rank):
        payloads = transport.gather(contenders.of_classes(first, last).tobytes())
        if payloads is not None:
            merged.pending = [np.frombuffer(payload, np.uint64) for payload in payloads]
            merged.compact()
    return merged.cuts() if transport.rank == 0 else None


def _blocks(sizes: NDArray[np.int64], limit: int) -> Iterator[tuple[int, int]]:
    """Yield ranges [first, last) of sizes whose sum stays within the limit, or that have a single size."""
    first, total = 0, 0
    for position, size in enumerate(sizes.tolist()):
        if position > first and total + size > limit:
            yield first, position
            first, total = position, 0
        total += size
    if len(sizes):
        yield first, len(sizes)


class _Contenders:
    """The best keys of every class among the samples added so far.

    Invariant: a sample among the `num_expected[i]` best of class i so far has its key in `best` or `pending`;
    `floor[i]` is the worst key that class i kept once it had enough keys, else 0.
    """

    def __init__(self, num_expected: NDArray[np.int64]) -> None:
        num_classes = len(num_expected)
        class_bits = max(1, (num_classes - 1).bit_length())
        self.num_expected = num_expected
        self.id_bits = np.uint64(64 - SCORE_BITS - class_bits)
        self.max_id = 2 ** int(self.id_bits) - 1
        self.first_keys = np.arange(num_classes, dtype=np.uint64) << np.uint64(64 - class_bits)
        self.floor = np.where(num_expected > 0, np.uint64(0), NOTHING)
        self.best = np.empty(0, np.uint64)
        self.pending: list[NDArray[np.uint64]] = []
        self.num_pending = 0

    def add(self, ids: NDArray[np.int64], scores: NDArray[np.float16]) -> None:
        """Add samples to the ranking of every class."""
        bits = self._checked(ids, scores)
        # Blocks of half a megabyte: three passes over a block in the cache cost little more than one.
        rows = max(1, 2**18 // max(1, bits.shape[1]))
        for start in range(0, len(ids), rows):
            self._add_block(ids[start : start + rows], bits[start : start + rows])
            if self.num_pending > max(2**20, len(self.best)):
                self.compact()

    def compact(self) -> None:
        """Keep the `num_expected` best keys of each class, in order; the worst of them is its floor."""
        keys = np.sort(np.concatenate([self.best, *self.pending]))
        starts = np.searchsorted(keys, self.first_keys)
        ends = np.append(starts[1:], len(keys))
        kept_from = np.maximum(starts, ends - self.num_expected)
        enough = (self.num_expected > 0) & (ends - starts >= self.num_expected)
        self.floor[enough] = keys[kept_from[enough]]
        self.best = keys[np.arange(len(keys)) >= np.repeat(kept_from, ends - starts)]
        self.pending, self.num_pending = [], 0

    def of_classes(self, first: int, last: int) -> NDArray[np.uint64]:
        """Return the best keys of classes first to last - 1, after `compact`."""
        bounds = np.append(np.searchsorted(self.best, self.first_keys), len(self.best))
        return self.best[bounds[first] : bounds[last]]

    def cuts(self) -> Cuts:
        """Return the worst expected positive of each class, after `compact`."""
        bits, ids = self._unpack(self.floor)
        # Where a class has room left, the floor 0 unpacks to score 0 and the largest id: all are expected.
        bits[self.floor == NOTHING], ids[self.floor == NOTHING] = ONE, -1
        return Cuts(tau=bits.view(np.float16), last_id=ids, num_expected=self.num_expected)

    def _add_block(self, ids: NDArray[np.int64], bits: NDArray[np.uint16]) -> None:
        floor_bits, floor_ids = self._unpack(self.floor)
        # A score equal to the floor needs a lower id, which most chunks do not have.
        needed = floor_bits + (floor_ids <= ids.min())
        rows, classes = np.divmod(np.flatnonzero(bits >= needed), bits.shape[1])
        keys = self._pack(classes, bits[rows, classes], ids[rows])
        keys = keys[keys > self.floor[classes]]
        self.pending.append(keys)
        self.num_pending += len(keys)

    def _pack(
        self, classes: NDArray[np.int64], bits: NDArray[np.uint16], ids: NDArray[np.int64]
    ) -> NDArray[np.uint64]:
        inverted: NDArray[np.uint64] = (self.max_id - ids).astype(np.uint64)
        return self.first_keys[classes] | (bits.astype(np.uint64) << self.id_bits) | inverted

    def _unpack(self, keys: NDArray[np.uint64]) -> tuple[NDArray[np.uint16], NDArray[np.int64]]:
        """Return the score bits and the ids in keys."""
        bits = (keys >> self.id_bits) & np.uint64(2**SCORE_BITS - 1)
        ids = self.max_id - (keys & np.uint64(self.max_id)).astype(np.int64)
        return bits.astype(np.uint16), ids

    def _checked(self, ids: NDArray[np.int64], scores: NDArray[np.float16]) -> NDArray[np.uint16]:
        """Return the bits of the scores; raise UserError if they cannot be ranked."""
        expected = (len(ids), len(self.num_expected))
        if scores.dtype != np.float16 or scores.shape != expected:
            raise UserError(
                f"scores: found {scores.dtype} {list(scores.shape)}, expected float16 {list(expected)}"
            )
        # The key 0 is the floor of a class that has room, so the largest id stays unused.
        if len(ids) and not 0 <= ids.min() <= ids.max() < self.max_id:
            raise UserError(f"ids: found {ids.min()} to {ids.max()}, expected 0 to {self.max_id - 1}")
        bits = np.ascontiguousarray(scores).view(np.uint16)
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
