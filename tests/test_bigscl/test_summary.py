"""Figures and doubts of the start-up summary."""

from types import SimpleNamespace

import numpy as np
import pytest

from bigscl.config.schedule import plan_epoch
from bigscl.preflight.forecast import doubtful_validation, forecast
from bigscl.store import spec_for
from tests.builders import config_of
from tests.test_store.conftest import make_annotations


def needs_of(sizes, world_size, workers=8, batch_size=256):
    data = {"size": 48, "workers": workers, "batch_size": batch_size}
    config = config_of(data=data, model={"backbone": "bigscl.models.smallnet:small_resnet"})
    sizes = np.asarray(sizes)
    plan = plan_epoch(config, sizes, int(sizes.max()), epoch=0, world_size=world_size)
    counted = sum(len(ids) for rank in range(world_size) for ids in plan.whole.batches(rank))
    assert counted == sizes.sum()
    most = max(len(list(plan.whole.batches(rank))) for rank in range(world_size))
    spec = spec_for(make_annotations(num_classes=12), 12, 0)
    return forecast(config, spec, plan), counted / (most * world_size * batch_size)


@pytest.mark.parametrize("world_size", [8, 16, 128])
def test_busy_share_of_imagenet_is_that_of_its_batches(world_size):
    needs, expected = needs_of([1000] * 1281 + [167], world_size)
    assert needs.busy_share == pytest.approx(expected)
    assert 0.97 < needs.busy_share < 1


@pytest.mark.parametrize(("labels", "metric", "doubts"), [(1, "map", 1), (1, "top1", 0), (2, "map", 0)])
def test_map_on_single_labels_is_warned_about(labels, metric, doubts):
    given = SimpleNamespace(lengths=np.array([1, labels]))
    val = SimpleNamespace(given=given, full=None, num_samples=2)
    config = config_of(data={"val": "val"}, validation={"metric": metric})
    found = list(doubtful_validation(config, val))
    assert len(found) == doubts
    assert all("none of the 2 images of data.val has two labels" in line for line in found)
    assert not list(doubtful_validation(config, None))
