"""The weighted cross-entropy of most losses, in at least float32, and the losses that are nothing else."""

# Shapes: B batch, L classes.

from __future__ import annotations

from typing import TYPE_CHECKING

from bigscl.common.bounds import Share
from bigscl.losses.registry import Setting, base_loss

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from bigscl.common import torch_later as torch


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
    return torch.nn.functional.logsigmoid(at_least_float32(logits))


def power(logits: Tensor, exponent: float) -> Tensor:
    """Return f^exponent, and (1 - f)^exponent for negated logits; its gradient is finite for any exponent."""
    return (exponent * log_f(logits)).exp()


# Losses that treat unknown labels alike, or by the expected positives


def bce(logits: Tensor, labels: Tensor) -> Tensor:
    """Binary cross-entropy of the known labels; unknown labels have no loss."""
    return positives(logits, labels == 1) + negatives(logits, labels == 0)


def an(logits: Tensor, labels: Tensor) -> Tensor:
    """Assume negative: every label that is not positive is a negative."""
    return positives(logits, labels == 1) + negatives(logits, labels != 1)


def an_ls(logits: Tensor, labels: Tensor, *, smoothing: float = 0.1) -> Tensor:
    """Assume negative with label smoothing: the targets are `1 - smoothing` and `smoothing`."""
    swapped = positives(logits, labels != 1) + negatives(logits, labels == 1)
    return (1 - smoothing) * an(logits, labels) + smoothing * swapped


def wan(logits: Tensor, labels: Tensor) -> Tensor:
    """Weak assume negative: as `an`, each negative weighted 1/(L-1), so that all weigh as one positive."""
    return positives(logits, labels == 1) + negatives(logits, labels != 1) / max(labels.shape[1] - 1, 1)


def en(logits: Tensor, labels: Tensor, expected: Tensor) -> Tensor:
    """Expected negative: as `an`, but unknown labels that are expected positives have no loss."""
    return positives(logits, labels == 1) + negatives(logits, (labels == 0) | ((labels == -1) & ~expected))


def ep(logits: Tensor, labels: Tensor, expected: Tensor) -> Tensor:
    """Expected positive: as `an`, but unknown labels that are expected positives count as positives."""
    positive = (labels == 1) | ((labels == -1) & expected)
    return positives(logits, positive) + negatives(logits, ~positive)


def enp(logits: Tensor, labels: Tensor, expected: Tensor, pseudo_positives: Tensor) -> Tensor:
    """Expected negative and positive: as `en`, but of the expected, `pseudo_positives` count as positives."""
    unknown = labels == -1
    positive = (labels == 1) | (unknown & pseudo_positives)
    negative = (labels == 0) | (unknown & ~expected & ~pseudo_positives)
    return positives(logits, positive) + negatives(logits, negative)


base_loss("bce", bce, mixes=True)
base_loss("an", an, mixes=True)
smoothing = Setting(name="smoothing", type=Share, default=0.1, text="Label smoothing of an_ls.")
base_loss("an_ls", an_ls, setting=smoothing, mixes=True)
base_loss("wan", wan, mixes=True)
base_loss("en", en, mixes=True)
base_loss("ep", ep, mixes=True)
base_loss("enp", enp, mixes=True)
