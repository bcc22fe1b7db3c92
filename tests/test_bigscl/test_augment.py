import functools
import itertools

import numpy as np
import pytest
import torch
import torchvision.transforms as T
import torchvision.transforms.v2.functional as V

from bigscl.common.user_error import UserError
from bigscl.data.augmentation import GEOMETRIC, OPERATIONS, ColorJitter, RandomColors
from bigscl.data.crops import Purpose, RandomErasing, uniforms
from tests.builders import picture
from tests.test_bigscl.test_views import largest_gap

COUNT = 5000


@pytest.fixture
def image():
    return torch.from_numpy(np.array(picture(1))).permute(2, 0, 1)


def drawn(sample_id: int) -> dict[str, int]:
    return {"seed": 1, "epoch": 2, "sample_id": sample_id}


def test_erased_boxes_have_the_distribution_of_torchvision():
    erasing = RandomErasing(probability=1.0)
    boxes = np.array([erasing.box(64, **drawn(n)) for n in range(COUNT)])
    torch.manual_seed(0)
    view = torch.zeros(3, 64, 64)
    params = [T.RandomErasing.get_params(view, erasing.scale, erasing.ratio, [0.0]) for _ in range(COUNT)]
    reference = np.array([(left, top, width, height) for top, left, height, width, _ in params])
    for column in range(4):
        # Two samples of one distribution differ by more than this once in 10,000 times.
        assert largest_gap(boxes[:, column], reference[:, column]) < 2.23 * np.sqrt(2 / COUNT)


def test_so_many_views_are_erased():
    erasing = RandomErasing(probability=0.25)
    share = np.mean([erasing.box(64, **drawn(n)) is not None for n in range(COUNT)])
    assert abs(share - 0.25) < 0.03


def test_jitter_of_one_property_is_torchvisions_change_by_a_factor_in_range(image):
    seen = {V.adjust_brightness(image, factor / 1000).sum().item() for factor in range(600, 1401)}
    sums = [ColorJitter(brightness=0.4)(image, **drawn(n)).sum().item() for n in range(200)]
    assert min(seen) - 500 <= min(sums) < max(sums) <= max(seen) + 500
    assert len(set(sums)) > 150
    assert torch.equal(ColorJitter()(image, **drawn(1)), image)


def test_jitter_applies_torchvisions_changes_in_random_order(image):
    jitter = ColorJitter(brightness=0.5, contrast=0.5, saturation=0.5, hue=0.2)
    orders = set()
    for n in range(40):
        random = uniforms(1, 2, n, Purpose.COLOR, 4)
        changes = [
            functools.partial(V.adjust_brightness, brightness_factor=0.5 + random[0]),
            functools.partial(V.adjust_contrast, contrast_factor=0.5 + random[1]),
            functools.partial(V.adjust_saturation, saturation_factor=0.5 + random[2]),
            functools.partial(V.adjust_hue, hue_factor=0.4 * random[3] - 0.2),
        ]
        found = jitter(image, **drawn(n))
        equal = [
            order
            for order in itertools.permutations(range(4))
            if torch.equal(functools.reduce(lambda seen, k: changes[k](seen), order, image), found)
        ]
        assert equal
        orders.add(equal[0])
    assert len(orders) > 10


@pytest.mark.parametrize("magnitude", [0, 9, 30])
def test_operations_have_the_magnitudes_of_torchvisions_randaugment(image, magnitude):
    space = T.RandAugment(magnitude=magnitude)._augmentation_space(31, (30, 40))
    strength = magnitude / 30

    def reference(name: str) -> float:
        return float(space[name][0][magnitude])

    by_hand = [
        image,
        V.adjust_brightness(image, 1 + reference("Brightness")),
        V.adjust_saturation(image, 1 + reference("Color")),
        V.adjust_contrast(image, 1 + reference("Contrast")),
        V.adjust_sharpness(image, 1 + reference("Sharpness")),
        V.posterize(image, int(reference("Posterize"))),
        V.solarize(
            image, 255 * reference("Solarize") if reference("Solarize") <= 1 else reference("Solarize")
        ),
        V.autocontrast(image),
        V.equalize(image),
    ]
    for operation, expected in zip(OPERATIONS.values(), by_hand, strict=True):
        assert (operation(image, strength).int() - expected.int()).abs().max() <= 1


def test_operations_are_drawn_from_those_that_are_named(image):
    colors = RandomColors(num_operations=1, magnitude=30, operations=("equalize", "identity"))
    seen = {colors(image, **drawn(n)).numpy().tobytes() for n in range(20)}
    assert seen == {image.numpy().tobytes(), V.equalize(image).numpy().tobytes()}


def test_operations_are_left_out_with_the_given_probability(image):
    colors = RandomColors(num_operations=1, operations=("equalize",), probability=0.3)
    changed = [not torch.equal(colors(image, **drawn(n)), image) for n in range(400)]
    assert abs(np.mean(changed) - 0.3) < 0.08


@pytest.mark.parametrize("name", GEOMETRIC)
def test_operations_that_move_pixels_are_refused_with_the_reason(name):
    with pytest.raises(UserError, match=rf"operations: {name} moves pixels, and the heatmaps .* crops and f"):
        RandomColors(operations=(name,))
    with pytest.raises(UserError, match=r"operations: found 'invert', expected some of identity, brightness"):
        RandomColors(operations=("invert",))


def test_colours_depend_on_seed_epoch_and_sample_alone(image):
    colors = RandomColors(num_operations=3, magnitude=20)
    assert torch.equal(colors(image, **drawn(4)), colors(image, **drawn(4)))
    different = {colors(image, **drawn(n)).sum().item() for n in range(40)}
    assert len(different) > 25
