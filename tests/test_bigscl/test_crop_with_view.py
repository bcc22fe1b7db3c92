"""The crop for other people's pipelines shows the part of the image that its view says."""

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from bigscl import RandomResizedCropWithView
from bigscl.data.crops import View
from bigscl.data.transforms import TrainingTransform
from bigscl.memory.heatmaps import to_view

WIDTH, HEIGHT, SIZE = 40, 30, 12


def gradients():
    """An image whose first channel grows to the right and whose second grows downwards."""
    image = torch.zeros(3, HEIGHT, WIDTH, dtype=torch.uint8)
    image[0] = torch.linspace(0, 255, WIDTH)
    image[1] = torch.linspace(0, 255, HEIGHT)[:, None]
    return image


@pytest.mark.parametrize("seed", range(6))
def test_pixels_are_those_of_the_view(seed):
    torch.manual_seed(seed)
    pixels, view = RandomResizedCropWithView(SIZE)(gradients())
    left, top, width, height, flip = view.double().tolist()
    expected = View(
        left=round(left * WIDTH),
        top=round(top * HEIGHT),
        width=round(width * WIDTH),
        height=round(height * HEIGHT),
        flip=bool(flip),
        image_width=WIDTH,
        image_height=HEIGHT,
    )
    np.testing.assert_allclose(view.tolist(), expected.fractions(), atol=1e-6)
    transform = TrainingTransform(size=SIZE, seed=0, epoch=0)
    reference = transform.finish(gradients()[expected.box], expected, 0).pixels
    assert (pixels.int() - reference.int()).abs().max() <= 1


@pytest.mark.parametrize("seed", range(5))
def test_heatmaps_move_as_the_pixels_do(seed):
    """A heatmap that is the image itself looks in the view as the crop does."""
    torch.manual_seed(seed)
    crop = RandomResizedCropWithView(SIZE, scale=(0.3, 0.6))
    pixels, view = crop(gradients())
    heatmaps = torch.stack(
        [torch.linspace(0, 1, 64).expand(64, 64), torch.linspace(0, 1, 64)[:, None].expand(64, 64)]
    )
    seen = to_view(heatmaps[None], view[None], SIZE)[0]
    np.testing.assert_allclose(seen, pixels[:2] / 255, atol=0.06)


def test_crops_are_torchvisions():
    image = Image.fromarray(gradients().permute(1, 2, 0).numpy())
    for seed in range(5):
        torch.manual_seed(seed)
        expected = v2.RandomResizedCrop(SIZE, scale=(0.2, 0.9))(image)
        torch.manual_seed(seed)
        found, view = RandomResizedCropWithView(SIZE, scale=(0.2, 0.9), flip=0.0)(image)
        assert found.size == (SIZE, SIZE)
        np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))
        assert view[4] == 0


def test_as_many_are_mirrored_as_asked_for():
    torch.manual_seed(0)
    flips = [RandomResizedCropWithView(SIZE, flip=0.25)(gradients())[1][4].item() for _ in range(400)]
    assert 60 <= sum(flips) <= 140
    assert all(RandomResizedCropWithView(SIZE, flip=1.0)(gradients())[1][4] == 1 for _ in range(10))
    with pytest.raises(ValueError, match="flip: found 2"):
        RandomResizedCropWithView(SIZE, flip=2)
