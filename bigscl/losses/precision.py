"""The precision in which losses and pooled logits are computed, also under autocast. No torch import."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def at_least_float32(tensor: Tensor) -> Tensor:
    """Return the tensor, as float32 if it has half precision."""
    return tensor.float() if tensor.dtype.itemsize < 4 else tensor


def probabilities(logits: Tensor) -> Tensor:
    """Return the sigmoid of the logits, computed in at least float32."""
    return at_least_float32(logits).sigmoid()
