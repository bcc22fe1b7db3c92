import numpy as np
import pytest
import torch

from bigscl.distributed.ranks import SingleProcess
from bigscl.losses import state
from bigscl.losses.role import LabelEstimator
from tests.test_store.conftest import make_annotations


def test_given_labels_start_sure_and_the_others_undecided():
    annotations = make_annotations((4, 2), 5)
    start = LabelEstimator(annotations, seed=0).logits.sigmoid()
    given = torch.zeros_like(start, dtype=torch.bool)
    owners = np.repeat(np.arange(len(start)), annotations.given.lengths)
    given[owners, annotations.given.values] = True
    torch.testing.assert_close(start[given], torch.full_like(start[given], 0.995))
    assert ((start[~given] >= 0.4) & (start[~given] <= 0.6)).all()


def test_steps_are_those_of_adam_for_each_sample_alone():
    annotations = make_annotations((6,), 3)
    ours = LabelEstimator(annotations, seed=1)
    rows = [torch.nn.Parameter(row.clone()) for row in ours.logits]
    optimizers = [torch.optim.Adam([row], lr=10 * 1e-2) for row in rows]
    generator = torch.Generator().manual_seed(0)
    for ids in ([0, 3], [3, 5], [3, 0]):
        gradient = torch.randn(2, 3, generator=generator)
        ours.step(torch.tensor(ids), gradient, 1e-2)
        for n, slope in zip(ids, gradient, strict=True):
            rows[n].grad = slope.clone()
            optimizers[n].step()
    torch.testing.assert_close(ours.state()["logits"], torch.stack([row.detach() for row in rows]))
    before = ours.logits.clone()
    ours.share(SingleProcess())
    assert torch.equal(ours.logits, before)


def test_gradient_is_awaited_with_the_next_step_not_before():
    ours, awaited = LabelEstimator(make_annotations((6,), 3), seed=1), []
    for step in range(3):
        assert awaited == list(range(max(0, step - 1)))
        ours.step(torch.tensor([step]), torch.ones(1, 3), 1e-2, lambda step=step: awaited.append(step))
    assert awaited == [0, 1]
    ours.state()
    assert awaited == [0, 1, 2]


def test_a_dataset_that_does_not_fit_is_refused_with_the_sum(monkeypatch):
    monkeypatch.setattr(state, "MAX_BYTES", 1000)
    with pytest.raises(ValueError, match=r"3 x 4 bytes for each of 20 images x 5 classes = .* GB"):
        LabelEstimator(make_annotations((20,), 5), seed=0)
