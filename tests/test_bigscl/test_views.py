import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchvision.transforms import RandomResizedCrop

from bigscl.data.crops import Purpose, RandomCrop, uniforms, whole

sides = st.integers(1, 3000)


def draws(crop: RandomCrop, width: int, height: int, count: int) -> np.ndarray:
    views = [crop.view(seed=1, epoch=2, sample_id=n, width=width, height=height) for n in range(count)]
    return np.array([(view.left, view.top, view.width, view.height, view.flip) for view in views])


def torchvision_draws(crop: RandomCrop, width: int, height: int, count: int) -> np.ndarray:
    torch.manual_seed(0)
    image = torch.empty(1, height, width)
    boxes = [RandomResizedCrop.get_params(image, list(crop.scale), list(crop.ratio)) for _ in range(count)]
    return np.array([(left, top, w, h) for top, left, h, w in boxes])


def largest_gap(left: np.ndarray, right: np.ndarray) -> float:
    """The Kolmogorov-Smirnov statistic of two samples: the largest difference of their distributions."""
    points = np.sort(np.concatenate([left, right]))
    shares = [np.searchsorted(np.sort(side), points, side="right") / len(side) for side in (left, right)]
    return float(np.abs(shares[0] - shares[1]).max())


@pytest.mark.parametrize(
    ("width", "height", "crop"),
    [
        (500, 375, RandomCrop()),
        (375, 500, RandomCrop(scale=(0.25, 1.0))),
        (900, 250, RandomCrop(scale=(0.5, 1.0))),  # most tries do not fit, many views are the fallback
        (64, 64, RandomCrop(scale=(0.25, 1.0), ratio=(1.0, 1.0))),
    ],
)
def test_views_have_the_distribution_of_torchvision(width, height, crop):
    count = 6000
    ours, theirs = draws(crop, width, height, count), torchvision_draws(crop, width, height, count)
    measures = {
        "left": lambda box: box[:, 0],
        "top": lambda box: box[:, 1],
        "area": lambda box: box[:, 2] * box[:, 3],
        "aspect": lambda box: box[:, 2] / box[:, 3],
        "free place across": lambda box: box[:, 0] / np.maximum(1, width - box[:, 2]),
        "free place down": lambda box: box[:, 1] / np.maximum(1, height - box[:, 3]),
    }
    for name, measure in measures.items():
        # Two samples of one distribution differ by more than this once in 10,000 times.
        assert largest_gap(measure(ours), measure(theirs)) < 2.23 * np.sqrt(2 / count), name


def test_half_of_the_views_are_mirrored_whatever_the_box():
    views = draws(RandomCrop(), 500, 375, 20_000)
    assert abs(views[:, 4].mean() - 0.5) < 0.015
    assert abs(np.corrcoef(views[:, 4], views[:, 0])[0, 1]) < 0.03
    assert draws(RandomCrop(flip=0.0), 50, 50, 100)[:, 4].max() == 0
    assert draws(RandomCrop(flip=1.0), 50, 50, 100)[:, 4].min() == 1


@given(sides, sides, st.integers(0, 2**40), st.booleans())
@settings(max_examples=200, deadline=None)
def test_boxes_lie_in_the_image_and_fractions_name_them(width, height, sample_id, squash):
    crop = RandomCrop(squash=squash)
    view = crop.view(seed=0, epoch=0, sample_id=sample_id, width=width, height=height)
    assert view.width >= 1
    assert view.height >= 1
    assert 0 <= view.left <= width - view.width
    assert 0 <= view.top <= height - view.height
    left, top, box_width, box_height, flip = view.fractions()
    pixels = (left * width, top * height, box_width * width, box_height * height)
    assert np.allclose(pixels, (view.left, view.top, view.width, view.height))
    assert flip == view.flip


@pytest.mark.parametrize(("width", "height"), [(640, 480), (200, 640), (333, 333)])
def test_squashed_crops_are_square_in_the_squashed_frame(width, height):
    crop = RandomCrop(scale=(0.25, 1.0), ratio=(1.0, 1.0), squash=True)
    views = draws(crop, width, height, 2000)
    assert np.abs(views[:, 2] / width - views[:, 3] / height).max() <= 1 / min(width, height) + 1e-9
    area = views[:, 2] * views[:, 3] / (width * height)
    assert abs(np.median(area) - 0.625) < 0.03
    assert area.min() > 0.24


def test_a_view_depends_on_seed_epoch_and_sample_alone():
    def view(**changed):
        return RandomCrop().view(
            **({"seed": 1, "epoch": 2, "sample_id": 3, "width": 500, "height": 375} | changed)
        )

    assert view() == view()
    assert len({view(), view(seed=2), view(epoch=3), view(sample_id=4)}) == 4


def test_random_numbers_are_uniform_and_independent_between_samples_and_purposes():
    table = np.array([uniforms(1, 2, n, Purpose.VIEW, 23) for n in range(5000)])
    assert table.min() >= 0
    assert table.max() < 1
    assert np.abs(table.mean(axis=0) - 0.5).max() < 5 * np.sqrt(1 / 12 / 5000)
    correlations = np.corrcoef(np.concatenate([table[:-1], table[1:]], axis=1).T) - np.eye(46)
    assert np.abs(correlations).max() < 0.08
    assert uniforms(1, 2, 3, Purpose.VIEW, 4) != uniforms(1, 2, 3, Purpose.COLOR, 4)


def test_views_are_the_same_on_every_machine_and_version():
    """A finished run's views can be drawn again: these numbers were written down, not computed here."""
    assert uniforms(7, 11, 5, Purpose.COLOR, 3) == [
        0.25886464168025736,
        0.2583507447052492,
        0.3192860121893526,
    ]
    view = RandomCrop().view(seed=1, epoch=2, sample_id=3, width=500, height=375)
    assert (view.left, view.top, view.width, view.height, view.flip) == (42, 1, 398, 347, False)


def test_the_whole_image_is_the_unit_box():
    assert whole(500, 375).fractions() == (0.0, 0.0, 1.0, 1.0, 0.0)
