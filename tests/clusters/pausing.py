"""A network whose steps take longer while a file exists, so that a scheduler meets the run in mid-epoch."""

import os
import time
from pathlib import Path

from torch import Tensor, nn

from tests.integration.tiny import TinyNet


class PausingNet(TinyNet):
    def forward(self, images: Tensor) -> Tensor:
        file = Path(os.environ.get("PAUSE_FILE", "nosuch"))
        # While only the head is trained, the network is not in training mode.
        if file.exists():
            time.sleep(float(file.read_text()))
        return super().forward(images)


def pausing_net(num_classes: int) -> nn.Module:
    return PausingNet(num_classes, norm=True, dropout=0.3)
