"""The example network: its size, its maps, and that a model takes it by name."""

import torch

from bigscl.models.smallnet import small_resnet
from bigscl.models.spatial import build_model


def test_small_resnet_gives_logits_of_all_classes_and_is_small():
    network = small_resnet(num_classes=7)
    assert network(torch.rand(2, 3, 48, 48)).shape == (2, 7)
    assert network.fc.out_features == 7
    assert sum(parameter.numel() for parameter in network.parameters()) < 200_000


def test_model_by_name_has_maps_of_6_by_6_whose_mean_is_the_networks_answer():
    torch.manual_seed(0)
    model = build_model("bigscl.models.smallnet:small_resnet", num_classes=10)
    images = torch.rand(2, 3, 48, 48)
    prediction = model.eval()(images, maps=True)
    assert prediction.logit_map.shape == (2, 10, 6, 6)
    torch.testing.assert_close(prediction.logit_map.mean((2, 3)), model.network(images))
