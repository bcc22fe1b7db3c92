"""The epoch plan: which worker of which rank reads which samples, in which order.

It is a pure function of shard sizes, seed, epoch, world size and workers (and of the rows that an interrupted
epoch has visited), so every process knows it. Each rank has as many samples as the others: a shard on the
border of two ranks is trained by both, and written by the first of them. The batches of a rank are
divided among its streams, each of which a DataLoader worker reads; the loader takes one batch of each stream
in turn. So an epoch has no more steps than its samples fill, and all workers decode until the end.

No batch has a single sample, which batch normalisation cannot train on, unless the batch size is 1, the
dataset has one sample only, or an interrupted epoch has left one.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import zip_longest

import numpy as np
from numpy.typing import NDArray

from bigscl.common.user_error import UserError

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stream:
    """The shards that one worker reads, and the samples that it yields."""

    shards: Ids
    """Shards in the order in which they are read, each from front to back, some only in part."""
    ids: Ids
    """Samples in the order in which they are yielded."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    """The streams of every rank for one epoch, or for the rest of it."""

    batch_size: int
    """Samples per step and rank; the last two batches of a stream may be smaller, see `batch_lengths`."""
    streams: tuple[tuple[Stream, ...], ...]
    """By rank, then by worker in the order of their turns."""
    workers: int
    """Worker processes per rank; with 0 the rank reads its one stream itself."""
    writers: Ids = field(default_factory=lambda: np.empty(0, np.int64))
    """For each shard the rank that writes its rows: that of its first samples; empty if none are written."""

    def borrowed(self, rank: int) -> frozenset[int]:
        """Return the shards of which a rank trains samples, and that another one writes."""
        shards = np.unique(np.concatenate([stream.shards for stream in self.streams[rank]]))
        return frozenset(shards[self.writers[shards] != rank].tolist())

    @property
    def world_size(self) -> int:
        return len(self.streams)

    @property
    def num_steps(self) -> int:
        """The number of steps: the batches of the rank with most batches."""
        return max(self.num_batches(rank) for rank in range(self.world_size))

    def num_samples(self, rank: int) -> int:
        """Return the number of samples that a rank yields."""
        return sum(len(stream.ids) for stream in self.streams[rank])

    def num_batches(self, rank: int) -> int:
        """Return the number of batches that a rank yields."""
        return sum(len(batch_lengths(len(stream.ids), self.batch_size)) for stream in self.streams[rank])

    def batches(self, rank: int) -> Iterator[Ids]:
        """Yield the ids of each batch of a rank, in the order in which the loader delivers them."""
        parts = [self._batches_of(stream) for stream in self.streams[rank]]
        for turn in zip_longest(*parts):
            yield from (ids for ids in turn if ids is not None)

    def _batches_of(self, stream: Stream) -> Iterator[Ids]:
        first = 0
        for length in batch_lengths(len(stream.ids), self.batch_size):
            yield stream.ids[first : first + length]
            first += length


def batch_lengths(num_samples: int, batch_size: int) -> list[int]:
    """Return the lengths of the batches of a stream. The last two share if one would have a single sample.

    What is left after any number of these batches is divided into the others of them.
    """
    full, rest = divmod(num_samples, batch_size)
    if rest != 1 or not full or batch_size == 1:
        return [batch_size] * full + [rest] * (rest > 0)
    # Three samples in batches of two are one batch.
    shared = [3] if batch_size == 2 else [batch_size - 1, 2]
    return [batch_size] * (full - 1) + shared


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
    """Plan an epoch with every sample exactly once, in another order each epoch.

    `visited` marks the rows that this epoch has trained already. With the world size and workers of the run
    that visited them, the rest comes in the same batches and order as without the interruption.
    """
    _check(batch_size=(batch_size, 1), world_size=(world_size, 1), workers=(workers, 0))
    _check(shuffle_buffer=(shuffle_buffer, 1), seed=(seed, 0), epoch=(epoch, 0))
    random = np.random.Generator(np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64)))
    order = np.argsort(random.random(len(shard_sizes)))
    parts = _parts(ids_of_shards(order, shard_sizes, rows_per_shard), world_size, batch_size)
    writers, ranks = np.zeros(len(shard_sizes), np.int64), []
    for ids in parts:
        runs = _runs(ids, rows_per_shard, batch_size, max(1, workers))
        streams = [_shuffled(run, rows_per_shard, shuffle_buffer, random) for run in runs]
        ranks.append(streams if visited is None else _left(streams, visited, batch_size))
    for rank in reversed(range(world_size)):
        writers[parts[rank] // rows_per_shard] = rank
    return Plan(batch_size=batch_size, streams=tuple(map(tuple, ranks)), workers=workers, writers=writers)


def evaluation_plan(
    shard_sizes: Ids, rows_per_shard: int, *, batch_size: int, world_size: int = 1, workers: int = 0
) -> Plan:
    """Plan every sample exactly once, in the order of the shards; streams differ by at most one sample."""
    _check(batch_size=(batch_size, 1), world_size=(world_size, 1), workers=(workers, 0))
    ids = ids_of_shards(np.arange(len(shard_sizes)), shard_sizes, rows_per_shard)
    runs = np.array_split(ids, world_size * max(1, workers))
    streams = [Stream(shards=np.unique(run // rows_per_shard), ids=run) for run in runs]
    width = max(1, workers)
    return Plan(
        batch_size=batch_size,
        streams=tuple(tuple(streams[rank * width : (rank + 1) * width]) for rank in range(world_size)),
        workers=workers,
    )


def _parts(ids: Ids, world_size: int, batch_size: int) -> list[Ids]:
    """Divide the samples among the ranks: consecutive, in numbers that differ by at most one.

    Ranks stay empty where others would have a single sample.
    """
    filled = world_size if batch_size == 1 else max(1, min(world_size, len(ids) // 2))
    return [*np.array_split(ids, filled), *[ids[:0]] * (world_size - filled)]


def _runs(ids: Ids, rows_per_shard: int, batch_size: int, workers: int) -> list[Ids]:
    """Divide the samples of a rank into a run for each worker: the samples of every `workers`-th batch.

    A shard on the border of two runs is read by both workers at the same time, so that it is not in RAM for
    longer than others: every second worker reads its shards in reverse order.
    """
    lengths = batch_lengths(len(ids), batch_size)
    counts = [sum(lengths[worker::workers]) for worker in range(workers)]
    runs = np.split(ids, np.cumsum(counts)[:-1])
    return [_reversed(run, rows_per_shard) if worker % 2 else run for worker, run in enumerate(runs)]


def _reversed(run: Ids, rows_per_shard: int) -> Ids:
    """Return the samples with the last shard first, each shard in its order."""
    _, starts = _shards_of(run, rows_per_shard)
    return np.concatenate([run[:0], *np.split(run, starts[1:])[::-1]])


def _shards_of(run: Ids, rows_per_shard: int) -> tuple[Ids, Ids]:
    """Return the shards of a run in order, and where the samples of each start."""
    shards = run // rows_per_shard
    starts = np.flatnonzero(np.diff(shards, prepend=-1))
    return shards[starts], starts


def _shuffled(run: Ids, rows_per_shard: int, buffer: int, random: np.random.Generator) -> Stream:
    """Return the stream of some samples, each delayed by a random part of the buffer.

    A worker that reads the shards in order and yields in this order holds at most `buffer` samples at a time:
    what it holds at any moment was read within the last `buffer` places.
    """
    places = np.arange(len(run)) + buffer * random.random(len(run))
    return Stream(shards=_shards_of(run, rows_per_shard)[0], ids=run[np.argsort(places, kind="stable")])


def ids_of_shards(shards: Ids, sizes: Ids, rows_per_shard: int) -> Ids:
    """Return all samples of some shards, in order."""
    lengths = sizes[shards]
    positions = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    ids: Ids = np.repeat(shards * rows_per_shard, lengths) + positions
    return ids


def _left(streams: list[Stream], visited: NDArray[np.bool_], batch_size: int) -> list[Stream]:
    """Return the rest of a rank's streams, starting with the stream whose turn it is.

    A stream that yielded fewer batches comes before one that yielded more; empty streams come last.
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
            raise UserError(f"{name}: {value}, expected at least {least}")
