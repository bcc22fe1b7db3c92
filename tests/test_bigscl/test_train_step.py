"""The order in which ranks compute and exchange within an optimizer step, for plans of many ranks."""

from types import SimpleNamespace

import numpy as np
import pytest

from bigscl.config import make_config
from bigscl.config.schedule import plan_epoch
from bigscl.train import Trainer

SIZES = np.array([20] * 13 + [7])


class FakeBatch:
    def __init__(self, size):
        self._size, self.skipped = size, ()

    def __len__(self):
        return self._size


class RecordingTrainer(Trainer):
    """Notes forward passes, and in which of them gradients are exchanged."""

    def __init__(self, config):
        self.config, self.events, self.learnt = config, [], 0
        self.state = SimpleNamespace(begin_step=lambda rate: None, end_step=lambda: None)
        self.step = type("Step", (), {"__call__": lambda _, *a, **b: self._run(), "idle": self._forward})()
        self.memory = SimpleNamespace(update=lambda *a, **b: self._learn(), skip=lambda ids: None)
        self.progress = SimpleNamespace(step=0, advance=lambda step: None, add=lambda batch: None)
        self._exchanging = False

    def _run(self):
        self._forward()
        return None, SimpleNamespace(logits=None, maps=None)

    def _forward(self, *_):
        self.events.append("exchange" if self._exchanging else "forward")

    def _learn(self):
        self.learnt += 1

    def _exchange(self, last):
        trainer = self

        class Context:
            def __enter__(self):
                trainer._exchanging = last

            def __exit__(self, *_):
                trainer._exchanging = False

        return Context()

    def _note(self, batch):
        pass


def steps_of(rank, world_size, *, synced, accumulate=3, unreadable=()):
    """The events of each step of an epoch on one rank."""
    config = make_config(
        {
            "run": "run",
            "data": {"train": "shards", "batch_size": 4, "workers": 2},
            "model": {"backbone": "resnet18"},
            "selection": {"K": 2.0},
            "optimizer": {"accumulate": accumulate},
            "hardware": {"sync_batchnorm": synced},
        }
    )
    plan = plan_epoch(config, SIZES, 20, epoch=1, world_size=world_size)
    trainer = RecordingTrainer(config)
    batches = [
        FakeBatch(0 if (rank, number) in unreadable else 4) for number in range(plan.whole.num_batches(rank))
    ]
    meter = SimpleNamespace(add=lambda loss: None)
    steps = []
    for place in range(plan.num_steps):
        window = [(batch, object()) for batch in batches[place * accumulate : (place + 1) * accumulate]]
        trainer.train_step(window, plan.num_batches(place), meter, 4, 0.1, 1.0)
        steps.append(trainer.events)
        trainer.events = []
    assert trainer.learnt == sum(len(batch) > 0 for batch in batches)
    return steps


@pytest.mark.parametrize("world_size", [2, 8, 16])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_ranks_with_synchronised_statistics_make_the_same_forwards_in_the_same_order(world_size, accumulate):
    unreadable = {(1, 0), (1, 2), (0, 3)}
    ranks = [
        steps_of(rank, world_size, synced=True, accumulate=accumulate, unreadable=unreadable)
        for rank in range(world_size)
    ]
    assert all(steps == ranks[0] for steps in ranks)
    assert all(step[-1] == "exchange" and step.count("exchange") == 1 for step in ranks[0])


@pytest.mark.parametrize("world_size", [2, 8, 16])
def test_ranks_exchange_gradients_once_in_every_step(world_size):
    unreadable = {(1, 0), (1, 1), (1, 2), (0, 3)}
    ranks = [steps_of(rank, world_size, synced=False, unreadable=unreadable) for rank in range(world_size)]
    assert len({len(steps) for steps in ranks}) == 1
    for steps in ranks:
        assert all(step[-1] == "exchange" and step.count("exchange") == 1 for step in steps)


def test_a_rank_without_readable_images_computes_once():
    (first, *_) = steps_of(1, 2, synced=False, unreadable={(1, 0), (1, 1), (1, 2)})
    assert first == ["exchange"]
