"""Checkpoints: folders that appear whole or not at all, each naming the store's snapshot it belongs to."""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

PROGRESS = "progress.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where a run stands."""

    epoch: int = 0
    """The epoch that is being trained, or comes next."""
    step: int = 0
    """Optimizer steps so far."""
    snapshot: int | None = None
    """The committed state of the store that belongs to it."""
    best: float | None = None
    """The best validation metric so far."""
    best_epoch: int | None = None


def write_folder(path: Path, files: Mapping[str, Callable[[Path], object]]) -> None:
    """Make a folder of these files, all of them synced before it gets its name; an older one is replaced."""
    partial = path.with_name(f".{path.name}.partial")
    old = path.with_name(f".{path.name}.old")
    if old.exists() and not path.exists():
        old.rename(path)  # a crash fell between the two renames below
    for leftover in (partial, old):
        shutil.rmtree(leftover, ignore_errors=True)
    partial.mkdir(parents=True)
    for name, write in files.items():
        write(partial / name)
        _sync(partial / name)
    _sync(partial)
    if path.exists():
        path.rename(old)
    partial.rename(path)
    _sync(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def write_json(values: Any) -> Callable[[Path], object]:
    """A writer of plain values."""
    return lambda path: path.write_text(json.dumps(values, indent=1))


def write_tensors(tensors: Mapping[str, Tensor]) -> Callable[[Path], object]:
    """A writer of named tensors as safetensors."""
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    return lambda path: save_file(plain, path)


def write_state(state: Any) -> Callable[[Path], object]:
    """A writer of nested tensors and numbers, readable without running code."""
    return lambda path: torch.save(state, path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Checkpoint:
    """One checkpoint folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.progress = Progress(**json.loads((path / PROGRESS).read_text()))

    def tensors(self, name: str) -> dict[str, Tensor]:
        """The named tensors of a safetensors file."""
        return load_file(self.path / name)

    def state(self, name: str) -> Any:
        """What `write_state` wrote."""
        return torch.load(self.path / name, map_location="cpu", weights_only=True)


class Checkpoints:
    """The checkpoints of a run, oldest first; the newest `keep` stay."""

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder = folder
        self._keep = keep

    def all(self) -> list[Checkpoint]:
        """Every whole checkpoint."""
        paths = sorted(self._folder.glob("step-*"))
        return [Checkpoint(path) for path in paths if (path / PROGRESS).exists()]

    def latest(self) -> Checkpoint | None:
        """The newest one."""
        found = self.all()
        return found[-1] if found else None

    def save(self, progress: Progress, files: Mapping[str, Callable[[Path], object]]) -> Path:
        """Write a checkpoint, then remove those that are no longer kept."""
        path = self._folder / f"step-{progress.step:08d}"
        write_folder(path, {**files, PROGRESS: write_json(asdict(progress))})
        for old in self.all()[: -self._keep]:
            shutil.rmtree(old.path)
        return path

    def drop_after(self, kept: Checkpoint) -> None:
        """Remove newer ones than this, which a run goes on from: their snapshots are gone with it."""
        for checkpoint in self.all():
            if checkpoint.progress.step > kept.progress.step:
                shutil.rmtree(checkpoint.path)

    def snapshots(self) -> set[int]:
        """The snapshots that kept checkpoints name, and so must stay."""
        named = {checkpoint.progress.snapshot for checkpoint in self.all()}
        return {number for number in named if number is not None}
