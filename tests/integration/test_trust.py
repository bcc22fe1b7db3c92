"""A run with hidden labels: what its log, its commands and its page say of the labels that it has mined."""

import csv
import json
import shutil

import numpy as np
import pytest

from bigscl.data.index import load_index
from bigscl.data.labels.training_labels import hide_given
from bigscl.memory.snapshot_state import SnapshotState
from bigscl.store import HeatmapStore, StoreError
from tests.builders import make_once, write_config
from tests.integration.runs import train
from tests.test_tools.conftest import bigscl
from tests.test_tools.view_site import serving


@pytest.fixture(scope="module")
def run(shards, tmp_path_factory):
    """A run of three epochs in which a quarter of the 150 labels are hidden."""

    def trained(folder):
        config = write_config(folder / "run.yaml", shards, data={"canaries": 0.25}, store={"top": None})
        train(config)

    return make_once(tmp_path_factory, "trusted", trained) / "run"


def test_run_logs_its_trust_at_the_end_of_each_epoch(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    epochs = [line for line in lines if line["kind"] == "epoch"]
    assert [line["hidden_labels"] for line in epochs] == [38, 38, 38]
    assert all(0 < line["mined_precision"] < 1 for line in epochs)
    low, high = epochs[-1]["mined_precision_95"]
    assert low <= epochs[-1]["mined_precision"] <= high


def test_commands_say_how_far_to_trust_mined_labels_and_keep_the_hidden_ones(run, shards, tmp_path):
    """The labels of the folder are exported as such, also where training has not seen them."""
    index = load_index(str(shards / "train-*.tar"))
    shown = bigscl("show", run, "--json").json()
    assert shown["trust"]["hidden"] == 38
    assert shown["trust"] == shown["snapshots"][-1]["trust"]
    assert "  trust     mined labels: " in bigscl("show", run).out
    exported = bigscl("export", run, "labels", "--which", "all", "-o", tmp_path / "all.csv", "--json")
    assert exported.json()["trust"] == shown["trust"]
    with (tmp_path / "all.csv").open() as file:
        rows = list(csv.DictReader(file))
    annotated = sorted((int(row["id"]), int(row["class"])) for row in rows if row["annotated"] == "True")
    ids = index.ids()
    places, classes = index.given.entries(ids)
    assert annotated == sorted(zip(ids[places].tolist(), classes.tolist(), strict=True))
    mined = bigscl("export", run, "labels", "-o", tmp_path / "mined.csv")
    assert "of 38 hidden labels found" in mined.out
    with (tmp_path / "mined.csv").open() as file:
        pairs = {(int(row["id"]), int(row["class"])) for row in csv.DictReader(file)}
    assert not pairs & set(annotated)
    dataset = tmp_path / "dataset"
    assert bigscl("export", run, "labels", "--format", "dataset", "-o", dataset).code == 0
    assert (
        "Estimate from labels that were hidden from training: mined labels: "
        in (dataset / "README.md").read_text()
    )


def test_damaged_trust_is_refused(run, shards):
    annotations = hide_given(load_index(str(shards / "train-*.tar")), 0.25).annotations()
    with HeatmapStore.open(str(run / "store"), annotations=annotations) as store:
        snapshot = store.snapshot
    snapshot.attributes["trust"].pop("groups")
    with pytest.raises(StoreError, match="its attributes cannot be read"):
        SnapshotState.of(snapshot, 10)


def test_page_shows_predictions_without_initial_values_and_how_far_to_trust_labels(run, shards, tmp_path):
    copied = shutil.copytree(run, tmp_path / "run")
    with serving(copied, follow=False) as site:
        site.runs[0].update(now=True)
        (facts,) = site.ask("/api/runs").json()
        classes = site.ask("/api/classes?run=0").json()
        found = site.ask("/api/sample?row=3").json()["classes"]
        listed = site.ask("/api/samples?order=row").json()["items"]
        store, index = site.runs[0].store, site.runs[0].data.index
        seen = store.scores_without_initial_value(store.read([3]), np.array([3]))[0]
        stored = store.read([3]).scores[0]
    assert "few visits: 51% of a stored score is still its initial value" in facts["note"]
    assert "of 38 hidden labels found" in facts["note"]
    assert "frequent (" in classes["note"]
    assert {one["class"]: one["score"] for one in found} == pytest.approx(
        {one["class"]: float(seen[one["class"]]) for one in found}
    )
    (label,) = index.given[3]
    assert float(stored[label]) > float(seen[label]) + 0.1, "half of the stored score is its start at 1"
    assert len(listed) > 0
