"""The selection as it was: rank 0 gathers the best keys of every class from all ranks, and sorts them.

Kept as a reference for tests, and as what `epoch_end` compares with.
"""

# Shapes: L classes, n rows of a chunk.

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from bigscl.selection.ranking import Chunk, annotated_positives, expected_positives
from bigscl.selection.thresholds import ONE, Thresholds
from bigscl.store import Annotations, Transport

SCORE_BITS = 14
NOTHING = np.uint64(2**64 - 1)
"""A floor that no key exceeds: the floor of a class that expects no positives."""


def select_gathered(
    chunks: Iterable[Chunk],
    num_expected: NDArray[np.int64],
    transport: Transport,
    *,
    gather_bytes: int = 2**26,
    num_pseudo_positives: NDArray[np.int64] | None = None,
    annotations: Annotations | None = None,
) -> Thresholds:
    """Select the `num_expected[i]` samples of highest score as expected positives of each class i."""
    contenders = Contenders(num_expected)
    for ids, scores in chunks:
        contenders.add(ids, scores)
    merged = merge(contenders, transport, gather_bytes)
    floors = [num_expected, *([] if num_pseudo_positives is None else [num_pseudo_positives])]
    payload = None
    if merged is not None:
        thresholds = [merged.thresholds(numbers) for numbers in floors]
        counted = []
        if annotations is not None:
            ours = expected_positives(annotations, *merged.expected())
            counted = [annotated_positives(annotations) + ours]
        payload = b"".join(each.tobytes() for each in [*(each.tie_id for each in thresholds), *counted])
        payload += b"".join(each.score.tobytes() for each in thresholds)
    return _unpack_thresholds(transport.broadcast(payload), floors, has_positives=annotations is not None)


def _unpack_thresholds(payload: bytes, floors: list[NDArray[np.int64]], *, has_positives: bool) -> Thresholds:
    num_classes = len(floors[0])
    shape = len(floors) + has_positives, num_classes
    numbers = np.frombuffer(payload, np.int64, shape[0] * shape[1]).reshape(shape).copy()
    score = np.frombuffer(payload, np.float16, offset=numbers.nbytes).reshape(len(floors), num_classes).copy()
    first, *others = [
        Thresholds(score=score[n], tie_id=numbers[n], num_expected=floor) for n, floor in enumerate(floors)
    ]
    return replace(
        first,
        pseudo_positives=others[0] if others else None,
        positives=numbers[-1] if has_positives else None,
    )


def merge(contenders: "Contenders", transport: Transport, gather_bytes: int) -> "Contenders | None":
    """Return the best contenders of all ranks, on rank 0; None elsewhere."""
    contenders.compact()
    merged = Contenders(contenders.num_expected)
    keys_per_rank = gather_bytes // (contenders.best.itemsize * transport.world_size)
    for first, last in _blocks(contenders.num_expected, keys_per_rank):
        payloads = transport.gather(contenders.of_classes(first, last).tobytes())
        if payloads is not None:
            merged.pending = [np.frombuffer(payload, np.uint64) for payload in payloads]
            merged.compact()
    return merged if transport.rank == 0 else None


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


class Contenders:
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
        bits = np.ascontiguousarray(scores).view(np.uint16)
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

    def expected(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the ids and the classes of all expected positives, after `compact`."""
        classes = np.searchsorted(self.first_keys, self.best, side="right") - 1
        return self._unpack(self.best)[1], classes

    def thresholds(self, numbers: NDArray[np.int64]) -> Thresholds:
        """Return the worst of the best `numbers` of each class, at most `num_expected`, after `compact`."""
        starts = np.searchsorted(self.best, self.first_keys)
        ends = np.append(starts[1:], len(self.best))
        floor = np.where(numbers > 0, np.uint64(0), NOTHING)
        enough = (numbers > 0) & (ends - starts >= numbers)
        floor[enough] = self.best[(ends - numbers)[enough]]
        bits, ids = self._unpack(floor)
        # Where a class has room left, the floor 0 unpacks to score 0 and the largest id: all are expected.
        bits[floor == NOTHING], ids[floor == NOTHING] = ONE, -1
        return Thresholds(score=bits.view(np.float16), tie_id=ids, num_expected=numbers)

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
