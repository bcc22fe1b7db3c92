"""The head of a network: its linear layer, and the feature map whose average goes into it."""

# Shapes: B batch, C channels of the last feature map, L classes, G side of the score map.

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from bigscl.method.precision import at_least_float32

Side = Literal["input", "output"]
# Not square, so that a map's axes differ; a stride of 32 gives 4 x 3 cells; Inception needs 75 pixels.
PROBE_HEIGHT, PROBE_WIDTH = 128, 96
FITTING = (
    "Networks that end in average pooling and one linear layer do: ResNet, ResNeXt, RegNet, EfficientNet, "
    "MobileNetV2, ConvNeXt, DenseNet, ShuffleNet, MNASNet, GoogLeNet, Swin."
)


class Tap:
    """Keeps the last input or output of a module until it is taken."""

    def __init__(self) -> None:
        self._tensor: Tensor | None = None

    def attach(self, module: nn.Module, side: Side) -> RemovableHandle:
        """Tap one side of `module`. Methods, not closures: a deep copy of the model gets its own tap."""
        if side == "input":
            return module.register_forward_pre_hook(self._before)
        return module.register_forward_hook(self._after)

    def _before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._tensor = args[0]

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._tensor = output

    def take(self) -> Tensor:
        """Return the tensor and forget it, so that no graph outlives its step."""
        tensor, self._tensor = self._tensor, None
        assert tensor is not None, "the tapped module did not run"
        return tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The parts of a network's head, by the names of its modules."""

    name: str
    """The linear layer that returns the logits."""
    tapped: str
    side: Side
    """The module whose input or output is the feature map [B,C,G,G] that is averaged."""
    norm: str | None = None
    """A LayerNorm between pooling and linear layer (ConvNeXt)."""
    dropout: str | None = None

    def linear(self, network: nn.Module) -> nn.Linear:
        """Return the linear layer."""
        module = network.get_submodule(self.name)
        assert isinstance(module, nn.Linear)
        return module

    def logit_map(self, network: nn.Module, features: Tensor, training: bool) -> Tensor:
        """Return the logits of every cell [B,L,G,G]; their mean is the network's output for pooled features.

        Dropout drops a channel in all cells at once: the same as dropping it after the pooling.
        """
        if self.norm is not None:
            features = _normalise_as_pooled(features, network.get_submodule(self.norm))
        if self.dropout is not None and training:
            dropout = network.get_submodule(self.dropout)
            assert isinstance(dropout, nn.Dropout)
            features = F.dropout2d(features, dropout.p)
        # A 1x1 convolution, as a matrix product over cells: on the CPU twice as fast, forward and backward.
        logit_map: Tensor = self.linear(network)(features.movedim(1, -1)).movedim(-1, 1)
        return logit_map


def _normalise_as_pooled(features: Tensor, norm: nn.Module) -> Tensor:
    """Apply to all cells the affine map that LayerNorm applies to their average: the two commute exactly.

    LayerNorm of each cell by its own statistics would give other pooled logits than the network's.
    """
    assert isinstance(norm, nn.LayerNorm)
    features = at_least_float32(features)
    average = features.mean((2, 3))
    gain = (average.var(1, correction=0, keepdim=True) + norm.eps).rsqrt()
    if norm.weight is not None:
        gain = gain * norm.weight
    pooled = F.layer_norm(average, norm.normalized_shape, norm.weight, norm.bias, norm.eps)
    return (features - average[:, :, None, None]) * gain[:, :, None, None] + pooled[:, :, None, None]


def find_head(network: nn.Module, backbone: str) -> Head:
    """Find the head of `network` by running it once on a random image; raise ValueError if it has none.

    The computation decides, not names: the head is a linear layer that returns the output, and before it the
    last tensor whose spatial average is that layer's input.
    """
    calls, output = _probe(network, backbone)
    last = next((i for i in reversed(range(len(calls))) if calls[i].gives(nn.Linear, output)), None)
    if last is None:
        raise ValueError(f"backbone: {backbone} does not end in a linear layer. {FITTING}")
    name, pooled, before = calls[last].name, calls[last].input, calls[:last]
    norm = next((call for call in before if call.gives(nn.LayerNorm, pooled)), None)
    dropout = next((call for call in before if call.gives(nn.Dropout, pooled)), None)
    tapped = _find_map(before, norm.input if norm else pooled)
    if tapped is None:
        raise ValueError(
            f"backbone: {backbone} gives no score maps: what goes into its last layer {name!r} is not the "
            f"average of a feature map (a hidden layer, a class token or flattened cells stand between), so "
            f"the layer cannot be applied to every cell instead. {FITTING}"
        )
    return Head(
        name=name,
        tapped=tapped[0],
        side=tapped[1],
        norm=norm.name if norm else None,
        dropout=dropout.name if dropout else None,
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """The last call of a module in the probe."""

    name: str
    module: nn.Module
    input: Tensor
    output: Tensor

    def gives(self, kind: type[nn.Module], value: Tensor) -> bool:
        """Return whether this is a layer of that kind which returned `value`."""
        return isinstance(self.module, kind) and _same(self.output, value)


def _probe(network: nn.Module, backbone: str) -> tuple[list[_Call], Tensor]:
    """Return the last call of every module, in the order in which they ended, and the output."""
    calls: dict[str, _Call] = {}
    handles = []
    for name, module in network.named_modules():

        def record(module: nn.Module, args: tuple[Any, ...], output: Any, name: str = name) -> None:
            calls.pop(name, None)
            if args and isinstance(args[0], Tensor) and isinstance(output, Tensor):
                calls[name] = _Call(name, module, args[0], output)

        handles.append(module.register_forward_hook(record))
    training = network.training
    generator = torch.Generator().manual_seed(0)
    image = torch.rand(1, 3, PROBE_HEIGHT, PROBE_WIDTH, generator=generator)
    image = image.to(next(network.parameters(), image))
    try:
        with torch.no_grad():
            output = network.eval()(image)
    except Exception as error:
        raise ValueError(
            f"backbone: {backbone} does not run on an image of {PROBE_HEIGHT} x {PROBE_WIDTH} "
            f"({type(error).__name__}: {error}), so it cannot follow crops of any size. {FITTING}"
        ) from None
    finally:
        network.train(training)
        for handle in handles:
            handle.remove()
    if not isinstance(output, Tensor) or not output.isfinite().all():
        raise ValueError(f"backbone: {backbone} gave {output!r:.80} for an image, expected finite logits")
    return list(calls.values()), output


def _find_map(calls: list[_Call], pooled: Tensor) -> tuple[str, Side] | None:
    """Return the last module and side with a map whose average is `pooled`."""
    # After the whole run, so that a map changed in place (DenseNet's last ReLU) is compared as pooled.
    for call in reversed(calls):
        sides: tuple[tuple[Side, Tensor], ...] = (("output", call.output), ("input", call.input))
        for side, tensor in sides:
            if tensor.ndim == 4 and tensor[0, 0].numel() > 1 and _same(tensor.mean((2, 3)), pooled):
                return call.name, side
    return None


def _same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same numbers up to rounding, whatever their shape."""
    if one.numel() != other.numel():
        return False
    one, other = one.flatten().double(), other.flatten().double()
    return bool((one - other).abs().max() <= 1e-4 * other.abs().max())
