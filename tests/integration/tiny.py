"""Networks small enough that a whole training run costs less than its imports."""

import os

from torch import Tensor, nn


class TinyNet(nn.Module):
    """Two convolutions, average pooling, and a linear layer; 48 x 48 pixels give maps of 6 x 6."""

    def __init__(self, num_classes: int, norm: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 4, stride=4),
            nn.BatchNorm2d(8) if norm else nn.Identity(),
            nn.Tanh(),
            nn.Conv2d(8, 16, 3, stride=2, padding=1),
            nn.Tanh(),
        )
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(16, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.fc(self.dropout(self.pool(self.features(images)).flatten(1)))


def tiny_net(num_classes: int) -> nn.Module:
    """Nothing in it depends on which other images share its batch, so ranks may split a batch in any way."""
    return TinyNet(num_classes)


def noisy_net(num_classes: int) -> nn.Module:
    """Batch statistics and dropout: a run that resumes without them or their generator goes astray."""
    return TinyNet(num_classes, norm=True, dropout=0.3)


class FailingNet(TinyNet):
    """Fails on the last rank in training, at its tenth batch."""

    calls = 0

    def forward(self, images: Tensor) -> Tensor:
        self.calls += self.training
        if self.calls == 10 and int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
            raise RuntimeError("a mistake in somebody's network")
        return super().forward(images)


def failing_net(num_classes: int) -> nn.Module:
    return FailingNet(num_classes)
