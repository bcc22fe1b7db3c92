"""A network whose construction breaks something on this rank, as `SABOTAGE=kind` in the environment says."""

import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.integration.tiny import TinyNet

REASON = "sabotage on the last rank"


def is_last_rank() -> bool:
    return os.environ.get("RANK") == str(int(os.environ.get("WORLD_SIZE", "1")) - 1)


def net(num_classes: int) -> nn.Module:
    """The tiny network with batch statistics and dropout, after the sabotage."""
    for kind in os.environ.get("SABOTAGE", "").split():
        SABOTAGES[kind]()
    return FailingNet(num_classes) if "step" in os.environ["SABOTAGE"].split() else noisy(num_classes)


def noisy(num_classes: int) -> nn.Module:
    return TinyNet(num_classes, norm=True, dropout=0.3)


class FailingNet(TinyNet):
    """Fails on the last rank in training, at its tenth batch."""

    calls = 0

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        if self.calls == 10 and is_last_rank():
            raise RuntimeError(REASON)
        return super().forward(images)


def fail_at_call(owner: Any, name: str, number: int) -> None:
    """Make the n-th call of a function fail on the last rank."""
    real, calls = getattr(owner, name), iter(range(1, 10**9))

    def call(*arguments: Any, **options: Any) -> Any:
        if next(calls) == number and is_last_rank():
            raise RuntimeError(REASON)
        return real(*arguments, **options)

    setattr(owner, name, call)


def break_loader() -> None:
    from bigscl.data import loader

    fail_at_call(loader, "_transformed", 12)


def break_thread() -> None:
    from bigscl.store import HeatmapStore

    fail_at_call(HeatmapStore, "save_shard", 2)


def break_commit() -> None:
    from bigscl.store import HeatmapStore

    fail_at_call(HeatmapStore, "_sync", 1)


def block_destroy() -> None:
    """NCCL's way to end a group: it waits for all ranks."""
    real, folder = torch.distributed.destroy_process_group, Path(os.environ["SABOTAGE_FOLDER"])

    def destroy(*arguments: Any, **options: Any) -> None:
        (folder / f"destroyed-{os.environ['RANK']}").touch()
        while len(list(folder.glob("destroyed-*"))) < int(os.environ["WORLD_SIZE"]):
            time.sleep(0.05)
        real(*arguments, **options)

    torch.distributed.destroy_process_group = destroy


def save_slowly() -> None:
    """The first checkpoint takes longer than the 30 seconds that torch's launcher waits by itself."""
    from bigscl.training.checkpoint_folder import Checkpoints

    real = Checkpoints.save

    def save(self: Checkpoints, *arguments: Any, **options: Any) -> Path:
        if not self.paths():
            time.sleep(float(os.environ["SABOTAGE_SECONDS"]))
        return real(self, *arguments, **options)

    Checkpoints.save = save  # type: ignore[method-assign]


SABOTAGES = {
    "step": lambda: None,
    "loader": break_loader,
    "thread": break_thread,
    "commit": break_commit,
    "destroy": block_destroy,
    "slow_save": save_slowly,
}
