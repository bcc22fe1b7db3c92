"""`kill -9` at random moments: the last commit reads back whole, and the next run goes on by itself."""

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from bigscl.store import HeatmapStore, verify
from tests.test_store.conftest import all_ids
from tests.test_store.crash_writer import ANNOTATIONS, EPOCHS, values_of

ROOT = Path(__file__).parent.parent.parent


def start(path, acknowledged):
    return subprocess.Popen(
        [sys.executable, "-m", "tests.test_store.crash_writer", str(path), str(acknowledged)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )


def check(path, acknowledged):
    """The store is whole, holds what each visit stamp says, and nothing acknowledged is lost."""
    store = HeatmapStore.open(path, annotations=ANNOTATIONS)
    assert all(not problems for _, problems in verify(store))
    ids = all_ids(ANNOTATIONS)
    rows = store.read(ids)
    for epoch in set(rows["last_epoch"].tolist()) - {-1}:
        here = rows["last_epoch"] == epoch
        classes = None if rows.classes is None else rows.classes[here]
        scores, heatmaps = values_of(ids[here], epoch, classes)
        np.testing.assert_array_equal(rows.scores[here], scores)
        np.testing.assert_array_equal(rows.heatmaps[here], heatmaps)
    if acknowledged.exists() and acknowledged.read_text():
        number, visited, epoch = map(int, acknowledged.read_text().split())
        assert store.snapshot.id >= number
        assert (rows["last_epoch"] >= epoch).sum() >= visited
    return store.snapshot


def kill_again_and_again(tmp_path, kills, seed):
    path, acknowledged = tmp_path / "store", tmp_path / "acknowledged"
    moments = random.Random(seed)
    survived = 0
    for _ in range(kills):
        writer = start(path, acknowledged)
        assert writer.stdout.readline() == "ready\n"
        time.sleep(moments.expovariate(1 / 0.15))
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        survived = max(survived, check(path, acknowledged).id)
        if writer.returncode == 0:
            path = tmp_path / f"store-{seed}-{survived}-{len(list(tmp_path.iterdir()))}"
            acknowledged = tmp_path / f"{path.name}.acknowledged"
    last = start(path, acknowledged)
    output, _ = last.communicate(timeout=120)
    assert last.returncode == 0
    assert output.endswith("done\n")
    assert check(path, acknowledged).epoch == EPOCHS
    assert not list(path.rglob("*.partial"))


def test_killed_writers_lose_nothing_that_was_committed(tmp_path):
    kill_again_and_again(tmp_path, kills=5, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [2, 3, 4])
def test_many_killed_writers_lose_nothing_that_was_committed(tmp_path, seed):
    kill_again_and_again(tmp_path, kills=25, seed=seed)
