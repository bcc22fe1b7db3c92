"""The head of a network: its linear layer, and the feature map whose average goes into it."""

# Shapes: B batch, C channels of the last feature map, L classes, G side of the score map.

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from bigscl.common.user_error import UserError
from bigscl.losses.cross_entropy import at_least_float32

Side = Literal["input", "output"]
Layout = Literal["channels first", "channels last", "tokens"]
# Not square, so that a map's axes differ; a stride of 32 gives 4 x 3 cells; Inception needs 75 pixels.
PROBE_HEIGHT, PROBE_WIDTH = 128, 96
USUAL_SIDE = 224
MOST_PREFIX_TOKENS = 8
FITTING = (
    "Networks that end in average pooling and one linear layer do: ResNet, ResNeXt, RegNet, EfficientNet, "
    "MobileNetV2, ConvNeXt, DenseNet, ShuffleNet, MNASNet, GoogLeNet, Swin, ViTs that average tokens."
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
    """The module whose input or output is the feature map that is averaged."""
    layout: Layout = "channels first"
    """Of that map: [B,C,G,G], [B,G,G,C], or [B,tokens,C] with the rows of cells one after the other."""
    prefix: int = 0
    """Tokens before those of the cells, which are not averaged: class token, registers."""
    side_of_images: int | None = None
    """Side of images that the network takes; None: it takes any height and width."""
    norm: str | None = None
    """A LayerNorm between pooling and linear layer (ConvNeXt)."""
    dropout: str | None = None

    def linear(self, network: nn.Module) -> nn.Linear:
        module = network.get_submodule(self.name)
        assert isinstance(module, nn.Linear)
        return module

    def cells(self, features: Tensor, images: Tensor) -> Tensor:
        """Return the tapped tensor as a map [B,C,G,G] of cells of the images."""
        if self.layout == "channels first":
            return features
        if self.layout == "channels last":
            return features.movedim(-1, 1)
        tokens = features[:, self.prefix :]
        rows, columns = grid_of(tokens.shape[1], images)
        return tokens.transpose(1, 2).reshape(len(tokens), -1, rows, columns)

    def logit_map(self, network: nn.Module, tapped: Tensor, images: Tensor, training: bool) -> Tensor:
        """Return the logits of every cell [B,L,G,G]; their mean is the network's output for pooled features.

        Dropout drops a channel in all cells at once: the same as dropping it after the pooling.
        """
        features = self.cells(tapped, images)
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


def grid_of(num_cells: int, images: Tensor) -> tuple[int, int]:
    """Return rows and columns of cells that have the aspect of the images."""
    height, width = images.shape[-2:]
    rows = max(1, round((num_cells * height / width) ** 0.5))
    if num_cells % rows or abs(num_cells / rows**2 - width / height) > width / height / rows:
        raise UserError(f"backbone: its {num_cells} tokens are no grid over images of {height} x {width}")
    return rows, num_cells // rows


def find_head(network: nn.Module, backbone: str) -> Head:
    """Find the head of `network` by running it once on a random image; raise UserError if it has none.

    The computation decides, not names: the head is a linear layer that returns the output, and before it the
    last tensor whose spatial average is that layer's input.
    """
    calls, output, image = _probe(network, backbone)
    last = next((i for i in reversed(range(len(calls))) if calls[i].gives(nn.Linear, output)), None)
    if last is None:
        raise UserError(f"backbone: {backbone} does not end in a linear layer. {FITTING}")
    name, pooled, before = calls[last].name, calls[last].input, calls[:last]
    norm = next((call for call in before if call.gives(nn.LayerNorm, pooled)), None)
    dropout = next((call for call in before if call.gives(nn.Dropout, pooled)), None)
    averaged = norm.input if norm else pooled
    tapped = _find_map(before, averaged, image)
    if tapped is None:
        raise UserError(
            f"backbone: {backbone} gives no score maps: what goes into its last layer {name!r} is not the "
            f"average of a feature map{_instead(before, averaged)}, so the layer cannot be applied to every "
            f"cell instead. {FITTING}"
        )
    height, width = image.shape[-2:]
    return Head(
        name=name,
        tapped=tapped.name,
        side=tapped.side,
        layout=tapped.layout,
        prefix=tapped.prefix,
        side_of_images=height if height == width else None,
        norm=norm.name if norm else None,
        dropout=dropout.name if dropout else None,
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    name: str
    module: nn.Module
    input: Tensor
    output: Tensor

    def gives(self, kind: type[nn.Module], value: Tensor) -> bool:
        return isinstance(self.module, kind) and _same(self.output, value)


def _probe(network: nn.Module, backbone: str) -> tuple[list[_Call], Tensor, Tensor]:
    """Return the last call of every module, in order of their end, the output, and the image."""
    side = _side_of_images(network)
    try:
        return _run_on(network, backbone, PROBE_HEIGHT, PROBE_WIDTH)
    except _DoesNotRun as error:
        reason = error
    try:
        return _run_on(network, backbone, side, side)
    except _DoesNotRun as error:
        raise UserError(
            f"backbone: {backbone} runs neither on an image of {PROBE_HEIGHT} x {PROBE_WIDTH} ({reason}) nor "
            f"of {side} x {side} ({error}). A network of another fixed size says so in its attribute "
            f"`image_size`."
        ) from None


def _side_of_images(network: nn.Module) -> int:
    """Return the side that a network of a fixed size says it has: torchvision's, timm's, or the usual one."""
    size: Any = getattr(network, "image_size", None)
    if size is None:
        size = getattr(getattr(network, "patch_embed", None), "img_size", None)
    if size is None and isinstance(published := getattr(network, "pretrained_cfg", None), dict):
        size = published.get("input_size", ())[1:]
    size = size[0] if isinstance(size, tuple | list) and size else size
    return size if isinstance(size, int) and size > 0 else USUAL_SIDE


class _DoesNotRun(Exception):
    """The network raised an error for an image."""


def _run_on(network: nn.Module, backbone: str, height: int, width: int) -> tuple[list[_Call], Tensor, Tensor]:
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
    image = torch.rand(1, 3, height, width, generator=generator)
    image = image.to(next(network.parameters(), image))
    try:
        with torch.no_grad():
            output = network.eval()(image)
    except Exception as error:
        raise _DoesNotRun(f"{type(error).__name__}: {error}") from None
    finally:
        network.train(training)
        for handle in handles:
            handle.remove()
    if not isinstance(output, Tensor) or not output.isfinite().all():
        raise UserError(f"backbone: {backbone} gave {output!r:.80} for an image, expected finite logits")
    return list(calls.values()), output, image


class _Map(NamedTuple):
    name: str
    side: Side
    layout: Layout
    prefix: int


def _find_map(calls: list[_Call], pooled: Tensor, image: Tensor) -> _Map | None:
    """Return the last module and side with a map whose average is `pooled`."""
    # After the whole run, so that a map changed in place (DenseNet's last ReLU) is compared as pooled.
    for call in reversed(calls):
        sides: tuple[tuple[Side, Tensor], ...] = (("output", call.output), ("input", call.input))
        for side, tensor in sides:
            for layout, prefix, average in _averages(tensor, image):
                if _same(average, pooled):
                    return _Map(call.name, side, layout, prefix)
    return None


def _averages(tensor: Tensor, image: Tensor) -> Iterator[tuple[Layout, int, Tensor]]:
    """Yield the averages over the cells of what may be a map: (layout, tokens left out, average)."""
    if tensor.ndim == 4:
        if tensor[0, 0].numel() > 1:
            yield "channels first", 0, tensor.mean((2, 3))
        if tensor[0, ..., 0].numel() > 1:
            yield "channels last", 0, tensor.mean((1, 2))
    elif tensor.ndim == 3:
        for prefix in range(min(MOST_PREFIX_TOKENS + 1, tensor.shape[1] - 1)):
            try:
                grid_of(tensor.shape[1] - prefix, image)
            except ValueError:
                continue
            yield "tokens", prefix, tensor[:, prefix:].mean(1)


def _instead(calls: list[_Call], pooled: Tensor) -> str:
    """Say what goes into the last layer of a network without score maps, as far as the probe shows it."""
    for call in reversed(calls):
        for tensor in (call.output, call.input):
            if tensor.ndim == 3 and tensor.shape[1] > 1 and _same(tensor[:, 0], pooled):
                return " but a class token (timm's ViTs average with model.args `global_pool: avg`)"
            if tensor.ndim == 4 and tensor[0, 0].numel() > 1:
                if _same(tensor, pooled):
                    return f" but its cells one after the other ({tensor[0, 0].numel()} cells)"
                if _same(tensor.amax((2, 3)), pooled):
                    return " but its maximum"
    hidden = next((call.name for call in reversed(calls) if isinstance(call.module, nn.Linear)), None)
    return f" but comes from a hidden layer ({hidden!r})" if hidden else ""


def _same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same numbers up to rounding, whatever their shape."""
    if one.numel() != other.numel():
        return False
    one, other = one.flatten().double(), other.flatten().double()
    return bool((one - other).abs().max() <= 1e-4 * other.abs().max())
