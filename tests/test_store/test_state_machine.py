"""Random sequences of everything one can do to a store, against a plain dict."""

import copy
import os
import tempfile
import uuid

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from bigscl.store import GroupSpec, HeatmapStore, update, verify
from bigscl.store.backends.backend import forget_memory
from bigscl.store.errors import NoFreeSlot, SnapshotMissing
from tests.test_store.conftest import all_ids, make_annotations, random_update
from tests.test_store.rounding_reference import slowly_rounded

NUM_CLASSES, SIZE = 5, 2


def initial_row(annotations, n, layout, top, ranked):
    """What a sample starts as, written the slow and obvious way."""
    positives = set(annotations.given[n].tolist())
    scores = np.array([c in positives for c in range(NUM_CLASSES)], np.float16)
    row = {"scores": scores, "last_epoch": -1, "sample_visits": 0}
    if layout == "dense":
        row["heatmaps"] = np.stack([np.full((SIZE, SIZE), s, np.float16) for s in scores])
        row["cell_visits"] = np.zeros((SIZE, SIZE))
        row |= {"spatial_score": scores} if ranked else {}
    if layout == "topk":
        return compacted(row | {"heatmaps": None}, positives, top, ranked)
    return row


def compacted(row, positives, top, ranked, as_stored=lambda maps: maps):
    """One row reduced to its strongest classes, the slow and obvious way."""
    held = row.get("classes", list(range(NUM_CLASSES)))
    order = sorted(held, key=lambda c: (c not in positives, -row["scores"][c], c))
    classes = sorted(order[:top])
    if row.get("heatmaps") is None:
        start = [1.0 if c in positives else row["scores"][c] for c in classes]
        heatmaps = np.stack([np.full((SIZE, SIZE), s, np.float16) for s in start])
    else:
        heatmaps = row["heatmaps"][[held.index(c) for c in classes]]
    kept = {name: row[name] for name in ("scores", "last_epoch", "sample_visits")} | {"classes": classes}
    kept |= {"heatmaps": as_stored(heatmaps), "cell_visits": row.get("cell_visits", np.zeros((SIZE, SIZE)))}
    if ranked:
        kept["spatial_score"] = row.get("spatial_score", row["scores"][held])[
            [held.index(c) for c in classes]
        ]
    return kept


class StoreMachine(RuleBasedStateMachine):
    """`now` is the state we expect to read; `committed` the state each retained snapshot must give back."""

    def url(self):
        return f"memory://{uuid.uuid4().hex}"

    @initialize(
        layout=st.sampled_from(["dense", "topk", "scores"]),
        slots=st.integers(2, 4),
        ranked=st.booleans(),
        codec=st.sampled_from(["none", "uint8"]),
    )
    def create(self, layout, slots, ranked, codec):
        """With `ranked` the store has the optional array."""
        self.codec = codec
        self.ranked = ranked
        self.annotations = make_annotations((3, 1, 2), NUM_CLASSES)
        self.ids = all_ids(self.annotations)
        self.layout, self.top = layout, 4 if layout == "topk" else None
        self.place = self.url()
        HeatmapStore.create(
            self.place,
            self.annotations,
            heatmap_size=SIZE,
            history_samples=2,
            group=GroupSpec(layout=layout, top=self.top, slots=slots, codec=codec, spatial_score=ranked),
        )
        self.epoch = 0
        self.now = {n: initial_row(self.annotations, n, layout, self.top, ranked) for n in self.ids}
        self.committed = {0: (layout, self.top, copy.deepcopy(self.now))}
        self.store = None
        self.open()

    def open(self):
        self.store = HeatmapStore.open(self.place, annotations=self.annotations, mode="w", run="machine")
        newest = max(self.committed)
        assert (self.store.snapshot.id, self.store.snapshot.parent) == (newest + 1, newest)
        self.committed[newest + 1] = self.committed[newest]

    def positives(self, n):
        return set(self.annotations.given[n].tolist())

    @rule(data=st.data(), seed=st.integers(0, 2**16))
    def update(self, data, seed):
        chosen = data.draw(st.lists(st.sampled_from(self.ids.tolist()), min_size=1, unique=True))
        values = random_update(self.store, len(chosen), seed)
        try:
            update(self.store, self.epoch, np.array(chosen), values)
        except NoFreeSlot:
            # Part of the batch may be in: what was not committed is undefined after a failure.
            self.reopen()
            return
        for place, n in enumerate(chosen):
            self.now[n] |= {name: array[place] for name, array in values.items()} | {"last_epoch": self.epoch}
            if values.heatmaps is not None:
                self.now[n]["heatmaps"] = self.as_stored(n, self.epoch)(values.heatmaps[place])

    def as_stored(self, n, epoch):
        """What the codec keeps of a sample's heatmaps."""
        return lambda maps: slowly_rounded(maps, int(n), epoch) if self.codec == "uint8" else maps

    @rule()
    def commit(self):
        snapshot = self.store.commit(epoch=self.epoch)
        self.committed[snapshot.id] = (self.layout, self.top, copy.deepcopy(self.now))
        self.epoch += 1

    @rule()
    def reopen(self):
        self.store.close()
        self.open()
        self.layout, self.top, self.now = copy.deepcopy(self.committed[max(self.committed)])

    @rule(data=st.data())
    def rollback(self, data):
        number = data.draw(st.sampled_from(sorted(self.committed)))
        snapshot = self.store.rollback(number)
        self.committed = {n: kept for n, kept in self.committed.items() if n <= number}
        self.committed[snapshot.id] = self.committed[number]
        self.layout, self.top, self.now = copy.deepcopy(self.committed[number])

    @rule(data=st.data())
    def drop(self, data):
        keep = data.draw(st.sets(st.sampled_from(sorted(self.committed))))
        self.store.drop_snapshots(keep)
        current = self.store.snapshot.id
        for number in set(self.committed) - keep - {current}:
            del self.committed[number]
            with pytest.raises(SnapshotMissing):
                HeatmapStore.open(self.place, snapshot=number)

    @precondition(lambda self: self.store is not None and not self.store._pending)
    @rule(top=st.integers(3, 4))
    def compact(self, top):
        if self.top is not None and top > self.top:
            return
        snapshot = self.store.compact(top)
        visited_shards = {n // 3 for n in self.ids if self.store.snapshot.slots[n // 3] >= 0}
        for n in self.ids:
            if n // 3 in visited_shards:
                as_stored = self.as_stored(n, snapshot.epoch)
                self.now[n] = compacted(self.now[n], self.positives(n), top, self.ranked, as_stored)
            else:
                self.now[n] = initial_row(self.annotations, n, "topk", top, self.ranked)
        self.layout, self.top = "topk", top
        self.committed[snapshot.id] = (self.layout, self.top, copy.deepcopy(self.now))

    def check(self, store, expected):
        rows = store.read(self.ids)
        for place, n in enumerate(self.ids):
            for name, value in expected[n].items():
                np.testing.assert_array_equal(rows[name][place], value, err_msg=f"{name} of {n}")

    @invariant()
    def reads_what_was_written(self):
        if self.store is not None:
            self.check(self.store, self.now)

    @invariant()
    def every_retained_snapshot_reads_as_committed(self):
        if self.store is None:
            return
        assert sorted(self.committed) == [kept.id for kept in self.store.snapshots()]
        for number, (_, _, expected) in self.committed.items():
            reader = HeatmapStore.open(self.place, annotations=self.annotations, snapshot=number)
            self.check(reader, expected)

    def teardown(self):
        if getattr(self, "store", None) is not None:
            assert all(not problems for _, problems in verify(self.store))
            self.store.close()
            forget_memory(self.place)


class FileStoreMachine(StoreMachine):
    """The same on a file system."""

    def url(self):
        # As the folders of pytest, see tests/conftest.py.
        self.folder = tempfile.TemporaryDirectory(dir=os.environ.get("PYTEST_DEBUG_TEMPROOT"))
        return f"{self.folder.name}/store"

    def teardown(self):
        super().teardown()
        if hasattr(self, "folder"):
            self.folder.cleanup()


common = {"deadline": None, "suppress_health_check": list(HealthCheck)}
TestMemoryStore = StoreMachine.TestCase
TestMemoryStore.settings = settings(max_examples=40, stateful_step_count=15, **common)
TestFileStore = FileStoreMachine.TestCase
TestFileStore.settings = settings(max_examples=12, stateful_step_count=12, **common)


@pytest.mark.slow
@pytest.mark.timeout(1800)
class TestMemoryStoreForLong(StoreMachine.TestCase):
    settings = settings(max_examples=400, stateful_step_count=30, **common)
