"""A network small enough to train on a laptop's CPU; an example of a model that a config can name."""

from typing import cast

from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.shortcut = nn.Sequential(
            nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
        )
        self.relu = nn.ReLU(inplace=True)

    def forward(self, features: Tensor) -> Tensor:
        """Map `[B, channels_in, H, W]` to `[B, channels, H/stride, W/stride]`."""
        inner = self.relu(self.bn1(self.conv1(features)))
        return cast(Tensor, self.relu(self.bn2(self.conv2(inner)) + self.shortcut(features)))


class SmallResNet(nn.Module):
    """Three residual blocks, average pooling, and one linear layer named `fc` as in torchvision's ResNets."""

    def __init__(self, num_classes: int, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
        )
        self.layer1 = Block(width, width, stride=1)
        self.layer2 = Block(width, 2 * width, stride=2)
        self.layer3 = Block(2 * width, 4 * width, stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(4 * width, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits `[B, num_classes]` of images `[B, 3, H, W]`; the last feature map is H/8 x W/8."""
        features = self.layer3(self.layer2(self.layer1(self.stem(images))))
        return cast(Tensor, self.fc(self.avgpool(features).flatten(1)))


def small_resnet(num_classes: int) -> nn.Module:
    """Return an untrained network of 0.1 million parameters; 48 x 48 pixels give a 6 x 6 feature map."""
    return SmallResNet(num_classes)
