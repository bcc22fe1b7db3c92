"""What losses keep from step to step: corrections and histograms, alone, over ranks, and when resumed."""

import copy
import math
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bigscl.distributed.ranks import SingleProcess
from bigscl.losses import state as loss_states
from bigscl.losses.class_histograms import (
    EDGES,
    NUM_BINS,
    UNKNOWN,
    ClassHistograms,
    class_priors,
    lowest_cuts,
)
from bigscl.losses.large_loss import LabelCorrections, pack, unpack
from bigscl.models.spatial import build_model
from bigscl.training.model_state import make_loss_state
from bigscl.training.step import Step
from tests.builders import config_of, make_batch
from tests.test_store.conftest import make_annotations

CPU = torch.device("cpu")
SIZES, NUM_CLASSES, NUM_ROWS, SIDE = (6, 6), 10, 12, 48


class ThreadGroup:
    """Ranks as threads of this process, which wait for each other in every exchange."""

    def __init__(self, world_size):
        self.world_size = world_size
        self._barrier = threading.Barrier(world_size, timeout=60)
        self._given = [None] * world_size

    def exchange(self, rank, value):
        self._given[rank] = value
        self._barrier.wait()
        everything = list(self._given)
        self._barrier.wait()
        return everything

    def run(self, function):
        """The results of function(rank) on all ranks."""
        results, errors = [None] * self.world_size, []

        def work(rank):
            try:
                results[rank] = function(rank)
            except BaseException as error:
                errors.append(error)
                self._barrier.abort()

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(self.world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise next(
                (each for each in errors if not isinstance(each, threading.BrokenBarrierError)), errors[0]
            )
        return results


class ThreadRank:
    """One of them, as the ranks' own group and as Accelerate."""

    device, scaler = CPU, None

    def __init__(self, group, rank):
        self._group, self.rank, self.world_size = group, rank, group.world_size

    def gather(self, value):
        parts = self._group.exchange(self.rank, value)
        if isinstance(value, torch.Tensor):
            assert len({part.shape for part in parts}) == 1, "all_gather needs the same shape from all ranks"
            return torch.cat(parts)
        return parts if self.rank == 0 else None

    def broadcast(self, payload):
        return self._group.exchange(self.rank, payload)[0]

    def sum_counts(self, counts):
        parts = self._group.exchange(self.rank, counts)
        assert len({part.shape for part in parts}) == 1, "all_reduce needs the same shape from all ranks"
        return sum(parts)

    def reduce(self, values, reduction):
        return torch.stack(self._group.exchange(self.rank, values)).sum(0)

    def backward(self, loss):
        loss.backward()


# Corrections


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1000), classes=st.integers(1, 40))
def test_flags_are_the_same_after_packing(seed, classes):
    flags = torch.rand(5, classes, generator=torch.Generator().manual_seed(seed)) < 0.5
    bits = pack(flags)
    assert bits.dtype == torch.uint8
    assert bits.shape == (5, math.ceil(classes / 8))
    assert torch.equal(unpack(bits, classes), flags)


def test_corrections_last_and_add_up_and_are_awaited_one_call_later():
    ours, awaited = LabelCorrections(4, 11), []
    expected = torch.zeros(4, 11, dtype=torch.bool)
    for number, ids in enumerate(([0, 2], [2, 3], [1, 0])):
        flags = torch.rand(2, 11, generator=torch.Generator().manual_seed(number)) < 0.3
        ours.add(torch.tensor(ids), pack(flags), lambda number=number: awaited.append(number))
        assert awaited == list(range(number))
        for row, flag in zip(ids, flags, strict=True):
            expected[row] |= flag
    ours.share(SingleProcess())
    assert torch.equal(ours.of(torch.arange(4), CPU), expected)
    restored = LabelCorrections(4, 11)
    restored.load(ours.state())
    assert torch.equal(restored.of(torch.tensor([3, 1]), CPU), expected[[3, 1]])


def test_a_dataset_that_does_not_fit_is_refused_with_the_sum(monkeypatch):
    monkeypatch.setattr(loss_states, "MAX_BYTES", 30)
    with pytest.raises(ValueError, match=r"ll_cp keeps a bit for each of 20 images x 9 classes"):
        LabelCorrections(20, 9)


# Histograms


def values_and_labels(seed, rows=200, classes=3):
    generator = np.random.default_rng(seed)
    labels = generator.choice([-1, -1, -1, 0, 1], (rows, classes)).astype(np.int8)
    values = generator.beta(0.3, 2, (rows, classes)) ** 2
    values = np.where(labels == 1, np.sqrt(values), values).astype(np.float16)
    return values, labels


def counted(values, labels, parts=1):
    """The complete histogram of ranks that share the rows."""
    group = ThreadGroup(parts)

    def work(rank):
        ours, mine = ClassHistograms(values.shape[1], CPU), slice(rank, None, parts)
        half = len(values[mine]) // 2
        ours.add(torch.from_numpy(values[mine][:half]), torch.from_numpy(labels[mine][:half]))
        ours.share(ThreadRank(group, rank), ends_epoch=False)
        ours.add(torch.from_numpy(values[mine][half:]).float(), torch.from_numpy(labels[mine][half:]))
        ours.share(ThreadRank(group, rank), ends_epoch=True)
        assert not ours.current.any()
        return ours.complete

    return group.run(work)


def test_histograms_count_every_label_once_on_any_number_of_ranks():
    values, labels = values_and_labels(0)
    expected = np.zeros((3, 3, NUM_BINS), np.int64)
    for n, i in np.ndindex(values.shape):
        place = int(np.searchsorted(EDGES.astype(float), float(values[n, i]), side="right")) - 1
        expected[labels[n, i] + 1, i, place] += 1
    for parts in (1, 2, 3):
        for complete in counted(values, labels, parts):
            np.testing.assert_array_equal(complete, expected)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_below_a_cut_lies_the_share_but_for_one_bin(share):
    values, labels = values_and_labels(1)
    (complete,) = counted(values, labels)
    for i, cut in enumerate(lowest_cuts(complete[UNKNOWN], share)):
        unknown = values[labels[:, i] == -1, i]
        below = (unknown < cut).sum()
        assert below <= share * len(unknown)
        after = np.nextafter(cut, np.float16(2)) if cut == 1 else EDGES[np.searchsorted(EDGES, cut) + 1]
        assert (unknown < after).sum() > share * len(unknown) or cut == 1


def test_a_class_without_values_has_no_pseudo_labels():
    assert not lowest_cuts(np.zeros((4, NUM_BINS), np.int64), 0.9).any()


def prior_reference(values, labels, delta, tau):
    """Theorem 4.1 of CRISP for one class, over every edge as a threshold."""
    positive = values[labels == 1]
    n, n_p = len(values), len(positive)
    slack = math.sqrt(math.log(4 / delta) / (2 * n)) + math.sqrt(math.log(4 / delta) / (2 * n_p))
    best = None
    for z in EDGES:
        q, p = (values >= z).sum() / n, (positive >= z).sum() / n_p
        if p > 0 and (best is None or (q + (1 + tau) * slack) / p < best[0]):
            best = ((q + (1 + tau) * slack) / p, q / p)
    return min(max(best[1], n_p / n), 1.0)


@pytest.mark.parametrize("delta", [0.01, 0.3])
@pytest.mark.parametrize("seed", range(4))
def test_class_priors_equal_the_papers_theorem(seed, delta):
    values, labels = values_and_labels(seed)
    (complete,) = counted(values, labels)
    found = class_priors(complete, delta, 0.05)
    for i in range(3):
        assert found[i] == pytest.approx(prior_reference(values[:, i], labels[:, i], delta, 0.05), rel=1e-12)


def test_class_priors_of_separated_classes_are_their_shares():
    """A tenth of 10,000 images has the class, a fifth of those is given; predictions tell them apart."""
    generator = np.random.default_rng(0)
    has = np.arange(10_000) % 10 == 0
    labels = np.where(has & (generator.random(10_000) < 0.2), 1, -1).astype(np.int8)[:, None]
    values = np.where(has, generator.beta(8, 2, 10_000), generator.beta(1, 12, 10_000)).astype(np.float16)
    (complete,) = counted(values[:, None], labels)
    assert class_priors(complete, 0.01, 0.01)[0] == pytest.approx(0.1, abs=0.01)
    assert class_priors(np.zeros_like(complete), 0.01, 0.01)[0] == 0


def test_histograms_within_an_epoch_go_on_after_a_resume_with_other_ranks():
    values, labels = values_and_labels(5)
    (expected,) = counted(values, labels)
    before = ClassHistograms(3, CPU)
    before.add(torch.from_numpy(values[:80]), torch.from_numpy(labels[:80]))
    before.share(SingleProcess(), ends_epoch=False)
    saved, group = before.state(), ThreadGroup(2)

    def work(rank):
        ours = ClassHistograms(3, CPU, is_first=rank == 0)
        ours.load(saved)
        mine = slice(80 + rank, None, 2)
        ours.add(torch.from_numpy(values[mine]), torch.from_numpy(labels[mine]))
        ours.share(ThreadRank(group, rank), ends_epoch=True)
        return ours.complete

    for complete in group.run(work):
        np.testing.assert_array_equal(complete, expected)


# The step, on ranks


def gradient_and_state(base, parts):
    """The gradient of one step of ranks that share 12 samples so, and what the loss keeps after it."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 255, (NUM_ROWS, 3, SIDE, SIDE), generator=generator, dtype=torch.uint8)
    labels = torch.full((NUM_ROWS, NUM_CLASSES), -1, dtype=torch.int8)
    labels[torch.arange(NUM_ROWS), torch.arange(NUM_ROWS) % NUM_CLASSES] = 1
    labels[3, 7] = 0
    torch.manual_seed(1)
    model = build_model("tests.integration.tiny:tiny_net", NUM_CLASSES)
    annotations = make_annotations(SIZES, NUM_CLASSES)
    data = SimpleNamespace(annotations=annotations, positives_per_image=None)
    section = {"large_loss": {"rate": 0.04}} if base.startswith("ll_") else {}
    config = config_of(
        data={"train": "shards", "size": SIDE, "batch_size": max(map(len, parts)) or 1},
        objective={"base": base, "consistency": "none", **section},
        store={"kind": "none", "top": None},
        schedule={"main": {"epochs": 8, "learning_rate": 0.1}},
    )
    group = ThreadGroup(len(parts))

    def work(rank):
        mine, me = copy.deepcopy(model), ThreadRank(group, rank)
        kept = make_loss_state(config, annotations, CPU, rank)
        state = SimpleNamespace(model=mine, loss_state=kept, accelerator=me, optimizer=None)
        step = Step(config, data, state, SimpleNamespace(keeps_heatmaps=False), me)
        for epoch in (0, 3):
            step.epoch = epoch
            mine.zero_grad()
            if parts[rank]:
                step(
                    make_batch(parts[rank], images[parts[rank]], labels[parts[rank]]),
                    None,
                    count=NUM_ROWS,
                    gamma=0.0,
                    rate=0.1,
                )
            else:
                step.idle(NUM_ROWS)
            if kept is not None:
                kept.share(me, ends_epoch=True)
        gradient = torch.cat([each.grad.flatten() for each in mine.parameters()])
        return gradient / group.world_size, {} if kept is None else kept.state()

    results = group.run(work)
    return sum(gradient for gradient, _ in results), results


@pytest.mark.parametrize("base", ["ll_r", "ll_ct", "ll_cp", "crisp"])
@pytest.mark.parametrize(
    "parts",
    [
        ([0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]),
        ([0, 1, 2, 3, 4], [], [5, 6, 7, 8, 9, 10, 11]),
        ([0, 11], [1, 10], [2, 9], [3, 8], [4, 7], [5, 6]),
    ],
    ids=["2 ranks", "an idle one", "6 ranks"],
)
def test_a_step_is_the_same_on_any_number_of_ranks(base, parts):
    alone, ((_, kept_alone),) = gradient_and_state(base, (list(range(NUM_ROWS)),))
    shared, results = gradient_and_state(base, parts)
    torch.testing.assert_close(shared, alone, rtol=1e-4, atol=1e-7)
    for _, kept in results:
        assert kept.keys() == kept_alone.keys()
        for name, table in kept.items():
            # A prediction near the edge of two bins may fall into either: batches of another size round.
            assert (table != kept_alone[name]).sum() <= (4 if base == "crisp" else 0)
            assert table.sum() == kept_alone[name].sum()
    if base == "ll_cp":
        # 0.04 of 120 labels, rounded up, in the one epoch that is not the first.
        assert int(unpack(kept_alone["bits"], NUM_CLASSES).sum()) == 5


def test_the_cut_of_em_apl_rises_by_equal_steps_to_its_share():
    objective = {"base": "em_apl", "consistency": "none", "em_apl": {"start_epoch": 4, "share": 0.8}}
    phases = {name: {"epochs": epochs, "learning_rate": 1} for name, epochs in (("warmup", 2), ("main", 6))}
    config = config_of(objective=objective, schedule=phases)
    kept = make_loss_state(config, make_annotations(SIZES, 1), CPU, 0)
    kept.update(
        SimpleNamespace(
            updated_scores=lambda: torch.linspace(0, 1, 1001).half()[:, None],
            inputs=SimpleNamespace(labels=torch.full((1001, 1), -1, dtype=torch.int8)),
        )
    )
    kept.share(SingleProcess(), ends_epoch=True)
    found = [kept.inputs(torch.tensor([0]), epoch, CPU)["cuts"].item() for epoch in range(8)]
    assert found == pytest.approx([0, 0, 0, 0, 0.2, 0.4, 0.6, 0.8], abs=0.02)
