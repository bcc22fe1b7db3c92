"""Preprocessing from published weights: the pixels of their libraries; settings of a config come first."""

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from torchvision import models

from bigscl.config import ConfigError, make_config, to_yaml
from bigscl.data.loader import normalize
from bigscl.evaluation.target import find_target
from bigscl.models.families import NoPreprocessing, find_preprocessing
from tests.builders import config_of

LITE0 = "bigscl.models.lite0:pretrained"


def own_network(num_classes):
    raise AssertionError("not needed for its preprocessing")


def with_typo(num_classes):
    return own_network(num_classes)


own_network.preprocessing = {"size": 96, "shorter": 128, "mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}
with_typo.preprocessing = {"sice": 96}


def prepared(backbone, weights, image):
    """The input of the network, as an evaluation makes it."""
    found = find_preprocessing(backbone, weights)
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)
    return normalize(found.transform()(pixels, 0).pixels[None], found.mean, found.std)[0]


def noise():
    """An image in which every interpolation gives other pixels."""
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (300, 400, 3), dtype=np.uint8))


def differ(one, other):
    """The mean difference, where 1 is the deviation of the images."""
    assert one.shape == other.shape
    return (one - other).abs().mean().item()


@pytest.mark.parametrize(
    ("name", "weights"),
    [("resnet50", "IMAGENET1K_V2"), ("efficientnet_b0", "IMAGENET1K_V1"), ("swin_t", "DEFAULT")],
)
def test_images_are_prepared_as_torchvisions_weights_say(name, weights):
    image = noise()
    expected = models.get_model_weights(name)[weights].transforms()(image)
    assert differ(prepared(name, weights, image), expected) < 0.01


@pytest.mark.parametrize(
    ("name", "size"),
    [("resnet50.a1_in1k", 288), ("tf_efficientnet_lite0", 224), ("vit_base_patch16_siglip_224", 224)],
)
def test_images_are_prepared_as_timms_weights_say(name, size):
    from timm.data import create_transform, resolve_data_config
    from timm.models import get_pretrained_cfg

    image = noise()
    published = resolve_data_config(pretrained_cfg=get_pretrained_cfg(name).to_dict(), use_test_size=True)
    expected = create_transform(**published)(image)
    assert expected.shape == (3, size, size)
    assert differ(prepared(f"timm:{name}", "DEFAULT", image), expected) < 0.01


def config(data=(), **model):
    return config_of(data={"val": "v", "preprocessing": "weights", **dict(data)}, model=model)


def test_a_config_takes_over_what_it_does_not_set_itself():
    found = config({"mean": [0.1, 0.2, 0.3]}, backbone="timm:resnet50.a1_in1k", weights="DEFAULT").data
    assert (found.size, found.eval_size, found.shorter, found.interpolation) == (224, 288, 288, "bicubic")
    assert found.mean == (0.1, 0.2, 0.3)
    assert found.training_transform(0, 0).interpolation == "bicubic"
    assert found.evaluation_transform().interpolation == "bicubic"


def test_another_size_keeps_the_published_crop_fraction():
    found = config({"size": 112}, backbone="resnet50", weights="IMAGENET1K_V2").data
    assert (found.size, found.eval_size, found.shorter) == (112, None, 116)
    squashed = config({"resize": "square"}, backbone="resnet50", weights="IMAGENET1K_V2").data
    assert squashed.evaluation_transform().resize == "square"


def test_a_saved_config_keeps_the_settings_that_it_ran_with():
    ran = config(backbone=LITE0)
    again = make_config(yaml.safe_load(to_yaml(ran)))
    assert again == ran
    assert ran.data.mean == pytest.approx((127 / 255,) * 3)
    assert ran.data.interpolation == "bicubic"


def test_explicit_preprocessing_is_the_default_and_as_before():
    found = config_of(model={"backbone": "swin_t", "weights": "DEFAULT"}).data
    assert (found.size, found.shorter, found.interpolation) == (224, 256, "bilinear")


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (
            {"backbone": "resnet50"},
            "model.weights is None, expected published weights of resnet50: IMAGENET1K_V1",
        ),
        ({"backbone": "resnet50", "weights": "mine.pt"}, "model.weights is 'mine.pt'"),
        ({"backbone": "resnet51"}, "torchvision has no classification network 'resnet51'"),
        ({"backbone": "timm:resnet50"}, "model.weights is not set for 'timm:resnet50'"),
        ({"backbone": "timm:nonet", "weights": "DEFAULT"}, "timm has no weights of 'nonet'"),
        ({"backbone": "math:sqrt"}, "math:sqrt has no attribute `preprocessing`"),
        ({"backbone": f"{__name__}:with_typo"}, "no mapping of settings .*sice"),
        ({"backbone": "no.such:thing"}, "cannot import 'no.such:thing'"),
    ],
)
def test_weights_without_known_preprocessing_are_refused_with_the_reason(model, reason):
    with pytest.raises(ConfigError, match=reason):
        config(**model)


def test_a_downloaded_file_is_known_by_its_name():
    name = models.ResNet50_Weights.IMAGENET1K_V2.url.rpartition("/")[2]
    assert find_preprocessing("resnet50", f"somewhere/{name}").shorter == 232
    with pytest.raises(NoPreprocessing):
        find_preprocessing("resnet50", "somewhere/resnet50-mine.pth")


def test_an_own_network_says_how_its_images_are_prepared():
    target = find_target(None, f"{__name__}:own_network", "mine.pt")
    assert target.describe_preprocessing() == (
        "that of the published weights: shorter side to 128, centre of 96 x 96, bilinear, "
        "mean 0 0 0, std 1 1 1"
    )


def test_a_file_of_unknown_origin_gets_the_usual_preprocessing_and_says_so():
    described = find_target(None, "resnet50", "mine.pt").describe_preprocessing()
    assert described.startswith(
        "the usual one for ImageNet: shorter side to 256, centre of 224 x 224, bilinear"
    )
