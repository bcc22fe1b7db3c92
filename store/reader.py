"""Reading a store at one snapshot, with or without initial values, and checking what it contains."""

# Shapes: N rows, L classes, W side of a heatmap.

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bigscl.common.user_error import UserError
from bigscl.store.backends.backend import Backend
from bigscl.store.errors import BadFile, ChunkCorrupt, StoreError
from bigscl.store.format import history
from bigscl.store.format.annotations import ATTRIBUTE, Annotations, Answered, with_answers
from bigscl.store.format.array_types import ARRAYS, Domain
from bigscl.store.format.layout import initial_shard, split_by_shard
from bigscl.store.format.spec import Array, GroupSpec, Ranked, Rows, StoreSpec
from bigscl.store.format.zarr_group import ArrayGroup
from bigscl.store.snapshots import Snapshot, SnapshotLog, Written
from bigscl.store.threads import Check, in_order

SCORES = ("scores", "score_classes", "score_floor")
"""The arrays that have the scores; the first alone where all classes are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InitialValues:
    """Heatmaps as seen since their start: without what the running averages have left of initial values.

    A heatmap starts at 1 for a given class. After n visits of a cell `mu^n` of that is left, which hides what
    was seen wherever crops rarely look. Other classes start at 0: nothing is taken out.
    """

    annotations: Annotations
    momentum: float
    debiased: bool

    def remaining(self, counts: Array) -> NDArray[np.float32]:
        """The weight that initial values still have in cells, by their visits."""
        visits = np.arange(np.iinfo(np.uint8).max + 1)
        weights = visits == 0 if self.debiased else self.momentum**visits
        return np.asarray(weights, np.float32)[counts]

    def heatmaps_without_initial_value(
        self, rows: Rows, ids: NDArray[np.int64], places: Array, classes: Array
    ) -> Array:
        """`rows.heatmaps_of(places, classes)` without initial values; `ids` are the samples of the rows."""
        maps = rows.heatmaps_of(places, classes)
        places, classes = np.broadcast_arrays(places, classes)
        given = self.annotations.is_given(ids[places], classes)
        left = maps[given].astype(np.float32) - self.remaining(rows["cell_visits"][places[given]])
        maps[given] = np.maximum(left, 0)
        return maps

    def without_initial_value(self, rows: Rows, ids: NDArray[np.int64]) -> Rows:
        """The rows with heatmaps without initial values; `ids` are their samples."""
        if rows.heatmaps is None or "cell_visits" not in rows:
            return rows
        kept = rows.kept_classes().astype(np.int64)
        seen = self.heatmaps_without_initial_value(rows, ids, np.arange(len(rows))[:, None], kept)
        return rows.replace(heatmaps=seen)

    def scores_without_initial_value(self, rows: Rows, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """`[N,L]`: the mean of the predictions since the start; 0 for samples that were never visited."""
        left = self.remaining(rows["sample_visits"][: len(ids)])[:, None]
        seen = rows.scores[: len(ids)].astype(np.float32) - left * self.annotations.of_rows(ids)
        return np.asarray((seen / np.maximum(1 - left, 1e-6)).clip(0, 1), np.float32)


class StoreReader:
    """Scores and heatmaps of every sample at one snapshot."""

    # `_lock` guards the fields that change.

    _writable = False

    def __init__(
        self, backend: Backend, spec: StoreSpec, snapshot: Snapshot, annotations: Annotations | None
    ) -> None:
        self.spec = spec
        self.backend = backend
        self._given = annotations
        self._answered: tuple[object, Annotations] | None = None
        self._log = SnapshotLog(backend)
        self._lock = threading.Lock()
        self._sizes = np.asarray(spec.shard_sizes)  # once: with 300,000 shards it takes 6 ms
        self._go_to(snapshot)

    def _go_to(self, snapshot: Snapshot) -> None:
        arrays = ArrayGroup.open(self.backend, self.spec, snapshot.group, read_only=not self._writable)
        check_slots(self.backend.url, snapshot, self.spec, arrays.spec)
        self._snapshot = snapshot
        self._arrays = arrays

    def _version(self, shard: int) -> Written:
        """The version of a shard that is read; slot -1 for initial values."""
        return Written(self._snapshot.slots[shard], self._snapshot.digests_of(shard))

    @property
    def snapshot(self) -> Snapshot:
        """The committed state this store is at."""
        return self._snapshot

    @property
    def annotations(self) -> Annotations | None:
        """The given labels that the store was opened with, after the answers that its rows know of."""
        found = self._snapshot.attributes.get(ATTRIBUTE)
        if self._given is None or found is None:
            return self._given
        if self._answered is None or self._answered[0] is not found:
            self._answered = (found, with_answers(self._given, Answered.at(self._snapshot)))
        return self._answered[1]

    @property
    def group(self) -> GroupSpec:
        return self._arrays.spec

    @property
    def arrays(self) -> ArrayGroup:
        return self._arrays

    def snapshots(self) -> list[Snapshot]:
        return list(self._log.read_all().values())

    def sizes(self) -> dict[str, int]:
        return bytes_by_array(self.backend.sizes(""))

    def load_shard(self, shard: int, check: Check | None = None) -> Rows:
        """All rows of a shard, or initial values; waits for a stale cache until `check` raises."""
        return Rows(self.spec.num_classes, **self._load(shard, check=check))

    def _load(
        self, shard: int, names: tuple[str, ...] | None = None, check: Check | None = None
    ) -> dict[str, Array]:
        with self._lock:
            arrays, version = self._arrays, self._version(shard)
        if version.slot >= 0:
            check = check or self._check_still_retained
            return arrays.read(shard, version.slot, names, version.digests, check)
        if self.annotations is None:
            raise StoreError(
                f"{self.backend.url}: shard {shard} was never visited; its initial values come from the "
                f"annotations. Pass the index of the shards this store was made from."
            )
        initial = initial_shard(self.spec, arrays.spec, self.annotations, shard)
        return {name: array for name, array in initial.items() if names is None or name in names}

    def read(self, ids: Iterable[int] | NDArray[np.int64]) -> Rows:
        """The rows of these samples, in their order. For looking around: threads read whole shards."""
        wanted = np.asarray(ids, dtype=np.int64)
        self.check_ids(wanted)
        if not len(wanted):
            return self.load_shard(0).take(slice(0, 0))

        def load(part: tuple[int, Array, Array]) -> tuple[Array, dict[str, Array]]:
            shard, positions, places = part
            return places, {name: array[positions] for name, array in self._load(shard).items()}

        parts = split_by_shard(wanted, self.spec.rows_per_shard)
        rows = self._gathered(len(wanted), in_order(load, parts))
        self._check_still_retained()
        return rows

    def peek(self, ids: Iterable[int] | NDArray[np.int64]) -> Rows:
        """As `read_without_initial_value`, fast, for screens: reads single rows if it can, unchecked."""
        wanted = np.asarray(ids, dtype=np.int64)
        if self.group.codec != "none" or not len(wanted):
            return self.read_without_initial_value(wanted)
        self.check_ids(wanted)
        shards, positions = np.divmod(wanted, self.spec.rows_per_shard)
        slots = np.array([self._version(int(shard)).slot for shard in shards])
        there = slots >= 0
        parts: list[tuple[Array, Mapping[str, Array]]] = []
        if there.any():
            places = np.stack([shards, slots, positions], axis=1)[there]
            parts.append((there, self.arrays.peek([(int(a), int(b), int(c)) for a, b, c in places])))
            self._check_still_retained()
        if not there.all():
            parts.append((~there, dict(self.read(wanted[~there]).items())))
        found, start = self._gathered(len(wanted), parts), self.initial_values
        return found if start is None else start.without_initial_value(found, wanted)

    def _gathered(self, count: int, parts: Iterable[tuple[Array, Mapping[str, Array]]]) -> Rows:
        """Return `count` rows from parts of them, each with where its rows belong."""
        gathered: dict[str, Array] = {}
        for where, rows in parts:
            for name, array in rows.items():
                out = gathered.setdefault(name, np.empty((count, *array.shape[1:]), array.dtype))
                out[where] = array
        return Rows(self.spec.num_classes, **gathered)

    def scores_by_shard(self, shards: Iterable[int]) -> Iterator[tuple[NDArray[np.int64], Array]]:
        """(ids, scores) of all real samples of each shard, the never-visited with their initial scores."""
        for shard in shards:
            ids = self.spec.sample_ids(shard)
            yield ids, self._score_rows(shard, SCORES).scores

    def seen_scores_by_shard(
        self, shards: Iterable[int]
    ) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32]]]:
        """(ids, scores without initial values) of all real samples of each shard; reads nothing else."""
        for shard in shards:
            ids = self.spec.sample_ids(shard)
            rows = self._score_rows(shard, (*SCORES, "sample_visits"))
            yield ids, self.scores_without_initial_value(rows, ids)

    def ranked_by_shard(
        self, shards: Iterable[int], note: Callable[[NDArray[np.int64], Ranked], None] | None = None
    ) -> Iterator[tuple[NDArray[np.int64], Ranked]]:
        """(ids, what samples are ranked by) of each shard; `note` is called with its scores before."""
        names = (*SCORES, "spatial_score", "classes") if self.group.spatial_score else SCORES
        for shard in shards:
            ids, rows = self.spec.sample_ids(shard), self._score_rows(shard, names)
            if note is not None:
                kept = rows.kept_scores
                note(ids, rows.scores if kept is None else kept)
            yield ids, rows.ranked()

    def _score_rows(self, shard: int, names: tuple[str, ...]) -> Rows:
        """Return these arrays of the real samples of a shard."""
        size = self.spec.shard_sizes[shard]
        found = {name: array[:size] for name, array in self._load(shard, names).items()}
        return Rows(self.spec.num_classes, **found)

    def last_epochs(self) -> NDArray[np.int32]:
        """For every row the last epoch that updated it, -1 for none."""
        stamps = np.full((self.spec.num_shards, self.spec.rows_per_shard), -1, np.int32)
        for shard in range(self.spec.num_shards):
            if self._version(shard).slot >= 0:
                stamps[shard] = self._load(shard, ("last_epoch",))["last_epoch"]
        self._check_still_retained()
        return stamps.reshape(-1)

    def check_ids(self, ids: NDArray[np.integer[Any]]) -> None:
        """Raise UserError if one of the ids is no row of a sample."""
        known = (ids >= 0) & (ids < self.spec.num_rows)
        shards, positions = np.divmod(ids[known], self.spec.rows_per_shard)
        known[known] = positions < self._sizes[shards]
        if not known.all():
            raise UserError(
                f"{self.backend.url}: no sample {ids[~known][0]}; "
                f"there are {self.spec.num_samples} samples in {self.spec.num_shards} shards"
            )

    def _check_still_retained(self) -> None:
        """A reader's snapshot may have been dropped, and its slots reused, while it was being read."""
        if not self._writable and not self._log.exists(self._snapshot.id):
            self._log.read(self._snapshot.id)

    @property
    def initial_values(self) -> InitialValues | None:
        """How to take initial values out of heatmaps; None if the store or its snapshot does not say.

        Snapshots of earlier revisions do not have the momentum; for annotations, open the store with them.
        """
        momentum = self._snapshot.attributes.get("momentum")
        if self._given is None or not isinstance(momentum, float | int):
            return None
        started = self._given
        if len(answered := Answered.at(self._snapshot)):
            started = with_answers(started, answered, from_start=True)
        return InitialValues(annotations=started, momentum=float(momentum), debiased=self.group.debiased)

    def read_without_initial_value(self, ids: Iterable[int] | NDArray[np.int64]) -> Rows:
        """As `read`, with heatmaps without what is left of their initial values, where that is known."""
        wanted = np.asarray(ids, dtype=np.int64)
        rows, start = self.read(wanted), self.initial_values
        return rows if start is None else start.without_initial_value(rows, wanted)

    def heatmaps_without_initial_value(
        self, rows: Rows, ids: NDArray[np.int64], places: Array, classes: Array
    ) -> Array:
        """`rows.heatmaps_of(places, classes)` likewise; `ids` are the samples of the rows."""
        start = self.initial_values
        if start is None:
            return rows.heatmaps_of(places, classes)
        return start.heatmaps_without_initial_value(rows, ids, places, classes)

    def scores_without_initial_value(self, rows: Rows, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """`[n,L]`: the mean prediction of each class since the start; as stored where the start is unknown.

        A stored score of few visits is mostly its initial value, 1 for a label and 0 for any other class.
        """
        start = self.initial_values
        if start is None or "sample_visits" not in rows:
            return rows.scores[: len(ids)].astype(np.float32)
        return start.scores_without_initial_value(rows, ids)

    def history(self, sample: int) -> dict[int, Rows]:
        """How a sample looked after each epoch, without initial values; empty if its history is not kept."""
        found, start = history.read_history(self.backend, sample, self.spec), self.initial_values
        if start is None:
            return found
        return {epoch: start.without_initial_value(rows, np.array([sample])) for epoch, rows in found.items()}


def check_slots(url: str, snapshot: Snapshot, spec: StoreSpec, group: GroupSpec) -> None:
    """Refuse a snapshot that cannot be one of this store."""
    if len(snapshot.slots) != spec.num_shards:
        raise BadFile(
            f"{url}: snapshot {snapshot.id} names {len(snapshot.slots)} shards, the store has "
            f"{spec.num_shards}. Restore the file from a copy, or use an older snapshot."
        )
    highest = max(snapshot.slots, default=-1)
    if highest >= group.num_slots:
        raise BadFile(
            f"{url}: snapshot {snapshot.id} names slot {highest}, the arrays have {group.num_slots}. "
            f"Restore the file from a copy, or use an older snapshot."
        )


def bytes_by_array(listing: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Return the bytes of each array as `group/array`, of the history, of the snapshots and of the rest."""
    totals: dict[str, int] = {}
    for key, num_bytes in listing:
        parts = key.split("/")
        folder = "/".join(parts[:2]) if key.startswith("arrays-") and len(parts) > 2 else parts[0]
        name = folder if len(parts) > 1 else "other"
        totals[name] = totals.get(name, 0) + num_bytes
    return totals


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A fault of one array of one shard (named as on the storage, or as in rows), and its samples."""

    shard: int
    array: str
    samples: tuple[int, ...]
    reason: str


def verify(store: StoreReader, shards: Iterable[int] | None = None) -> Iterator[tuple[int, list[Problem]]]:
    """(shard, its problems) for each shard the snapshot names; nothing is changed."""
    slots = store.snapshot.slots
    for shard in range(store.spec.num_shards) if shards is None else shards:
        if slots[shard] >= 0:
            yield shard, list(_problems(store, shard, slots[shard]))


def _problems(store: StoreReader, shard: int, slot: int) -> Iterator[Problem]:
    ids, digests = store.spec.sample_ids(shard), store.snapshot.digests_of(shard)
    domain = Domain(num_classes=store.spec.num_classes, last_epoch=store.snapshot.epoch)
    for plan in store.arrays.plans:
        try:
            values = store.arrays.read(shard, slot, plan.names, digests)
        except ChunkCorrupt as error:
            bad = store.arrays.unreadable(plan, shard, slot)[: len(ids)]
            # Every chunk is whole, but not all are of the version that the snapshot names.
            yield _problem(shard, plan.name, ids, bad if bad.any() else np.ones_like(bad), str(error))
            continue
        for name, array in values.items():
            bad = ARRAYS[name].invalid(array[: len(ids)], domain)
            if bad.any():
                yield _problem(shard, name, ids, bad, f"expected {ARRAYS[name].expected(domain)}")


def _problem(shard: int, name: str, ids: NDArray[np.int64], bad: Array, reason: str) -> Problem:
    samples = ids[bad.reshape(len(ids), -1).any(axis=1)]
    return Problem(shard=shard, array=name, samples=tuple(samples.tolist()), reason=reason)
