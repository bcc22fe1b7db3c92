"""Predictions hold every image once, and its logits depend on the image alone."""

import numpy as np
import pytest
import torch

from bigscl.data.loader import normalize
from bigscl.evaluation.inference import NETWORK_BATCH, gather_arrays, network_batches, predict
from bigscl.models.spatial import build_model
from bigscl.store import SingleProcess
from tests.builders import make_batch

MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)


def batch_of(ids, images):
    """A loader's batch of some of the images, which are as many as the largest id."""
    ids = torch.as_tensor(ids, dtype=torch.int64)
    labels, views = torch.zeros(len(ids), 1, dtype=torch.int8), ids[:, None].float().expand(-1, 5)
    return make_batch(ids, images[ids], labels, views=views)


def loader_of(ids, images, batch_size):
    return [batch_of(ids[first : first + batch_size], images) for first in range(0, len(ids), batch_size)]


@pytest.fixture(scope="module")
def images():
    return torch.randint(0, 256, (75, 3, 48, 48), dtype=torch.uint8, generator=torch.manual_seed(3))


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return build_model("bigscl.models.smallnet:small_resnet", 6).eval()


def predict_all(model, loader):
    return predict(model, loader, "cpu", mean=MEAN, std=STD, transport=SingleProcess())


@pytest.mark.parametrize("batch_size", [1, 7, 32, 75])
def test_every_image_is_in_the_network_batches_once_with_its_id_and_view(images, batch_size):
    order = np.random.default_rng(0).permutation(len(images))
    seen = []
    for part in network_batches(loader_of(order, images, batch_size)):
        assert len(part.images) == NETWORK_BATCH
        assert torch.equal(part.images[: len(part.ids)], images[part.ids])
        assert torch.equal(part.views[:, 0], part.ids.float())
        seen += part.ids.tolist()
    assert seen == order.tolist()


def test_logits_do_not_depend_on_batch_size_or_order_to_the_last_bit(model, images):
    whole = predict_all(model, loader_of(np.arange(len(images)), images, 75))
    assert np.array_equal(whole.ids, np.arange(len(images)))
    for batch_size in (1, 13, 64):
        order = np.random.default_rng(batch_size).permutation(len(images))
        other = predict_all(model, loader_of(order, images, batch_size))
        assert np.array_equal(other.ids, whole.ids)
        assert np.array_equal(other.logits, whole.logits)
        assert np.array_equal(other.map_logits, whole.map_logits)


def test_logits_are_those_of_the_network_on_each_normalized_image(model, images):
    found = predict_all(model, loader_of(np.arange(5), images, 2))
    with torch.no_grad():
        alone = torch.cat([model.network(normalize(images[n : n + 1], MEAN, STD)) for n in range(5)])
    assert found.logits.dtype == np.float32
    assert torch.allclose(torch.from_numpy(found.logits), alone, rtol=1e-4, atol=1e-4)


def test_batches_whose_images_could_not_be_read_are_left_out(model, images):
    loader = [batch_of([], images), *loader_of([4, 2], images, 1), batch_of([], images)]
    assert predict_all(model, loader).ids.tolist() == [2, 4]


def test_a_set_without_a_readable_image_is_refused(model, images):
    with pytest.raises(ValueError, match="no image could be read"):
        predict_all(model, [batch_of([], images)])


class TwoRanks:
    """Rank 0 of two, the other of which sends what it is told to."""

    rank, world_size = 0, 2

    def __init__(self, other):
        self.other = other

    def gather(self, payload):
        return [payload, self.other]


def test_a_failure_on_another_rank_is_raised_on_rank_zero_with_its_reason():
    with pytest.raises(ValueError, match="rank 1: disk on fire"):
        gather_arrays(TwoRanks(b"-disk on fire"), lambda: {"ids": np.arange(3)})


def test_a_rank_that_fails_still_meets_the_others_and_raises_its_own_error():
    sent = []

    class Listening(SingleProcess):
        def gather(self, payload):
            sent.append(payload)
            return [payload]

    def fail():
        raise KeyError("lost")

    with pytest.raises(KeyError, match="lost"):
        gather_arrays(Listening(), fail)
    assert sent == [b"-'lost'"]
