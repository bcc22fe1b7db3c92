"""The heatmap store: versions of shards, committed as snapshots."""

import json
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Literal, Self

import numpy as np

from bigscl.common.user_error import UserError
from bigscl.store.backends.backend import Backend, open_backend
from bigscl.store.backends.schemes import StorageOptions
from bigscl.store.create import (
    FIRST_GROUP,
    check_fingerprint,
    create_store,
    delete_unnamed_groups,
    delete_unnamed_versions,
    prepare_writing,
    present,
    read_spec,
    spec_for,
    write_metadata,
)
from bigscl.store.errors import NoFreeSlot, ReadOnly, StorageFailed, StoreError
from bigscl.store.format import history
from bigscl.store.format.annotations import Annotations, Answered, answered_shard, with_answers
from bigscl.store.format.layout import check_top, compact_rows, compacted_group, free_slot
from bigscl.store.format.quantize import as_stored
from bigscl.store.format.spec import Codec, GroupSpec, Rows, StoreSpec
from bigscl.store.format.zarr_group import ArrayGroup, describe_group, described
from bigscl.store.lease import Lease
from bigscl.store.reader import StoreReader
from bigscl.store.snapshots import (
    Snapshot,
    SnapshotLog,
    Written,
    merge_reports,
    pack,
    report,
    unpack,
    versions_of,
    with_versions,
)
from bigscl.store.threads import POLL_SECONDS, Check, in_order, nothing
from bigscl.store.transport import SingleProcess, Transport, on_rank_zero

StorePath = str | os.PathLike[str]


class HeatmapStore(StoreReader, AbstractContextManager["HeatmapStore"]):
    """Scores and heatmaps of every sample, at one snapshot plus what this process has written since.

    Every rank opens the same store. `open` for writing, `commit`, `rollback`, `drop_snapshots` and `compact`
    are collective: all ranks call them together. Reading and `save_shard` are each rank's own.
    """

    # Invariant: what a retained snapshot names is never written to. `_pending` holds the versions that this
    # process wrote since the last commit, in slots of its generation that no retained snapshot names.
    # Another writer has another generation, so nothing it commits is in our slots, however late we write.
    # `_lock` guards the fields that change.

    def __init__(
        self,
        backend: Backend,
        spec: StoreSpec,
        snapshot: Snapshot,
        annotations: Annotations | None,
        *,
        transport: Transport | None = None,
        lease: Lease | None = None,
        retained: Mapping[int, Snapshot] | None = None,
        run: str = "",
    ) -> None:
        """A store for writing knows the `retained` snapshots; without them it is for reading."""
        self._writable = retained is not None
        super().__init__(backend, spec, snapshot, annotations)
        self._transport = transport or SingleProcess()
        self._lease = lease
        self._run = run
        self._retained = dict(retained or {})
        self._to_drop: set[int] = set()
        self._pending: dict[int, Written] = {}
        self._failure: Exception | None = None

    def _version(self, shard: int) -> Written:
        """Versions that this process wrote since the last commit, or else the committed version."""
        return self._pending.get(shard) or super()._version(shard)

    # Creating and opening

    @staticmethod
    def create(
        url: StorePath,
        annotations: Annotations,
        *,
        heatmap_size: int,
        group: GroupSpec = FIRST_GROUP,
        history_samples: int | Collection[int] = 64,
        top_scores: int | None = None,
        options: StorageOptions | None = None,
    ) -> None:
        """Create an empty store: every row has its initial value. An interrupted creation is repeated.

        With `top_scores` a row keeps the scores of that many classes, the highest, and a floor for the rest.
        """
        spec = spec_for(annotations, heatmap_size, history_samples, top_scores)
        create_store(open_backend(url, options), annotations, spec, group)

    @classmethod
    def open(
        cls,
        url: StorePath,
        *,
        annotations: Annotations | None = None,
        mode: Literal["r", "w"] = "r",
        snapshot: int | None = None,
        run: str = "unnamed",
        transport: Transport | None = None,
        options: StorageOptions | None = None,
        patience_seconds: float | None = None,
    ) -> Self:
        """The store at its newest snapshot, or at the one asked for.

        Writing takes annotations and the lease, and claims the snapshot: its content gets the next number,
        which shuts out every earlier writer. Opening an older snapshot for writing drops the newer ones.
        """
        backend, group = open_backend(url, options), transport or SingleProcess()
        spec = read_spec(backend, listing=group.rank == 0)
        if annotations is not None:
            check_fingerprint(backend, spec, annotations)
        if mode == "r":
            return cls._open_reader(backend, spec, snapshot, annotations, transport)
        if annotations is None:
            raise UserError(f"{backend.url}: writing needs the annotations the store was made for")
        leases: list[Lease] = []

        def prepare() -> bytes:
            patience = {} if patience_seconds is None else {"patience_seconds": patience_seconds}
            leases.append(Lease.acquire(backend, run, **patience))
            try:
                claimed = prepare_writing(backend, snapshot, run, leases[0])
                return pack([claimed, *SnapshotLog(backend).read_all().values()])
            except BaseException:
                leases.pop().release()
                raise

        # Ours is the claimed one, which comes first: the newest may be that of a writer who took over since.
        retained = unpack(on_rank_zero(group, prepare))
        return cls(
            backend,
            spec,
            next(iter(retained.values())),
            annotations,
            transport=group,
            lease=leases[0] if leases else None,
            retained=retained,
            run=run,
        )

    @classmethod
    def _open_reader(
        cls,
        backend: Backend,
        spec: StoreSpec,
        snapshot: int | None,
        annotations: Annotations | None,
        transport: Transport | None,
    ) -> Self:
        log = SnapshotLog(backend)
        wanted = log.newest() if snapshot is None else snapshot
        while True:
            try:
                return cls(backend, spec, log.read(wanted), annotations, transport=transport)
            except StoreError:
                # A writer may have dropped the newest since it was listed, and its array group with it.
                before = wanted
                if snapshot is not None or (wanted := log.newest()) == before:
                    raise

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the lease. What was not committed is lost."""
        if self._lease is not None:
            self._lease.release()
            self._lease = None
        self._writable = False

    # Writing

    def save_shard(self, shard: int, rows: Rows, check: Check = nothing) -> None:
        """Write a version of a shard to a free slot. It becomes part of the store with the next commit.

        If an announced drop is about to free its slot, this waits; `check` raises to end that.
        """
        self._check_writable()
        if self._lease is not None:
            self._lease.check_seen()
        slot = self._take_slot(shard, check)
        try:
            digests = self._arrays.write(shard, slot, rows)
        except Exception as error:
            # A version that was pending may now be half overwritten: nothing may be committed on top.
            self._failure = error
            raise
        with self._lock:
            self._pending[shard] = Written(slot, digests)

    def _take_slot(self, shard: int, check: Check) -> int:
        """A slot to write the shard to; waits for one that an announced drop is about to free."""
        while True:
            with self._lock:
                if shard in self._pending:
                    return self._pending[shard].slot
                spec, frees_slots = self._arrays.spec, bool(self._to_drop)
                named = [kept.slots for kept in self._retained.values() if kept.group == spec.name]
                try:
                    return free_slot(shard, named, spec.slots_of(self._snapshot.generation))
                except NoFreeSlot:
                    if not frees_slots:
                        raise
            check()
            time.sleep(POLL_SECONDS)
            self._look_for_dropped()

    def _check_writable(self) -> None:
        if not self._writable:
            raise ReadOnly(f"{self.backend.url}: opened for reading (or closed). Open it with mode='w'.")

    def commit(self, *, epoch: int, step: int = 0, attributes: Mapping[str, Any] | None = None) -> Snapshot:
        """Make everything the ranks saved since the last commit the next snapshot: all of it, or nothing."""
        return self._commit(self._arrays, epoch, step, attributes or {})

    def _commit(self, arrays: ArrayGroup, epoch: int, step: int, attributes: Mapping[str, Any]) -> Snapshot:
        self._check_writable()
        failure = self._sync(arrays)
        reports = self._transport.gather(report(self._pending, failure))

        def create() -> bytes:
            assert reports is not None
            base = self._snapshot
            if arrays.spec.name != base.group:
                base = replace(base, group=arrays.spec.name, slots=(-1,) * self.spec.num_shards, digests={})
            snapshot = replace(
                with_versions(base, merge_reports(reports)),
                id=self._snapshot.id + 1,
                parent=self._snapshot.id,
                time=time.time(),
                run=self._run,
                epoch=epoch,
                step=step,
                attributes=attributes,
            )
            self._publish(snapshot)
            return snapshot.to_bytes()

        try:
            snapshot = Snapshot.from_bytes(on_rank_zero(self._transport, create))
        except StoreError as error:
            raise (failure or error) from None
        with self._lock:
            self._retained[snapshot.id] = snapshot
            self._snapshot = snapshot
            self._arrays = arrays
            self._pending = {}
        return snapshot

    def _publish(self, snapshot: Snapshot) -> None:
        try:
            self._log.publish(snapshot, self.check_lease)
        except StorageFailed as error:
            # The file may exist despite the error: then its slots must not be written to.
            self._writable = False
            self._writable = not self._log.exists(snapshot.id)
            raise StorageFailed(f"could not commit snapshot {snapshot.id}: {error}") from error

    def check_lease(self) -> None:
        """Raise LeaseHeld if this process held the lease and lost it."""
        if self._lease is not None:
            self._lease.check()

    def _sync(self, arrays: ArrayGroup) -> Exception | None:
        """Make pending versions durable; return the error, so that the other ranks are told."""
        if self._failure is not None:
            return self._failure
        try:
            written = self._pending.items()
            keys = [key for shard, version in written for key in arrays.keys(shard, version.slot)]
            self.backend.sync(keys)
        except StoreError as error:
            return error
        return None

    def rollback(self, snapshot: int) -> Snapshot:
        """Return to a retained snapshot: newer ones, and what was not committed, are lost."""
        self._check_writable()

        def go_back() -> bytes:
            if snapshot == self._log.newest():
                current = self._log.read(snapshot)
            else:
                current = self._log.claim(snapshot, self._run, self.check_lease, self._snapshot.generation)
                self._log.drop_after(snapshot, current.id, self.check_lease)
            return pack([current, *self._log.read_all().values()])

        retained = unpack(on_rank_zero(self._transport, go_back))
        with self._lock:
            self._retained = retained
            self._pending = {}
            self._failure = None
            self._go_to(next(iter(retained.values())))
        return self._snapshot

    def drop_snapshots(self, keep: Iterable[int] = ()) -> None:
        """Keep only these snapshots, as rank 0 names them, and the current one."""
        self.announce_drop(keep)
        on_rank_zero(self._transport, self.drop_announced)
        self.note_drop()

    # A drop in two parts: all ranks agree on it together, and rank 0 makes it later, in any thread, while
    # the ranks go on. A rank that finds no free slot meanwhile waits until these snapshots are gone.

    def announce_drop(self, keep: Iterable[int] = ()) -> None:
        """Agree with all ranks on the snapshots to drop; nothing may be committed until they are."""
        self._check_writable()
        kept = {*keep, self._snapshot.id}

        def list_unneeded() -> bytes:
            return json.dumps([number for number in self._log.ids() if number not in kept]).encode()

        unneeded = json.loads(on_rank_zero(self._transport, list_unneeded))
        with self._lock:
            self._to_drop = set(unneeded)

    def drop_announced(self) -> None:
        """Drop the snapshots that were announced, on rank 0 alone."""
        for number in sorted(self._to_drop):
            self.check_lease()
            self._log.drop(number)
        # Before any slot is used again: who lost the lease in the meantime must write nothing more.
        self.check_lease()
        self._delete_unnamed()
        self._forget(set(self._to_drop))

    def note_drop(self) -> None:
        """Note on every rank that rank 0 has dropped what was announced, after it said so."""
        self._forget(set(self._to_drop))

    def _look_for_dropped(self) -> None:
        """Forget announced snapshots whose files are gone, by their names: a listing may be old."""
        with self._lock:
            announced = set(self._to_drop)
        self._forget({number for number in announced if not self._log.exists(number)})

    def _forget(self, dropped: set[int]) -> None:
        with self._lock:
            self._to_drop -= dropped
            self._retained = {n: kept for n, kept in self._retained.items() if n not in dropped}

    def _delete_unnamed(self) -> None:
        """Delete groups that no snapshot names, and versions in slots that this writer will not use again."""
        delete_unnamed_groups(self.backend, self._log, self.check_lease)
        left = self._log.read_all().values()
        named = {version for kept in left for version in versions_of(kept)}
        ours = self._arrays.spec.slots_of(self._snapshot.generation)
        gone = [
            (slot, shard)
            for kept in self._retained.values()
            for group, slot, shard in versions_of(kept) - named
            if group == self._arrays.spec.name and slot not in ours
        ]
        self.backend.delete_many(key for slot, shard in gone for key in self._arrays.keys(shard, slot))

    def delete_free(self) -> int:
        """Delete the files of versions that no retained snapshot names; return the bytes that were freed.

        For a store that nobody trains on any more: a run would write those slots again.
        """
        self._check_writable()
        if self._pending:
            raise StoreError(f"{self.backend.url}: commit first: {len(self._pending)} shards pending")

        def delete() -> bytes:
            return str(delete_unnamed_versions(self.backend, self._log, self.check_lease)).encode()

        return int(on_rank_zero(self._transport, delete))

    def compact(
        self,
        top: int,
        *,
        slots: int | None = None,
        codec: Codec | None = None,
        progress: Callable[[int], None] = lambda done: None,
    ) -> Snapshot:
        """Keep heatmaps of each image's `top` highest-scoring classes only, as one new snapshot.

        Ranks share the shards. Until the commit the store is as it was; `drop_snapshots` then deletes the
        old arrays.
        """
        self._check_writable()
        annotations = self.annotations
        assert annotations is not None
        check_top(annotations, top)
        if self.spec.top_scores is not None and top > self.spec.top_scores:
            raise UserError(f"top: {top}, but rows keep the scores of {self.spec.top_scores} classes only")
        group = compacted_group(self._arrays.spec, self._snapshot.generation, top, slots, codec)
        if self._pending:
            raise StoreError(
                f"{self.backend.url}: commit before rewriting: {len(self._pending)} shards pending"
            )
        new = self._create_group(group)
        wanted = [shard for shard, slot in enumerate(self._snapshot.slots) if slot >= 0]
        share = wanted[self._transport.rank :: self._transport.world_size]
        slot = new.spec.slots_of(self._snapshot.generation)[0]

        def rewrite(shard: int) -> tuple[int, Written]:
            digests = self._snapshot.digests_of(shard)
            arrays = self._arrays.read(shard, self._snapshot.slots[shard], digests=digests)
            rows = Rows(self.spec.num_classes, **arrays)
            ids = shard * self.spec.rows_per_shard + np.arange(len(rows))
            rows = compact_rows(rows, annotations.of_shard(shard), self.spec, group)
            rows = as_stored(rows, group, ids, self._snapshot.epoch)
            return shard, Written(slot, new.write(shard, slot, rows))

        try:
            for done, (shard, written) in enumerate(in_order(rewrite, share), 1):
                self._pending[shard] = written
                progress(done)
        except Exception as error:
            self._failure = error
        try:
            return self._commit(new, self._snapshot.epoch, self._snapshot.step, self._snapshot.attributes)
        except BaseException:
            self._pending = {}
            self._failure = None
            raise

    def _create_group(self, group: GroupSpec) -> ArrayGroup:
        def make() -> bytes:
            files = described(lambda scratch: describe_group(scratch, self.spec, group))
            # Not the root group that comes with it: the store has one.
            inside = {key: data for key, data in files.items() if key.startswith(f"{group.name}/")}
            leftovers = present(self.backend, inside)
            self.check_lease()
            write_metadata(self.backend, inside, leftovers)
            return b""

        on_rank_zero(self._transport, make)
        return ArrayGroup.open(self.backend, self.spec, group.name, read_only=False)

    # Answers

    def answer(self, answered: Answered) -> Answered:
        """Write answers that the rows do not know of yet into them, as one new snapshot; collective.

        Ranks share the shards; rows that no new answer is about stay as they are. Until the commit the store
        is as it was, and afterwards the same answers change nothing. Return the answers with what `late`
        says of them now: later commits carry them as an attribute.
        """
        self._check_writable()
        assert self._given is not None
        if lost := (known := Answered.at(self._snapshot)).lost(answered):
            raise StoreError(
                f"{self.backend.url}: its rows know {len(lost)} answers that are not given now, first about "
                f"class {lost[0][1]} of sample {lost[0][0]}. Give all answers that were given before."
            )
        annotations = with_answers(self._given, answered)
        if self.group.top is not None:
            check_top(annotations, self.group.top)
        if self.spec.top_scores is not None:
            check_top(annotations, self.spec.top_scores, "top_scores")
        shards = answered.rows // self.spec.rows_per_shard
        stored = np.asarray(self._snapshot.slots)[shards] >= 0
        answered, changes = answered.since(known, stored=stored, heatmaps=self.group.layout != "scores")
        if not changes.any():
            return answered
        wanted = np.unique(shards[changes]).tolist()
        try:
            for shard in wanted[self._transport.rank :: self._transport.world_size]:
                rows = answered_shard(self.load_shard(shard), shard, answered.take(changes), annotations)
                self.save_shard(shard, rows)
        except Exception as error:
            self._failure = error  # the commit tells the other ranks
        attributes = {**self._snapshot.attributes, **answered.attribute()}
        self.commit(epoch=self._snapshot.epoch, step=self._snapshot.step, attributes=attributes)
        return answered

    # Tracked samples

    def record_history(self, epoch: int) -> None:
        """Append the tracked samples' rows to their history; call it on one rank, after the commit."""
        if not self.spec.history_samples:
            return
        assert self.annotations is not None
        ids = np.asarray(self.spec.history_samples, dtype=np.int64)
        history.record(self.backend, self.spec, epoch, self.read(ids), self.annotations.of_rows(ids))
