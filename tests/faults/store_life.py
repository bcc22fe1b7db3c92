"""The life of a small store: creation, epochs with commits in mid-epoch, compaction, rollback, drops.

Every row is a pure function of (sample, epoch), so whoever reads the store can tell what a row must hold from
its visit stamp alone. A ledger next to the store plays the part of the checkpoints: it names the snapshots to
return to.
"""

import json
import os
import signal
from functools import partial
from pathlib import Path

import numpy as np

from bigscl.store import GroupSpec, HeatmapStore, Rows, StorageOptions, update, verify
from bigscl.store.backends.backend import open_backend
from bigscl.store.errors import NotAStore
from bigscl.store.lease import break_lease, read_holder
from tests.test_store.conftest import all_ids, make_annotations, values_of_rows
from tests.test_store.rounding_reference import slowly_rounded

NUM_CLASSES, SIZE, TOP, EPOCHS, KEPT = 5, 2, 3, 3, 2
ANNOTATIONS = make_annotations((4, 3), NUM_CLASSES)
IDS = all_ids(ANNOTATIONS)


values_of = partial(values_of_rows, NUM_CLASSES, SIZE)


class Ledger:
    """The newest commits that were acknowledged, oldest first; outside the store, replaced whole."""

    def __init__(self, path):
        self.path = Path(path)
        self.entries = json.loads(self.path.read_text()) if self.path.exists() else []

    def add(self, snapshot, next_epoch, visited):
        entry = {"snapshot": snapshot.id, "epoch": snapshot.epoch, "next": next_epoch, "visited": visited}
        self.entries = [*self.entries, entry][-KEPT:]
        temporary = self.path.with_suffix(".new")
        temporary.write_text(json.dumps(self.entries))
        temporary.replace(self.path)

    @property
    def snapshots(self):
        """Those that must stay: the beginning, as long as there is nothing else to return to."""
        return [entry["snapshot"] for entry in self.entries] or [0]

    @property
    def next_epoch(self):
        return self.entries[-1]["next"] if self.entries else 0

    @property
    def done(self):
        return self.next_epoch == EPOCHS


def storage(endpoint=""):
    """Options of the object store at an endpoint; None for files."""
    return StorageOptions(endpoint=endpoint, region="us-east-1") if endpoint else None


def open_for_life(url, ledger, endpoint, codec):
    """The store at the ledger's last snapshot, created if it is not there."""
    options = storage(endpoint)
    try:
        HeatmapStore.open(url, options=options)
    except NotAStore:
        HeatmapStore.create(
            url,
            ANNOTATIONS,
            heatmap_size=SIZE,
            history_samples=2,
            options=options,
            group=GroupSpec(codec=codec, spatial_score=True),
        )
    return HeatmapStore.open(
        url,
        annotations=ANNOTATIONS,
        mode="w",
        snapshot=ledger.snapshots[-1],
        run="life",
        options=options,
        patience_seconds=5,
    )


def live(url, ledger_path, endpoint="", codec="none"):
    """From wherever the ledger says to the end, as a trainer would."""
    ledger = Ledger(ledger_path)
    with open_for_life(url, ledger, endpoint, codec) as store:
        store.drop_snapshots(keep=ledger.snapshots)
        while not ledger.done:
            live_epoch(store, ledger, ledger.next_epoch)
        store.record_history(EPOCHS - 1)


def live_epoch(store, ledger, epoch):
    left = IDS[store.last_epochs()[IDS] != epoch]
    half = left[: len(left) // 2] if len(left) == len(IDS) else left[:0]
    if epoch == 1 and store.group.layout == "dense":
        store.compact(TOP)
        commit(store, ledger, epoch - 1, next_epoch=epoch)
    if len(half):
        learn(store, half, epoch)
        commit(store, ledger, epoch, next_epoch=epoch)
        if epoch == 2:
            take_back(store, ledger, epoch)
    learn(store, np.setdiff1d(left, half), epoch)
    commit(store, ledger, epoch, next_epoch=epoch + 1)
    store.record_history(epoch)


def learn(store, ids, epoch):
    classes = store.read(ids).classes
    scores, heatmaps = values_of(ids, epoch, classes)
    others = {
        "cell_visits": np.full((len(ids), SIZE, SIZE), epoch, np.uint8),
        "sample_visits": np.full(len(ids), epoch, np.uint8),
        "spatial_score": heatmaps[:, :, 0, 0],
    }
    update(store, epoch, ids, Rows(scores=scores, heatmaps=heatmaps, **others))


def commit(store, ledger, epoch, next_epoch):
    snapshot = store.commit(epoch=epoch, attributes={"next": next_epoch})
    ledger.add(snapshot, next_epoch, int((store.last_epochs()[IDS] == epoch).sum()))
    store.drop_snapshots(keep=ledger.snapshots)


def take_back(store, ledger, epoch):
    """Write rows that nobody acknowledges, and return to the last acknowledged state."""
    learn(store, IDS, epoch)
    store.commit(epoch=epoch)
    store.rollback(ledger.snapshots[-1])


def usurp(url, ledger_path, endpoint="", codec="none"):
    """Take the store from its holder, resume from the ledger; stop with writes under way, and then finish.

    The lease is broken as `bigscl unlock --force` does it: nobody can tell a frozen holder from a dead one.
    """
    break_lease(open_backend(url, storage(endpoint)))
    ledger = Ledger(ledger_path)
    with open_for_life(url, ledger, endpoint, codec) as store:
        store.drop_snapshots(keep=ledger.snapshots)
        for epoch, ids in ((EPOCHS, IDS), (EPOCHS + 1, IDS[:4])):
            learn(store, ids, epoch)
            commit(store, ledger, epoch, next_epoch=EPOCHS)
        learn(store, IDS[2:], EPOCHS + 2)
        os.kill(os.getpid(), signal.SIGSTOP)
        commit(store, ledger, EPOCHS + 2, next_epoch=EPOCHS)


# What must be true of it


def check_snapshots(url, endpoint=""):
    """Every retained snapshot by number: whole, and holding what its visit stamps say."""
    newest = HeatmapStore.open(url, annotations=ANNOTATIONS, options=storage(endpoint))
    return {kept.id: check_snapshot(url, kept.id, endpoint) for kept in newest.snapshots()}


def check_snapshot(url, number, endpoint=""):
    store = HeatmapStore.open(url, annotations=ANNOTATIONS, snapshot=number, options=storage(endpoint))
    problems = [problem for _, found in verify(store) for problem in found]
    assert not problems, f"snapshot {number}: {problems[0].reason}"
    rows = store.read(IDS)
    for epoch in set(rows["last_epoch"].tolist()) - {-1}:
        here = rows["last_epoch"] == epoch
        classes = None if rows.classes is None else rows.classes[here]
        scores, heatmaps = values_of(IDS[here], epoch, classes)
        if store.group.codec == "uint8":
            heatmaps = rounded_maps(IDS[here], epoch, classes)
        np.testing.assert_array_equal(rows.scores[here], scores, err_msg=f"snapshot {number}: scores")
        np.testing.assert_array_equal(rows.heatmaps[here], heatmaps, err_msg=f"snapshot {number}: heatmaps")
    return rows


def rounded_maps(ids, epoch, classes):
    """What a compact store holds of `values_of`: rows of epoch 0 were rounded before the compaction."""
    if epoch > 0 or classes is None:
        rows = values_of(ids, epoch, classes)[1]
        return np.stack([slowly_rounded(row, int(n), epoch) for n, row in zip(ids, rows, strict=True)])
    return np.take_along_axis(rounded_maps(ids, epoch, None), classes[:, :, None, None].astype(int), 1)


def check_committed(url, ledger, endpoint=""):
    """All that was acknowledged is there; what is there is whole."""
    if not ledger.entries:
        try:
            check_snapshots(url, endpoint)
        except NotAStore:
            return
    retained = check_snapshots(url, endpoint)
    for entry in ledger.entries:
        assert entry["snapshot"] in retained, f"snapshot {entry['snapshot']} of the ledger is gone"
        seen = int((retained[entry["snapshot"]]["last_epoch"] == entry["epoch"]).sum())
        assert seen == entry["visited"], f"snapshot {entry['snapshot']} has {seen} rows of its epoch"


def check_end(url, ledger, endpoint=""):
    """A life that came to its end left the last epoch's rows, the whole history, and nothing else."""
    assert ledger.done
    check_committed(url, ledger, endpoint)
    store = HeatmapStore.open(url, annotations=ANNOTATIONS, options=storage(endpoint))
    assert (store.read(IDS)["last_epoch"] == EPOCHS - 1).all()
    assert store.group.layout == "topk"
    assert set(store.history(store.spec.history_samples[0])) >= {EPOCHS - 1}
    names = [key for key, _ in store.backend.sizes("")]
    assert not [key for key in names if key.endswith((".partial", ".beat"))]
    assert read_holder(store.backend) is None
    assert {key.split("/")[0] for key in names if key.startswith("arrays-")} == {store.group.name}
