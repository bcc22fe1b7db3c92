"""Networks compute the same after their batch normalisation is synchronised, or are refused."""

import pytest
import torch
from torch import nn

from bigscl.models.spatial import build_model, synchronize_batchnorm


def with_statistics(network):
    """The network with averages that are not 0 and 1, so that a lost layer shows."""
    for module in network.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    return network


@pytest.mark.parametrize(
    "backbone", ["timm:efficientnet_b0", "timm:regnety_002", "timm:densenet121", "timm:resnet18", "resnet18"]
)
def test_network_gives_the_same_logits_and_every_layer_is_synchronised(backbone):
    if backbone.startswith("timm:"):
        pytest.importorskip("timm")
    torch.manual_seed(0)
    network = with_statistics(build_model(backbone, num_classes=3))
    images = torch.rand(2, 3, 64, 64)
    with torch.no_grad():
        before = network.eval()(images, maps=False).logits
        synchronize_batchnorm(network, 64)
        after = network.eval()(images, maps=False).logits
    torch.testing.assert_close(after, before)
    kinds = {
        type(module) for module in network.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)
    }
    assert kinds
    assert all(issubclass(kind, nn.SyncBatchNorm) for kind in kinds)


def test_modes_of_the_layers_stay_as_they_were():
    network = build_model("resnet18", num_classes=3).train()
    network.network.layer1.eval()
    synchronize_batchnorm(network, 64)
    assert network.training
    assert network.network.layer2.training
    assert not network.network.layer1.training


class ScaledNorm(nn.BatchNorm2d):
    """Does more than normalise."""

    def forward(self, images):
        return 3 * super().forward(images)


def test_network_whose_own_layers_do_more_is_refused():
    network = nn.Sequential(nn.Conv2d(3, 4, 3), ScaledNorm(4), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    with pytest.raises(ValueError, match=r"hardware.sync_batchnorm: .* do more than normalise"):
        synchronize_batchnorm(network, 16)


def test_an_empty_batch_in_half_precision_reaches_the_layers_in_float32():
    network = nn.Sequential(nn.BatchNorm2d(3)).eval()
    synchronize_batchnorm(network, 8)
    assert network(torch.zeros(0, 3, 8, 8, dtype=torch.bfloat16)).dtype == torch.float32
