"""Damage in all that a run could resume from, and the way back into training."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bigscl.digests import write_sealed
from bigscl.store import HeatmapStore
from tests.integration.runs import settings, store_of, train, write_config
from tests.test_tools.conftest import bigscl


def corrupt_everywhere(folder, shards, shard, array):
    """Flip a bit in one chunk of a shard, in every retained snapshot."""
    for snapshot in store_of(folder, shards).snapshots():
        store = store_of(folder, shards, snapshot.id)
        keys = [key for key in store.arrays.keys(shard, snapshot.slots[shard]) if f"/{array}/" in key]
        path = Path(store.backend.url, keys[0])
        data = bytearray(path.read_bytes())
        data[11] ^= 64
        path.write_bytes(data)


def test_run_whose_checkpoints_are_all_damaged_is_repaired_and_resumed(tmp_path, shards, trainer_server):
    config = write_config(tmp_path / "run.yaml", shards)
    folder = config.with_suffix("")
    train(config, "--schedule.main.epochs", 1)
    corrupt_everywhere(folder, shards, 3, "heatmaps")
    refused = trainer_server.run_module("bigscl.train", config)
    assert refused.returncode == 2
    assert "Traceback" not in refused.stderr
    assert "shard 3" in refused.stderr
    assert "bigscl repair" in refused.stderr
    assert bigscl("repair", folder).code == 1
    answer = bigscl("repair", folder, "--apply")
    assert answer.code == 0, answer.err
    assert "samples 48-63: reset to their initial values" in answer.out
    train(config)
    done = store_of(folder, shards)
    assert done.snapshot.epoch == 2
    assert (done.visited() == 2).sum() == 150
    assert bigscl("verify", folder).code == 0


def without_counts(folder, shards):
    """Replace the run's store by one as earlier revisions wrote it: no counts, visits or momentum."""
    store = store_of(folder, shards)
    rows = [store.load_shard(shard) for shard in range(store.spec.num_shards)]
    kept = {"layout": store.group.layout, "top": store.group.top, "slots": store.group.slots}
    snapshot, annotations = store.snapshot, store.annotations
    attributes = {name: value for name, value in snapshot.attributes.items() if name != "momentum"}
    shutil.move(folder / "store", folder.parent / "counted")
    HeatmapStore.create(folder / "store", annotations, heatmap_size=12, tracked=0, **kept)
    with HeatmapStore.open(
        folder / "store", annotations=annotations, mode="w", run=snapshot.run, snapshot=0
    ) as older:
        for shard, each in enumerate(rows):
            older.save_shard(shard, replace(each, counts=None, visits=None))
        new = older.commit(epoch=snapshot.epoch, step=snapshot.step, attributes=attributes)
    for file in sorted((folder / "checkpoints").glob("step-*/progress.json")):
        values = json.loads(file.read_text())
        write_sealed(file, {**values, "snapshot": new.id})
    return np.concatenate([each.counts for each in rows])


def counts_of(folder, shards):
    store = store_of(folder, shards)
    return np.concatenate([store.load_shard(shard).counts for shard in range(store.spec.num_shards)])


LAYOUTS = {
    "top classes, erased boxes": {"data": {"erase": {"probability": 0.8}}},
    "from scores": {"store": {"top": 4, "slots": 4, "warmup_heatmaps": "scores"}},
}


@pytest.mark.parametrize("sections", LAYOUTS.values(), ids=LAYOUTS)
def test_looks_are_computed_again_as_the_run_has_counted_them(tmp_path, shards, sections):
    given = settings(shards)
    config = write_config(
        tmp_path / "run.yaml", shards, **{name: {**given[name], **one} for name, one in sections.items()}
    )
    folder = config.with_suffix("")
    train(config, "--schedule.main.epochs", 1, "--checkpoint.keep", 1)
    counted = without_counts(folder, shards)
    assert counted.max() == (1 if "store" in sections else 2)
    assert counted.min() == 0
    before = store_of(folder, shards).snapshot
    answer = bigscl("repair", folder, "--looks")
    assert "Add --apply" in answer.out
    assert answer.code == 0, answer.err
    assert store_of(folder, shards).snapshot == before
    answer = bigscl("repair", folder, "--looks", "--apply", "--json")
    assert answer.code == 0, answer.err
    store = store_of(folder, shards)
    assert answer.json()["written_as"] == store.snapshot.id
    np.testing.assert_array_equal(counts_of(folder, shards), counted)
    assert store.start_values is not None, "readers show what was seen"
    assert bigscl("verify", folder).code == 0
    assert "nothing to do" in bigscl("repair", folder, "--looks").out
    train(config)
    resumed = counts_of(folder, shards)
    shutil.rmtree(folder)
    train(config)
    np.testing.assert_array_equal(resumed, counts_of(folder, shards))
