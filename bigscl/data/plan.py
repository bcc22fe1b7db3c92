"""The epoch plan: who reads which samples in which order, known to everyone before a byte is read.

It is a pure function of shard sizes, seed, epoch, world size and workers (and of the rows an interrupted
epoch has visited already). Shards go whole to one rank, and whole to one of its streams; a stream is what
one DataLoader worker reads. The loader takes one batch of each stream in turn.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stream:
    """What one worker reads and yields."""

    shards: Ids
    """Its shards, in the order in which it reads them, each from front to back."""
    ids: Ids
    """Its samples, in the order in which it yields them."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    """Every rank's streams for one epoch, or for what is left of it."""

    batch_size: int
    """Samples of a rank's step; the last batch of a stream may be smaller."""
    streams: tuple[tuple[Stream, ...], ...]
    """By rank, then by worker in the order of their turns."""
    workers: int
    """Worker processes of each rank; with 0 the rank reads its one stream itself."""

    @property
    def world_size(self) -> int:
        """How many ranks share the epoch."""
        return len(self.streams)

    @property
    def num_steps(self) -> int:
        """Steps of the epoch: as many as the batches of the rank that has most."""
        return max(self.num_batches(rank) for rank in range(self.world_size))

    def num_samples(self, rank: int) -> int:
        """Samples that a rank yields."""
        return sum(len(stream.ids) for stream in self.streams[rank])

    def num_batches(self, rank: int) -> int:
        """Batches that a rank yields."""
        return sum(-(-len(stream.ids) // self.batch_size) for stream in self.streams[rank])

    def batches(self, rank: int) -> Iterator[Ids]:
        """The ids of each batch of a rank, in the order in which the loader delivers them."""
        parts = [self._batches_of(stream) for stream in self.streams[rank]]
        for turn in zip_longest(*parts):
            yield from (ids for ids in turn if ids is not None)

    def _batches_of(self, stream: Stream) -> Iterator[Ids]:
        for first in range(0, len(stream.ids), self.batch_size):
            yield stream.ids[first : first + self.batch_size]


def training_plan(
    shard_sizes: Ids,
    rows_per_shard: int,
    *,
    seed: int,
    epoch: int,
    batch_size: int,
    world_size: int = 1,
    workers: int = 0,
    shuffle_buffer: int = 1000,
    visited: NDArray[np.bool_] | None = None,
) -> Plan:
    """Every sample exactly once, shuffled anew each epoch; ranks differ by at most one shard.

    `visited` tells, for each row, whether this epoch has had it already. With the topology of the run that
    visited them, what is left comes in the same batches and the same order as if nothing had happened.
    """
    _check(batch_size=(batch_size, 1), world_size=(world_size, 1), workers=(workers, 0))
    _check(shuffle_buffer=(shuffle_buffer, 1), seed=(seed, 0), epoch=(epoch, 0))
    random = np.random.Generator(np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64)))
    order = np.argsort(random.random(len(shard_sizes)))
    ranks = []
    for shards in _deal(order, shard_sizes, world_size):
        hands = _deal(shards, shard_sizes, max(1, workers))
        streams = [_shuffled(hand, shard_sizes, rows_per_shard, shuffle_buffer, random) for hand in hands]
        ranks.append(streams if visited is None else _left(streams, visited, batch_size))
    return Plan(batch_size=batch_size, streams=tuple(map(tuple, ranks)), workers=workers)


def evaluation_plan(
    shard_sizes: Ids, rows_per_shard: int, *, batch_size: int, world_size: int = 1, workers: int = 0
) -> Plan:
    """Every sample exactly once, in the order of the shards; streams differ by at most one sample."""
    _check(batch_size=(batch_size, 1), world_size=(world_size, 1), workers=(workers, 0))
    ids = _ids(np.arange(len(shard_sizes)), shard_sizes, rows_per_shard)
    runs = np.array_split(ids, world_size * max(1, workers))
    streams = [Stream(shards=np.unique(run // rows_per_shard), ids=run) for run in runs]
    width = max(1, workers)
    return Plan(
        batch_size=batch_size,
        streams=tuple(tuple(streams[rank * width : (rank + 1) * width]) for rank in range(world_size)),
        workers=workers,
    )


def _deal(shards: Ids, sizes: Ids, hands: int) -> list[Ids]:
    """Shards dealt out, the largest first and always to the hand with fewest samples; each keeps their order.

    So the largest hand exceeds the smallest by at most one shard.
    """
    owner = np.empty(len(shards), dtype=np.int64)
    heap = [(0, hand) for hand in range(hands)]
    for place in np.argsort(-sizes[shards], kind="stable").tolist():
        samples, owner[place] = heap[0]
        heapq.heapreplace(heap, (samples + int(sizes[shards[place]]), int(owner[place])))
    return [shards[owner == hand] for hand in range(hands)]


def _shuffled(
    shards: Ids, sizes: Ids, rows_per_shard: int, buffer: int, random: np.random.Generator
) -> Stream:
    """The stream of some shards, each sample put off by a random part of the buffer.

    Whoever reads the shards in order and yields in this order holds at most `buffer` samples at a time:
    what is held at any moment was read within the last `buffer` places.
    """
    ids = _ids(shards, sizes, rows_per_shard)
    places = np.arange(len(ids)) + buffer * random.random(len(ids))
    return Stream(shards=shards, ids=ids[np.argsort(places, kind="stable")])


def _ids(shards: Ids, sizes: Ids, rows_per_shard: int) -> Ids:
    """All samples of some shards, in order."""
    lengths = sizes[shards]
    positions = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    ids: Ids = np.repeat(shards * rows_per_shard, lengths) + positions
    return ids


def _left(streams: list[Stream], visited: NDArray[np.bool_], batch_size: int) -> list[Stream]:
    """What is left of a rank's streams, first the one whose turn it is.

    A stream that has had fewer batches than another is before its turn; streams with nothing left have none.
    """
    left, turns = [], []
    for stream in streams:
        ids = stream.ids[~visited[stream.ids]]
        batches_had = -(-(len(stream.ids) - len(ids)) // batch_size)
        turns.append((len(ids) == 0, batches_had))
        left.append(Stream(shards=stream.shards, ids=ids))
    return [left[place] for place in sorted(range(len(left)), key=turns.__getitem__)]


def _check(**bounds: tuple[int, int]) -> None:
    for name, (value, least) in bounds.items():
        if value < least:
            raise ValueError(f"{name}: {value}, expected at least {least}")
