"""Networks small enough that a whole training run costs less than its imports."""

import os
import signal
import time

import torch
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


class PortableDropout(nn.Module):
    """Dropout that every version of torch draws alike: they agree on `rand`, but not on nn.Dropout."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def forward(self, features: Tensor) -> Tensor:
        if not self.training:
            return features
        kept = torch.rand(features.shape) >= self.share
        return features * kept / (1 - self.share)


def portable_noisy_net(num_classes: int) -> nn.Module:
    """Like `noisy_net`, for numbers that another version of torch shall give, too."""
    network = TinyNet(num_classes, norm=True)
    network.dropout = PortableDropout(0.3)
    return network


class Gate(nn.Module):
    """Normalises pooled features over the batch, which fails for a batch of one image."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.BatchNorm2d(channels), nn.Sigmoid())

    def forward(self, features: Tensor) -> Tensor:
        return features * self.weight(features)


def gated_net(num_classes: int) -> nn.Module:
    """A network that cannot train on a single image."""
    network = TinyNet(num_classes)
    network.features = nn.Sequential(network.features, Gate(16))
    return network


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


class StoppingNet(TinyNet):
    """Asks its own process to stop, at the batch of this number of those that train the whole network."""

    calls = 0

    def forward(self, images: Tensor) -> Tensor:
        self.calls += self.training
        if self.training and self.calls == int(os.environ.get("STOP_AT_BATCH", "0")):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1)  # until the thread that listens has heard it
        return super().forward(images)


def stopping_net(num_classes: int) -> nn.Module:
    return StoppingNet(num_classes)


def net_of_rank_0(num_classes: int) -> nn.Module:
    """A network that another node cannot make."""
    if (rank := os.environ.get("RANK", "0")) != "0":
        raise RuntimeError(f"no network on rank {rank}")
    return tiny_net(num_classes)


class WrongNet(TinyNet):
    """Computes something else in single precision than in double, as a broken device would."""

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images * 1.2 if images.dtype is torch.float32 else images)


def wrong_net(num_classes: int) -> nn.Module:
    return WrongNet(num_classes)


class TellingNet(TinyNet):
    """Prints the type that its first layer computes in, while it is trained."""

    def forward(self, images: Tensor) -> Tensor:
        if self.training:
            print(self.features[0](images).dtype)
        return super().forward(images)


def telling_net(num_classes: int) -> nn.Module:
    return TellingNet(num_classes)
