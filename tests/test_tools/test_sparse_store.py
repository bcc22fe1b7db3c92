"""The tools on a store that keeps the highest scores of a row and a floor for the rest."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from bigscl.config import StoreConfig
from bigscl.data.index import write_sample_list
from bigscl.memory.memory import Memory
from bigscl.store import HeatmapStore
from tests.test_tools.conftest import add_config, bigscl
from tests.test_tools.test_read_it_yourself import executed

KEPT, SIDE = 4, 3


@pytest.fixture
def run(tmp_path, index):
    """A run of two epochs whose heatmaps were reduced to two classes after the first."""
    settings = StoreConfig(
        url=str(tmp_path / "run" / "store"),
        warmup_heatmaps="scores",
        top=2,
        compact_after=1,
        top_scores=KEPT,
        history_samples=2,
    )
    random = torch.Generator().manual_seed(0)
    with Memory(index.annotations(), settings, heatmap_size=2 * SIDE, positives_per_image=2.5) as memory:
        for _ in range(2):
            for ids in np.array_split(index.ids(), 4):
                maps = torch.rand((len(ids), index.num_classes, SIDE, SIDE), generator=random)
                memory.update(memory.lookup(ids), logits=torch.logit(maps.mean((2, 3))), maps=maps)
            memory.end_epoch()
    add_config(tmp_path / "run", index)
    return tmp_path / "run"


def opened(run, index):
    return HeatmapStore.open(run / "store", annotations=index.annotations())


def test_show_says_what_is_kept_and_which_classes_are_approximate(run, index):
    recorded = opened(run, index).snapshot.attributes["selection"]["approximate"]
    names = [index.class_names[number] for number in recorded["classes"]]
    assert names
    shown = bigscl("show", run)
    assert shown.code == 0, shown.err
    assert f"the {KEPT} highest scores" in shown.out
    assert f"{len(names)} of {index.num_classes} classes are approximate ({names[0]}" in shown.out
    assert f"up to {max(recorded['images'])} images may have left out a score" in shown.out
    facts = json.loads(bigscl("show", run, "--json").out)
    assert facts["top_scores"] == KEPT
    assert facts["snapshots"][-1]["approximate"] == recorded["classes"]


def test_exported_scores_are_those_of_all_classes(run, index, tmp_path):
    assert bigscl("export", run, "scores", "-o", tmp_path / "scores.npz").code == 0
    with np.load(tmp_path / "scores.npz") as file:
        np.testing.assert_array_equal(file["scores"], opened(run, index).read(index.ids()).scores)
    assert bigscl("export", run, "labels", "-o", tmp_path / "labels.csv").code == 0
    assert bigscl("diff", run, run).code == 0


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
def test_a_score_is_read_by_key_with_json_and_zarr_alone(run, index):
    write_sample_list(index, run / "samples.json")
    sample = int(index.ids()[-1])
    scores = opened(run, index).read([sample]).scores[0]
    for number, name in enumerate(index.class_names):
        assert executed(run, index.key(sample), name)["score"] == scores[number]


@pytest.mark.parametrize("array", ["scores", "score_classes", "score_floor"])
def test_damaged_scores_are_found_and_repaired(run, index, array):
    store = opened(run, index)
    before, slot = store.read(index.ids()), store.snapshot.slots[1]
    (key,) = (key for key in store.arrays.keys(1, slot) if f"/{array}/" in key)
    chunk = Path(store.backend.url, key)
    content = bytearray(chunk.read_bytes())
    content[2] ^= 1
    chunk.write_bytes(content)
    found = bigscl("verify", run)
    assert found.code == 1
    assert array in found.out
    assert bigscl("repair", run, "--apply").code == 0
    assert bigscl("verify", run).code == 0
    after, hit = opened(run, index).read(index.ids()), index.ids() // index.rows_per_shard == 1
    for name, values in before.items():
        np.testing.assert_array_equal(after[name][~hit], values[~hit])
    np.testing.assert_array_equal(after.scores[hit], index.annotations().of_rows(index.ids()[hit]))


def test_heatmaps_are_compacted_further_and_scores_stay(run, index):
    before = opened(run, index).read(index.ids())
    assert bigscl("compact", run, "--top", "1", "--apply").code == 0
    after = opened(run, index).read(index.ids())
    np.testing.assert_array_equal(after.scores, before.scores)
    assert after.classes.shape[1] == 1
    more = bigscl("compact", run, "--top", str(KEPT + 1))
    assert more.code == 2
