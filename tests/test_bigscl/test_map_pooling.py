"""Map pooling equals a slow reference, and the public module gives the numbers that are evaluated."""

import math

import numpy as np
import pytest
import torch
from torchvision.models import resnet18

import bigscl
from bigscl.data.loader import normalize
from bigscl.evaluation.inference import predict
from bigscl.models.spatial import Prediction, build_model, map_pooled, pool
from bigscl.store import SingleProcess
from tests.test_bigscl.test_inference import MEAN, STD, loader_of


def reference(cells):
    """The formula, in words of plain Python, for the cells of one class."""
    hottest = sorted(cells, reverse=True)[: math.ceil(len(cells) / 4)]
    return 0.5 * sum(cells) / len(cells) + 0.5 * sum(hottest) / len(hottest)


@pytest.mark.parametrize("side", [(7, 7), (6, 6), (4, 3), (1, 1), (1, 2)])
def test_half_of_the_logit_comes_from_the_hottest_quarter_of_the_cells(side):
    maps = torch.randn(3, 5, *side, generator=torch.manual_seed(0), dtype=torch.float64) * 3
    found = map_pooled(Prediction(maps, pool(maps)))
    expected = [[reference(cells.flatten().tolist()) for cells in image] for image in maps]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))


def test_the_module_gives_the_evaluated_numbers():
    torch.manual_seed(0)
    model = build_model("resnet18", 6).eval()
    images = torch.randint(0, 256, (32, 3, 80, 80), dtype=torch.uint8, generator=torch.manual_seed(3))
    loader = loader_of(np.arange(32), images, 32)
    found = predict(model, loader, "cpu", mean=MEAN, std=STD, transport=SingleProcess())
    inputs = normalize(images, MEAN, STD)
    exported = resnet18(num_classes=6).eval()
    exported.load_state_dict(model.network.state_dict(), strict=True)
    with torch.inference_mode():
        # Up to rounding: the layout of the images decides on the last bits.
        close = {"rtol": 1e-4, "atol": 1e-5}
        np.testing.assert_allclose(bigscl.MapPooling(model)(inputs), found.map_logits, **close)
        assert np.abs(found.map_logits - found.logits).max() > 0.05
        np.testing.assert_allclose(bigscl.MapPooling(exported)(inputs), found.map_logits, **close)
        np.testing.assert_allclose(exported(inputs), found.logits, **close)
