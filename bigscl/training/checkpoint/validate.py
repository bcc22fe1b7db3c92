"""Checks of the contents of a checkpoint's files, made before a run resumes from it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bigscl.models.families.weights import differences
from bigscl.training.checkpoint.checkpoint_folder import CheckpointError


def check_tensors(file: Path, found: Any, expected: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError unless these are tensors of the expected names and shapes."""
    if not isinstance(found, Mapping) or not all(isinstance(value, Tensor) for value in found.values()):
        raise CheckpointError(f"{file}: holds {type(found).__name__}, expected names and tensors")
    if reason := differences(found, expected):
        raise CheckpointError(
            f"{file}: does not fit this network and data: {reason}. Resume with the model.backbone and "
            f"the data it was saved with."
        )


def check_optimizer(file: Path, found: Any) -> None:
    """Raise CheckpointError unless this is what `ModelState.files` writes of the optimizer."""
    fields = {"phase_began": int | None, "optimizer": dict, "scaler": dict | None}
    inner = {"state": dict, "param_groups": list}
    if (
        not _has(found, fields)
        or not _has(found["optimizer"], inner)
        or not all(isinstance(values, dict) for values in found["optimizer"]["state"].values())
        or not all(_has(group, {"params": list}) for group in found["optimizer"]["param_groups"])
    ):
        raise CheckpointError(f"{file}: not the state of an optimizer, expected {', '.join(fields)}")


def check_ranks(file: Path, found: Any, num_rows: int) -> None:
    """Raise CheckpointError unless this holds the ranks' random states and a bit for every row."""
    if not _has(found, {"rng": list, "visited": Tensor}):
        raise CheckpointError(f"{file}: not the state of the ranks, expected rng and visited")
    rows, expected = found["visited"], -(-num_rows // 8)
    if rows.dtype != torch.uint8 or rows.shape != (expected,):
        raise CheckpointError(
            f"{file}: visited is {rows.dtype} {tuple(rows.shape)}, expected {expected} bytes for "
            f"{num_rows} rows. Resume with the data it was saved with."
        )
    length = len(torch.get_rng_state())
    if not all(isinstance(rng, bytes) and _first_length(rng) == length for rng in found["rng"]):
        raise CheckpointError(f"{file}: rng holds no random states of {length} bytes, as this torch has them")


def _first_length(packed: bytes) -> int | None:
    """Return the length of the first generator's state, or None if the bytes are incomplete."""
    length = int.from_bytes(packed[:8], "little")
    return length if len(packed) >= 8 + length else None


def _has(found: Any, fields: Mapping[str, Any]) -> bool:
    return isinstance(found, dict) and all(
        name in found and isinstance(found[name], kind) for name, kind in fields.items()
    )


def misfit(saved: Any, own: Any, groups: Sequence[Mapping[str, Any]]) -> str | None:
    """Return why a saved optimizer state does not fit an optimizer with this state and these parameters."""
    pairs = zip(saved["param_groups"], own["param_groups"], strict=False)
    if not all(_same_kind(group, other) for group, other in pairs):
        return "it is the state of another optimizer"
    parameters = [parameter for group in groups for parameter in group["params"]]
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    if len(numbers) != len(parameters):
        return f"it has {len(numbers)} parameters, expected {len(parameters)}"
    for number, parameter in zip(numbers, parameters, strict=True):
        for name, value in saved["state"].get(number, {}).items():
            if isinstance(value, Tensor) and value.dim() and value.shape != parameter.shape:
                return (
                    f"{name} of parameter {number} is {tuple(value.shape)}, expected {tuple(parameter.shape)}"
                )
    return None


def _same_kind(group: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether two groups are of the same kind of optimizer, whose name torch does not save."""
    # AdamW; torch before 2.6 does not save it, and the checkpoint may be of another version.
    decoupled = {one["decoupled_weight_decay"] for one in (group, other) if "decoupled_weight_decay" in one}
    same_names = all((name in group) == (name in other) for name in ("betas", "momentum"))
    return same_names and len(decoupled) < 2
