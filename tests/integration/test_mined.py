"""What tools find in a snapshot that a real run saved in mid-epoch."""

import csv
from collections import Counter

import numpy as np
import pytest

from bigscl.memory.snapshot_state import SnapshotState
from tests.builders import index_of, write_config
from tests.integration.moments import InterruptedTrainer
from tests.integration.runs import store_of
from tests.test_tools.conftest import bigscl

pytestmark = [pytest.mark.slow, pytest.mark.timeout(360)]


def test_every_class_has_its_number_of_expected_positives_in_mid_epoch(trainer_server, shards, tmp_path):
    config = write_config(tmp_path / "run.yaml", shards, checkpoint={"every_steps": 3})
    # Seven saves in each epoch, the last at its end: the newest is in the middle of the third one.
    InterruptedTrainer(trainer_server)(
        config, kill="bigscl.training.checkpoint_folder:Checkpoints.save after 16"
    )
    run, index = config.with_suffix(""), index_of(shards)
    counts = np.rint(2.5 * index.annotations().counts()).astype(int)
    wanted = {number: min(count, index.num_samples) for number, count in enumerate(counts.tolist()) if count}
    snapshots = store_of(run, shards).snapshots()
    assert {SnapshotState.of(one, index.num_classes).within_epoch for one in snapshots} == {True, False}
    for one in snapshots:
        out = tmp_path / f"{one.id}.csv"
        options = ("--which", "expected", "--snapshot", one.id, "-o", out, "--json")
        answer = bigscl("export", run, "labels", *options)
        assert answer.code == 0, answer.err
        assert (
            answer.json()["selection"]["recomputed"] == SnapshotState.of(one, index.num_classes).within_epoch
        )
        with out.open() as file:
            assert Counter(int(row["class"]) for row in csv.DictReader(file)) == wanted
