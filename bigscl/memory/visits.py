"""Samples that an epoch has had: each is updated at most once, and each shard by one rank."""

import json
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bigscl.memory.lookup import ONCE, RepeatedSample
from bigscl.store import HeatmapStore, StoreError, Transport, on_rank_zero


class EpochVisits:
    """The rows that an epoch has updated or skipped, on one rank."""

    # Invariant: `rows` are those that this rank has updated or skipped in the epoch, or that were so
    # before the memory was opened. A row is looked up and updated only while it is not among them,
    # so that the batch has what the epoch before has left, whatever the threads have written meanwhile.

    def __init__(self, store: HeatmapStore, epoch: int, skipped: Sequence[int], ranks: Transport) -> None:
        """Continue the epoch of the store's snapshot, in which samples were skipped, or begin another one."""
        self.epoch = epoch
        self._spec, self._ranks = store.spec, ranks
        within = store.snapshot.epoch == epoch
        self.rows = np.zeros(store.spec.num_rows, bool)
        if within:
            self.rows = _read_rows(store, epoch, ranks)
            self.rows[list(skipped)] = True
        self._skipped = list(skipped) if within and ranks.rank == 0 else []
        self._shards: set[int] = set()

    def check_new(self, rows: NDArray[np.int64]) -> None:
        """Raise RepeatedSample if the epoch has had one of these rows."""
        if self.rows[rows].any():
            sample = rows[self.rows[rows]][0]
            raise RepeatedSample(f"sample {sample} comes a second time in epoch {self.epoch}. {ONCE}")

    def note(self, rows: NDArray[np.int64], *, skipped: bool = False) -> None:
        """Note that rows were updated or skipped."""
        self.rows[rows] = True
        self._shards.update(np.unique(rows // self._spec.rows_per_shard).tolist())
        if skipped:
            self._skipped += rows.tolist()

    def all_skipped(self) -> list[int]:
        """Return the samples that any rank has skipped, on rank 0; an empty list elsewhere. Collective."""
        parts = self._ranks.gather(json.dumps(self._skipped).encode()) or []
        return sorted({sample for part in parts for sample in json.loads(part)})

    def divide_shards(self) -> list[int]:
        """Return the shards that this rank reads; refuse one that two ranks have updated. Collective."""
        parts = self._ranks.gather(json.dumps(sorted(self._shards)).encode())

        def divide() -> bytes:
            assert parts is not None
            updated = [set(json.loads(part)) for part in parts]
            return json.dumps(divide_shards(updated, self._spec.num_shards)).encode()

        divided: list[list[int]] = json.loads(on_rank_zero(self._ranks, divide))
        return divided[self._ranks.rank]


def _read_rows(store: HeatmapStore, epoch: int, ranks: Transport) -> NDArray[np.bool_]:
    """Return the rows stamped with this epoch; rank 0 reads them, as the stamps are a file per shard."""

    def read() -> bytes:
        return np.packbits(store.last_epochs() == epoch).tobytes()

    packed = np.frombuffer(on_rank_zero(ranks, read), np.uint8)
    return np.unpackbits(packed, count=store.spec.num_rows).astype(bool)


def divide_shards(updated: Sequence[set[int]], num_shards: int) -> list[list[int]]:
    """Return for each rank the shards that it has updated, and its part of those that no rank has."""
    owner: dict[int, int] = {}
    for rank, shards in enumerate(updated):
        for shard in sorted(shards):
            if owner.setdefault(shard, rank) != rank:
                raise StoreError(
                    f"shard {shard}: ranks {owner[shard]} and {rank} have updated samples of it in one "
                    f"epoch, and one would overwrite the other's. Give each shard to one rank, as "
                    f"`memory.plan(...)` and `wds.split_by_node` do."
                )
    idle = [shard for shard in range(num_shards) if shard not in owner]
    for number, shard in enumerate(idle):
        owner[shard] = number % len(updated)
    return [sorted(shard for shard, own in owner.items() if own == rank) for rank in range(len(updated))]
