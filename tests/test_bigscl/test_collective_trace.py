"""All ranks make the same collective calls in the same order: operation, group, type and size.

The real epoch loop, step, phases and DDP run on one rank after the other, for plans of up to 128 ranks. The
process group only writes down what it is asked for, so ranks that would wait for each other for ever show.
"""

import contextlib
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import _create_work_from_future
from torch.nn.parallel import DistributedDataParallel

from bigscl.train import Stopped, Trainer
from bigscl.training.model_state import ModelState
from bigscl.training.run_memory import NoMemory
from bigscl.training.run_progress import EpochProgress
from bigscl.training.step import Step
from tests.builders import config_of, make_batch
from tests.test_store.conftest import make_annotations

NUM_CLASSES, SIZE, BATCH = 4, 16, 2
WORLD_SIZES = (2, 8, 128)
RANKS_OF_MANY = (0, 1, 2, 63, 126, 127)
"""Of 128 ranks these are traced."""


class RecordingGroup(dist.ProcessGroup):
    """A process group that writes down every call and answers at once."""

    def __init__(self, rank, world_size, events):
        super().__init__(rank, world_size)
        self._events = events

    def _done(self, name, tensors):
        self._events += [(name, "DDP", each.dtype, each.numel()) for each in tensors]
        future = torch.futures.Future()
        future.set_result(tensors)
        return _create_work_from_future(future)

    def allreduce(self, tensors, options=None):
        return self._done("all_reduce", tensors)

    def broadcast(self, tensors, options=None):
        return self._done("broadcast", tensors)

    def allgather(self, outputs, inputs, options=None):
        for output, given in zip(outputs, inputs, strict=True):
            for each in output:
                each.copy_(given)
        return self._done("all_gather", inputs)

    def getBackendName(self):  # noqa: N802
        return "recording"


class RecordingRanks:
    """The ranks' own group; every sum has the result that all ranks would see."""

    wait_seconds = 0.0

    def __init__(self, rank, world_size, events, stop_after):
        self.rank, self.world_size = rank, world_size
        self._events, self._stop_after, self._windows = events, stop_after, 0

    def start_sum(self, values):
        self._events.append(("sum", "gloo", torch.float64, len(values)))
        self._windows += 1
        return lambda: [64.0, float(self._windows == self._stop_after), *[0.0] * (len(values) - 2)]

    def sum(self, values):
        self._events.append(("sum", "gloo", torch.float64, len(values)))
        return [1.0] * len(values)

    def gather(self, payload):
        self._events.append(("gather", "gloo"))
        self._payload = payload
        return [payload] * self.world_size if self.rank == 0 else None

    def broadcast(self, payload):
        self._events.append(("broadcast", "gloo"))
        return payload or self._payload  # rank 0 would have sent something of this kind


class RecordingAccelerator:
    """What the trainer uses of Accelerate on CPUs."""

    device, scaler = torch.device("cpu"), None

    def __init__(self, group, events):
        self._group, self._events = group, events

    def prepare(self, network, optimizer):
        return DistributedDataParallel(network, process_group=self._group), optimizer

    def unwrap_model(self, model, keep_fp32_wrapper):
        return model.module

    def free_memory(self):
        pass

    def no_sync(self, model):
        return model.no_sync()

    def backward(self, loss):
        loss.backward()

    def reduce(self, values, reduction):
        self._events.append(("all_reduce", "accelerate", values.dtype, values.numel()))
        return values

    def gather(self, values):
        self._events.append(("all_gather", "accelerate", values.dtype, values.numel()))
        return values.repeat(self._group.size())


class RecordedStatistics(torch.autograd.Function):
    """Communicates where SyncBatchNorm does: statistics forward, their gradients backward."""

    @staticmethod
    def forward(context, images, events):
        context.events, context.channels = events, images.shape[1]
        events.append(("all_gather", "statistics", torch.float32, 2 * images.shape[1] + 1))
        return images.clone()

    @staticmethod
    def backward(context, gradient):
        context.events.append(("all_reduce", "statistics", torch.float32, 2 * context.channels))
        return gradient, None


class RecordedNorm(nn.Module):
    def __init__(self, events):
        super().__init__()
        self._events = events

    def forward(self, images):
        return RecordedStatistics.apply(images, self._events) if self.training else images


class TracedNet(nn.Module):
    events: list | None = None
    """Where synchronised layers write, None if there are none."""

    def __init__(self, num_classes):
        super().__init__()
        norm = nn.Identity() if TracedNet.events is None else RecordedNorm(TracedNet.events)
        self.features = nn.Sequential(nn.Conv2d(3, 4, 4, stride=4), norm, nn.Tanh())
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(4, num_classes)

    def forward(self, images):
        return self.fc(self.pool(self.features(images)).flatten(1))


class TracedTrainer(Trainer):
    """The real loop over blank images, without a folder, a store and a launcher."""

    def __init__(self, config, data, accelerator, ranks, unreadable):
        self.config, self.accelerator, self.ranks, self.data = config, accelerator, ranks, data
        self.device, self.schedule = accelerator.device, config.schedule
        self.memory = NoMemory()
        self.state = ModelState(config, data, accelerator, ranks)
        self.progress = EpochProgress(len(data.train.keys), ranks)
        self.metrics = SimpleNamespace(
            progress=lambda *_: contextlib.nullcontext(), advance=lambda: None, step=lambda *_: None
        )
        self.step = Step(config, data, self.state, self.memory, ranks)
        self.stopping, self.stop_file = False, SimpleNamespace(is_requested=lambda: False, clear=lambda: None)
        self.saver = SimpleNamespace(
            has_failed=False, saved_at=0.0, save_within=lambda *_: None, finish=lambda: None
        )
        self._unreadable = unreadable

    def finish_epoch(self, epoch, *_):
        self.state.share_loss_state(ends_epoch=True)
        self.progress.begin_epoch(epoch + 1)

    def _loader(self, plan, epoch):
        for number, ids in enumerate(plan.remaining.batches(self.ranks.rank)):
            lost = (self.ranks.rank, number) in self._unreadable
            yield blank_batch(ids[:0] if lost else ids, ids if lost else ids[:0])

    def _log(self, epoch, meter, values):
        meter.read(self.memory.waits)


def blank_batch(ids, skipped):
    labels = np.full((len(ids), NUM_CLASSES), -1, np.int8)
    labels[:, 0] = 1
    images = torch.zeros(len(ids), 3, SIZE, SIZE, dtype=torch.uint8)
    why = {"skipped": torch.from_numpy(skipped), "reasons": ("cannot be read",) * len(skipped)}
    return make_batch(ids, images, torch.from_numpy(labels), **why)


def trace(rank, world_size, *, base="an", accumulate=1, synced=False, unreadable=(), stop_after=None):
    """The collective calls of one rank in a run of two phases, and of its phases' first backwards."""
    # Ranks have 30 or 29 samples, 8 or 7, 4 or 3; of 128 some have two, and the last ones none.
    sizes = (5, 3, 8, 6, 5, 4, 7, 2, 1, 9, 9) if world_size < 128 else (2,) * 100 + (7, 6, 1)
    annotations = make_annotations(sizes, NUM_CLASSES)
    config = config_of(
        data={"size": SIZE, "batch_size": BATCH, "workers": 2},
        model={"backbone": "tests.test_bigscl.test_collective_trace:TracedNet"},
        objective={"base": base, "consistency": "none"},
        store={"kind": "none", "top": None},
        optimizer={"accumulate": accumulate},
        hardware={"sync_batchnorm": synced},
        schedule={phase: {"epochs": 1, "learning_rate": 0.1} for phase in ("warmup", "main")},
    )
    events = []
    TracedNet.events = events if synced else None
    ranks = RecordingRanks(rank, world_size, events, stop_after)
    accelerator = RecordingAccelerator(RecordingGroup(rank, world_size, events), events)
    index = SimpleNamespace(
        num_classes=NUM_CLASSES,
        keys=np.empty(len(sizes) * max(sizes)),
        shard_sizes=np.array(sizes),
        rows_per_shard=max(sizes),
    )
    data = SimpleNamespace(train=index, annotations=annotations, positives_per_image=2.0)
    # The real layers need a GPU, so the network is not converted: these communicate by themselves.
    with mock.patch("bigscl.training.model_state.synchronize_batchnorm"):
        trainer = TracedTrainer(config, data, accelerator, ranks, unreadable)
    with contextlib.suppress(Stopped):
        trainer.train()
    return events


def assert_same_on_all_ranks(world_size, **options):
    ranks = range(world_size) if world_size < 128 else RANKS_OF_MANY
    traces = [trace(rank, world_size, **options) for rank in ranks]
    for rank, events in zip(ranks, traces, strict=True):
        for place, (ours, first) in enumerate(zip(events, traces[0], strict=False)):
            assert ours == first, f"call {place} of rank {rank} is {ours}, of rank 0 {first}"
        assert len(events) == len(traces[0]), (
            f"rank {rank} makes {len(events)} calls, rank 0 {len(traces[0])}"
        )
    return traces[0]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("base", ["an", "epr", "role", "ll_r", "ll_cp", "crisp"])
def test_ranks_of_any_plan_make_the_same_calls(world_size, base):
    """Among them ranks that run out of batches, and ranks that have none at all."""
    events = assert_same_on_all_ranks(world_size, base=base)
    assert sum(event[:2] == ("all_reduce", "DDP") for event in events) >= 4
    exchange = "all_gather" if base.startswith("ll") else "all_reduce"
    assert (exchange, "accelerate") in {event[:2] for event in events} or base == "an"


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("synced", [False, True])
def test_accumulated_batches(world_size, synced):
    """Windows are shorter on some ranks at an epoch's end. Losses of the whole batch refuse `accumulate`."""
    assert_same_on_all_ranks(world_size, accumulate=3, synced=synced)


@pytest.mark.parametrize("world_size", [2, 8])
@pytest.mark.parametrize("synced", [False, True])
@pytest.mark.parametrize(
    ("base", "accumulate"), [("an", 1), ("an", 3), ("epr", 1), ("role", 1), ("ll_ct", 1), ("crisp", 1)]
)
def test_batches_that_cannot_be_read(world_size, synced, base, accumulate):
    """One in a window, all of a window, and the last of an epoch, on one rank each."""
    unreadable = {(0, 1), (1, 0), (1, 1), (1, 2), (1, 3)}
    assert_same_on_all_ranks(
        world_size, base=base, accumulate=accumulate, synced=synced, unreadable=unreadable
    )


@pytest.mark.parametrize("stop_after", [1, 2, 5])
def test_stops(stop_after):
    whole = assert_same_on_all_ranks(8)
    stopped = assert_same_on_all_ranks(8, stop_after=stop_after)
    assert len(stopped) < len(whole)


def test_trace_finds_a_rank_that_leaves_an_exchange_out(monkeypatch):
    monkeypatch.setattr(Step, "idle", lambda self, count: None)
    with pytest.raises(AssertionError, match=r"rank \d makes|call \d+ of rank"):
        assert_same_on_all_ranks(8)
