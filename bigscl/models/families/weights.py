"""Weights of networks in files: state dicts that are read without running code, and load strictly."""

import logging
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bigscl.common.digests import check_beside
from bigscl.common.files import BadFile, parse_errors
from bigscl.common.text import printable

logger = logging.getLogger(__name__)

WEIGHT_FILES = (".pt", ".pth", ".safetensors")


def is_file(weights: str) -> bool:
    return Path(weights).suffix in WEIGHT_FILES


def read_state(file: str) -> dict[str, Tensor]:
    """Return the state dict in a weights file; a torch file is read without running code in it."""
    if not Path(file).is_file():
        raise FileNotFoundError(
            f"weights: no file {file}. Give a file (.pt, .pth, .safetensors) or a name as DEFAULT."
        )
    check_beside(Path(file), "Restore it from a copy, or give other weights.")
    with parse_errors(file, "a weights file of tensors", "Give model.weights another file."):
        content = _load(file)
    # Training scripts wrap the state dict: torchvision under "model", Lightning and timm under "state_dict".
    for key in ("state_dict", "model"):
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    if not isinstance(content, dict) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in content.items()
    ):
        raise BadFile(f"weights: {file} holds no state dict (names and tensors)")
    return content


def _load(file: str) -> Any:
    if file.endswith(".safetensors"):
        from safetensors.torch import load_file

        return load_file(file)
    with warnings.catch_warnings():
        # About unusual tensors, which are refused later if they do not fit.
        warnings.simplefilter("ignore")
        return torch.load(file, map_location="cpu", weights_only=True)


def load_state(network: nn.Module, state: dict[str, Tensor], head: str, source: str) -> None:
    """Load `state` into `network`, strictly; only a head with another number of classes stays as it is."""
    expected = network.state_dict()
    names = [name for name in (f"{head}.weight", f"{head}.bias") if name in state]
    rows = {name: state[name].shape[0] if state[name].ndim else 0 for name in names}
    linear = rows.get(f"{head}.weight")
    wanted = len(expected[f"{head}.weight"])
    if linear is not None and linear != wanted:
        logger.info("%s: head %s has %d classes, not %d: freshly initialised", source, head, linear, wanted)
        for name in rows:
            state[name] = expected[name]
    try:
        network.load_state_dict(state, strict=True)
    except (RuntimeError, TypeError, NotImplementedError):
        raise BadFile(
            f"weights: {source} does not fit {type(network).__name__}: {differences(state, expected)}. "
            f"Only the head ({head}) may differ, in its number of classes."
        ) from None


def differences(state: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> str:
    """Return why a state dict does not fit, in one line with a few names of each kind; empty if it fits."""
    common = [name for name in expected if name in state]
    kinds = {
        "missing": [name for name in expected if name not in state],
        "unexpected": [name for name in state if name not in expected],
        "of another shape": [name for name in common if state[name].shape != expected[name].shape],
    }
    return "; ".join(
        f"{len(names)} {kind} ({', '.join(map(printable, names[:3]))}{', ...' if len(names) > 3 else ''})"
        for kind, names in kinds.items()
        if names
    )
