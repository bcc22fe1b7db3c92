"""The memory of a run on one process: recall, learn and the end of an epoch, against the averages by hand."""

from contextlib import contextmanager

import numpy as np
import pytest
import torch

from bigscl.config import load_config
from bigscl.data.batch import Batch
from bigscl.method.selection import Selection
from bigscl.processes.ranks import SingleProcess
from bigscl.training.memory import Memory, Predicted
from bigscl.training.run import Run, RunFolder, open_data, open_store
from tests.integration.runs import make_shards, write_config

SIDE = 6


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    return make_shards(tmp_path_factory.mktemp("shards"), 22, 6)


def make_memory(tmp_path, shards):
    config = load_config(write_config(tmp_path / "run.yaml", shards, store={"top": None}), [])
    run = Run(
        config=config,
        folder=RunFolder(config),
        data=open_data(config),
        ranks=SingleProcess(),
        heatmap_size=2 * SIDE,
    )
    run.folder.id = "this-run"

    @contextmanager
    def show_work(title, total=None):
        yield lambda done: None

    selection = Selection.none(run.data.train.num_classes)
    return Memory(run, open_store(run, None), selection, torch.device("cpu"), show_work), run.data.train


def batches(index, size=8):
    """Whole images, not mirrored, of every sample; the last one could not be read."""
    ids = index.ids()
    for start in range(0, len(ids), size):
        chosen = torch.from_numpy(ids[start : start + size])
        readable, skipped = (chosen, chosen[:0]) if start + size < len(ids) else (chosen[:-1], chosen[-1:])
        yield Batch(
            ids=readable,
            images=torch.zeros(len(readable), 3, 8, 8, dtype=torch.uint8),
            labels=torch.zeros(len(readable), index.num_classes, dtype=torch.int8),
            views=torch.tensor([[0.0, 0, 1, 1, 0]]).repeat(len(readable), 1),
            skipped=skipped,
        )


def train_epoch(memory, index, epoch, probability):
    """Predict the same probability of every class and cell; the recalled values of all samples."""
    found = []
    for batch, recalled in memory.recall(batches(index), epoch):
        found.append(recalled)
        maps = torch.full((len(batch), index.num_classes, SIDE, SIDE), probability)
        logits = torch.logit(torch.full((len(batch), index.num_classes), probability))
        memory.learn(batch, recalled, Predicted(logits=logits, maps=maps))
    memory.end_epoch(epoch, epoch + 1, list(range(len(index.shard_sizes))))
    return found


def test_an_epoch_recalls_what_the_epoch_before_has_learnt(tmp_path, shards):
    memory, index = make_memory(tmp_path, shards)
    first = train_epoch(memory, index, 0, 0.5)
    second = train_epoch(memory, index, 1, 0.5)
    memory.close()
    for before, after in zip(first, second, strict=True):
        np.testing.assert_allclose(after.scores, 0.8 * before.scores.float() + 0.1, atol=1e-3)
        np.testing.assert_allclose(after.heatmaps, 0.8 * before.heatmaps.float() + 0.1, atol=1e-3)
        assert (before.max_visits == 0).all()
        assert (after.max_visits == 1).all()


def test_the_selection_of_an_epoch_is_committed_with_it(tmp_path, shards):
    memory, index = make_memory(tmp_path, shards)
    train_epoch(memory, index, 0, 0.5)
    attributes = memory.store.snapshot.attributes
    memory.close()
    assert attributes["selection"] == memory.selection.to_json()
    assert attributes["next_epoch"] == 1
    assert memory.snapshot == memory.store.snapshot.id
    # 22 images with one positive each, K = 2.5.
    assert sum(attributes["selection"]["num_expected"]) == pytest.approx(2.5 * 22, abs=index.num_classes)


def test_a_sample_that_could_not_be_read_keeps_its_row(tmp_path, shards):
    memory, index = make_memory(tmp_path, shards)
    train_epoch(memory, index, 0, 0.5)
    visited = memory.store.visited()[index.ids()]
    memory.close()
    assert visited.tolist() == [0] * (index.num_samples - 1) + [-1]
