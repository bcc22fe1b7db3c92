"""The device against the CPU: prediction, loss, gradient and memory updates of one batch, by precision.

The reference is the same step in float64 on the CPU. It finds a device, a driver or a precision that computes
something else; that the step itself is right, the tests show.
"""

# Shapes: B batch, L classes.

import copy
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn

from bigscl.config import Config
from bigscl.data.loader import Batch
from bigscl.distributed.ranks import SingleProcess
from bigscl.memory.lookup import MemoryBatch, updated_averages
from bigscl.models.spatial import BATCH_NORMS, Prediction, SpatialClassifier
from bigscl.training.model_state import ModelState
from bigscl.training.run_folder import Data
from bigscl.training.step import Step

logger = logging.getLogger(__name__)

MOST_IMAGES = 8
"""Images of a batch that are compared: a ResNet-50 in float64 takes a core seconds for each of them."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# A constant in place of the scaler's moving one, which needs some steps to settle.
FP16_SCALE = 2.0**10
TINY = 1e-12

# Tolerated differences by the bits of a number that the arithmetic keeps: 24, 11 (TF32, fp16) or 8 (bf16).
# Of each image the root mean square over its values; of the gradient its norm, relative to the reference's.
# Logits and losses are relative to the root mean square of the reference, or to 1 if that is less. Rows of
# the memory are float16, in steps of 0.0005 below 1. Seen on a CPU with untrained networks, whose batch
# normalisation amplifies: in fp32 ResNet-50 logits 6e-6, gradient 6e-4; in bf16 ResNet-50 logits 0.06,
# gradient 0.08, EfficientNet-B0 logits 0.12, loss 0.03, scores 0.006, heatmaps 0.009. The row of 11 bits is
# scaled from that of bf16, not measured. The ranking is a square root, which amplifies where it is near 0.
QUANTITIES = ("logits", "loss", "gradient", "scores", "heatmaps", "spatial_score")
TOLERANCES = {
    bits: dict(zip(QUANTITIES, tolerances, strict=True))
    for bits, tolerances in (
        (24, (1e-3, 1e-3, 2e-2, 1e-3, 1e-3, 2e-2)),
        (11, (5e-2, 2e-2, 2e-1, 5e-3, 1e-2, 1e-1)),
        (8, (3e-1, 1e-1, 4e-1, 2e-2, 3e-2, 2e-1)),
    )
}
COUNTED = ("cell_visits", "sample_visits")
"""Whole numbers, which must be the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """How much the device differs from the reference in one quantity, at the worst image."""

    precision: str
    quantity: str
    found: float
    tolerance: float

    @property
    def is_tolerated(self) -> bool:
        """Whether the device computes the same; NaN is no number that anything tolerates."""
        return self.found <= self.tolerance


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outcome:
    """Results of a step for a batch, on the host."""

    logits: Tensor
    """[B,L]"""
    loss: Tensor
    """[B]"""
    gradient: float
    """Norm of the gradient of the mean loss, over all parameters that train."""
    averages: Mapping[str, Tensor]
    """Updated rows of the memory, by the names of the store's arrays."""


def precisions_to_check(own: str, device: torch.device) -> list[str]:
    others = ["fp32"]
    if device.type == "cuda":
        others += ["fp16", *(["bf16"] if torch.cuda.is_bf16_supported() else [])]
    return [own, *(each for each in others if each != own)]


def kept_bits(precision: str, device: torch.device) -> int:
    return {"fp32": 11 if _uses_tf32(device) else 24, "fp16": 11, "bf16": 8}[precision]


def _uses_tf32(device: torch.device) -> bool:
    """Return whether the device may compute convolutions or products of float32 in TF32."""
    try:
        return device.type == "cuda" and (
            torch.backends.cudnn.allow_tf32 or torch.backends.cuda.matmul.allow_tf32
        )
    except RuntimeError:  # somebody's network has set it by torch's newer names, which forbid these
        return True


class ReferenceCheck:
    """Computes one batch on the device, as the run does, and on the CPU."""

    def __init__(self, config: Config, data: Data, state: ModelState) -> None:
        self._config, self._data, self._state = config, data, state
        self._device = state.accelerator.device

    def differences(
        self, batch: Batch, stored: MemoryBatch | None, precisions: list[str]
    ) -> Iterator[Difference]:
        """Yield the largest difference of every quantity in each precision, the run's own first."""
        batch, stored = _first(batch, MOST_IMAGES), _first(stored, MOST_IMAGES)
        with without_randomness(self._state.network):
            # Before anything runs on the device: a forward changes the statistics of batch normalisation.
            reference = self._reference(batch, stored)
            for number, precision in enumerate(precisions):
                outcome = self._on_device(batch, stored, precision, as_prepared=number == 0)
                tolerances = TOLERANCES[kept_bits(precision, self._device)]
                for quantity, difference in compare(outcome, reference):
                    yield Difference(
                        precision=precision,
                        quantity=quantity,
                        found=difference,
                        tolerance=0.0 if quantity in COUNTED else tolerances[quantity],
                    )

    def _reference(self, batch: Batch, stored: MemoryBatch | None) -> Outcome:
        try:
            return self._on_host(batch, stored, torch.float64)
        except RuntimeError as error:
            logger.warning("this network cannot compute in float64 (%s): compared with float32", error)
            return self._on_host(batch, stored, torch.float32)

    def _on_host(self, batch: Batch, stored: MemoryBatch | None, dtype: torch.dtype) -> Outcome:
        host = torch.device("cpu")
        network = plain_copy(self._state.network).to(host, dtype)

        def model(images: Tensor, maps: bool) -> Prediction:
            return cast(Prediction, network(images.to(dtype), maps=maps))

        return self._computed(model, network, host, batch.to(host), _moved(stored, host), 1.0)

    def _on_device(
        self, batch: Batch, stored: MemoryBatch | None, precision: str, *, as_prepared: bool
    ) -> Outcome:
        """Compute with the network that trains, or with a copy of it in another precision."""
        scale = FP16_SCALE if precision == "fp16" else 1.0
        if as_prepared:
            # Accelerate has wrapped its forward for the precision; DDP, which only exchanges, is left out.
            network = self._state.network
            return self._computed(network, network, self._device, batch, stored, scale)
        network, dtype = plain_copy(self._state.network), DTYPES[precision]

        def model(images: Tensor, maps: bool) -> Prediction:
            with torch.autocast(self._device.type, dtype, enabled=dtype is not torch.float32):
                return cast(Prediction, network(images, maps=maps))

        return self._computed(model, network, self._device, batch, stored, scale)

    def _computed(
        self,
        model: Callable[..., Prediction],
        network: nn.Module,
        device: torch.device,
        batch: Batch,
        stored: MemoryBatch | None,
        scale: float,
    ) -> Outcome:
        step = self._step(model, device, scale, stored is not None and stored.heatmaps is not None)
        network.zero_grad()
        gamma = self._config.objective.gamma.peak
        loss, predicted = step(batch, stored, count=len(batch), gamma=gamma, rate=0.0)
        averages = {}
        if stored is not None:
            averages = updated_averages(stored, predicted.logits, predicted.maps, self._config.store)
        gradients = [each.grad.double().norm() for each in network.parameters() if each.grad is not None]
        norm = float(torch.stack(gradients).norm()) / scale
        network.zero_grad()
        return Outcome(
            logits=_on_host(predicted.logits),
            loss=_on_host(loss.total),
            gradient=norm,
            averages={name: _on_host(tensor) for name, tensor in averages.items()},
        )

    def _step(
        self, model: Callable[..., Prediction], device: torch.device, scale: float, keeps_heatmaps: bool
    ) -> Step:
        kept, accelerator = self._state.loss_state, _Local(device=device, factor=scale)
        # Of state and memory a step uses these parts only; it does not change the state of the loss. In epoch
        # 0 no loss compares predictions with each other: which of two is larger may depend on the precision.
        unchanged = kept and SimpleNamespace(inputs=kept.inputs, update=lambda trained: None)
        state: Any = SimpleNamespace(model=model, accelerator=accelerator, loss_state=unchanged)
        memory: Any = SimpleNamespace(keeps_heatmaps=keeps_heatmaps)
        return Step(self._config, self._data, state, memory, SingleProcess())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Local:
    """Accelerate on one rank, with a constant factor for losses in fp16."""

    device: torch.device
    factor: float

    @property
    def scaler(self) -> "_Local":
        return self

    def get_scale(self) -> float:
        return self.factor

    def backward(self, loss: Tensor) -> None:
        (loss * self.factor).backward()  # type: ignore[no-untyped-call]

    def reduce(self, values: Tensor, reduction: str) -> Tensor:
        return values

    def gather(self, values: Tensor) -> Tensor:
        return values


def plain_copy(network: SpatialClassifier) -> SpatialClassifier:
    """Return a copy without what Accelerate wraps around its forward."""
    copied = copy.deepcopy(network)
    for name in ("forward", "_original_forward"):
        copied.__dict__.pop(name, None)
    return copied


@contextmanager
def without_randomness(network: SpatialClassifier) -> Iterator[None]:
    """Train without dropout, with batch statistics where the phase uses them, but not over all ranks."""
    inner = list(network.network.modules())
    modes = [module.training for module in inner]
    shares = {module: module.p for module in inner if isinstance(module, nn.Dropout)}
    for module in inner:
        is_batch_norm = isinstance(module, BATCH_NORMS) and not isinstance(module, nn.SyncBatchNorm)
        module.training = module.training and is_batch_norm
    for module in shares:
        module.p = 0.0
    try:
        yield
    finally:
        for module, mode in zip(inner, modes, strict=True):
            module.training = mode
        for module, share in shares.items():
            module.p = share


def compare(found: Outcome, reference: Outcome) -> Iterator[tuple[str, float]]:
    """Yield each quantity with its difference, on the scale of `TOLERANCES`."""
    for name in ("logits", "loss"):
        expected = getattr(reference, name)
        scale = max(float(expected.square().mean().sqrt()), 1.0)
        yield name, _of_worst_image(getattr(found, name), expected) / scale
    yield "gradient", abs(found.gradient - reference.gradient) / max(reference.gradient, TINY)
    for name, expected in reference.averages.items():
        yield name, _of_worst_image(found.averages[name], expected)


def _of_worst_image(found: Tensor, expected: Tensor) -> float:
    """Return the root mean square of an image's differences, of the image where it is largest."""
    return float((found - expected).reshape(len(expected), -1).square().mean(1).sqrt().max())


def worst(differences: list[Difference]) -> list[Difference]:
    by_quantity: dict[tuple[str, str], Difference] = {}
    for difference in differences:
        key = (difference.precision, difference.quantity)
        known = by_quantity.get(key)
        if known is None or math.isnan(difference.found) or difference.found > known.found:
            by_quantity[key] = difference
    return list(by_quantity.values())


def _first(tensors: Any, count: int) -> Any:
    """Return a batch, or what is remembered of it, with its first samples only."""
    return _changed(tensors, lambda name, tensor: tensor if name == "skipped" else tensor[:count])


def _moved(stored: MemoryBatch | None, device: torch.device) -> MemoryBatch | None:
    if stored is None:
        return None
    moved: MemoryBatch = _changed(stored, lambda _, tensor: tensor.to(device))
    selection, annotations = stored.selection.to(device), stored.annotations.to(device)
    return replace(moved, selection=selection, annotations=annotations)


def _changed(tensors: Any, change: Callable[[str, Tensor], Tensor]) -> Any:
    """Return a dataclass with each of its tensors changed; None for None."""
    if tensors is None:
        return None
    parts = {field.name: getattr(tensors, field.name) for field in fields(tensors)}
    changed: dict[str, Any] = {
        name: change(name, part) for name, part in parts.items() if isinstance(part, Tensor)
    }
    if "rows" in parts:
        changed["rows"] = changed["ids"].cpu().numpy()
        changed["arrays"] = {name: change(name, array) for name, array in parts["arrays"].items()}
    return replace(tensors, **changed)


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.float64)
