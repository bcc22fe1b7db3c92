"""The weighted cross-entropy that most losses are made of, in at least float32. No torch import."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def at_least_float32(tensor: Tensor) -> Tensor:
    """Return the tensor, as float32 if it has half precision."""
    return tensor.float() if tensor.dtype.itemsize < 4 else tensor


def probabilities(logits: Tensor) -> Tensor:
    """Return f, the sigmoid of the logits, computed in at least float32."""
    return at_least_float32(logits).sigmoid()


def weighted(logits: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
    """-1/L sum of (w+ log f + w- log(1 - f)) for each sample, with masks or weights w+ and w- [B,L]."""
    return positives(logits, positive) + negatives(logits, negative)


def positives(logits: Tensor, weight: Tensor) -> Tensor:
    """-1/L sum of weight * log f, for a mask or weights [B,L]."""
    return -(weight * log_f(logits)).mean(1)


def negatives(logits: Tensor, weight: Tensor) -> Tensor:
    """-1/L sum of weight * log(1 - f), for a mask or weights [B,L]."""
    return positives(-logits, weight)


def log_f(logits: Tensor) -> Tensor:
    """Return log f, and log(1 - f) for negated logits, in at least float32; it is finite where f is 0."""
    import torch.nn.functional as F

    return F.logsigmoid(at_least_float32(logits))


def power(logits: Tensor, exponent: float) -> Tensor:
    """Return f^exponent, and (1 - f)^exponent for negated logits; its gradient is finite for any exponent."""
    return (exponent * log_f(logits)).exp()
