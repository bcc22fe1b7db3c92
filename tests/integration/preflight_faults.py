"""`bigscl preflight` in which something goes wrong, to be called in a process of its own."""

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch

from bigscl.distributed import signals
from bigscl.preflight import device_check as reference_check
from bigscl.preflight import rehearsal as preflight
from bigscl.store import HeatmapStore
from bigscl.tools.cli import main

STEPS_BEFORE = 4


def wrong_averages(*arguments: str) -> None:
    """The device writes other heatmaps than the CPU, whose reference has double precision."""
    right = reference_check.updated_averages

    def wrong(stored: Any, logits: torch.Tensor, maps: Any, settings: Any) -> dict[str, torch.Tensor]:
        updated = right(stored, logits, maps, settings)
        if logits.dtype is torch.float32:
            updated["heatmaps"] = updated["heatmaps"].flip(-1)
        return updated

    reference_check.updated_averages = wrong
    main(["preflight", *arguments])


def interrupted(*arguments: str) -> None:
    """SIGTERM arrives in the middle of training, on every rank."""
    _after_some_steps(lambda: os.kill(os.getpid(), signal.SIGTERM))
    main(["preflight", *arguments])


def interrupted_twice(*arguments: str) -> None:
    """Ctrl-C, and once more while the process hangs."""
    signals.SAME_REQUEST_SECONDS = 0.0

    def hang() -> None:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.5)
        time.sleep(60)

    _after_some_steps(hang)
    main(["preflight", *arguments])


def failing_storage(*arguments: str) -> None:
    """The disk is full at a commit."""

    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device", "somewhere")

    HeatmapStore.commit = fail  # type: ignore[method-assign]
    main(["preflight", *arguments])


def _after_some_steps(action: Callable[[], object]) -> None:
    original, steps = preflight.RehearsalTrainer.train_step, []

    def train_step(trainer: Any, *arguments: Any) -> None:
        original(trainer, *arguments)
        steps.append(None)
        if len(steps) == STEPS_BEFORE:
            action()

    preflight.RehearsalTrainer.train_step = train_step  # type: ignore[method-assign]
