"""A classification network with a spatial head: its linear layer, applied before the pooling.

The network stays whole, with its own names. In evaluation it runs as its library wrote it; its state dict,
which checkpoints hold, loads into the plain network. In training its last feature map is tapped, and the
linear layer, as a 1x1 convolution, gives a score for every cell. Below: its average over steps, its batch
normalisation over ranks.
"""

# Shapes: B batch, C channels of the last feature map, L classes, G side of the score map.

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from bigscl.common.user_error import UserError
from bigscl.losses.cross_entropy import at_least_float32
from bigscl.models.families import FAMILIES, create_network
from bigscl.models.families.base import is_file, load_state, read_state
from bigscl.models.head import Head, Tap, find_head

logger = logging.getLogger(__name__)

TOLERANCE = 1e-5
"""Of logits, when layers are replaced by others that should compute the same."""
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.SyncBatchNorm)


class Prediction(NamedTuple):
    """The prediction of a batch, before the sigmoid."""

    logit_map: Tensor | None
    """[B,L,G,G], view frame; None if no map was requested."""
    logits: Tensor
    """[B,L], of the pooled prediction f: `sigmoid(logits)` is f."""


def build_model(
    backbone: str, num_classes: int, *, weights: str | None = None, args: Mapping[str, Any] | None = None
) -> "SpatialClassifier":
    """Build the network that `backbone` names, with its weights and a spatial head of `num_classes` classes.

    `backbone` is a name of torchvision (`resnet50`), of timm (`timm:resnet50`), or `package.module:callable`,
    called with `num_classes`; `args` are further keyword arguments. `weights` is a published name
    (`IMAGENET1K_V2`, `DEFAULT`) or a file (.pt, .pth, .safetensors). A head with another number of classes is
    freshly initialised; all else must fit.
    """
    network = create_network(backbone, num_classes, weights, args)
    head = find_head(network, backbone)
    if weights is not None and is_file(weights):
        load_state(network, read_state(weights), head.name, weights)
    linear = head.linear(network)
    if linear.out_features != num_classes:
        logger.info(
            "%s %s: head %s has %d classes, not %d: freshly initialised",
            *(backbone, weights or "", head.name, linear.out_features, num_classes),
        )
        fresh = nn.Linear(linear.in_features, num_classes, bias=linear.bias is not None)
        parent, _, name = head.name.rpartition(".")
        setattr(network.get_submodule(parent), name, fresh)
    return SpatialClassifier(network, head)


class SpatialClassifier(nn.Module):
    """`network` with a score for every class in every cell of its last feature map."""

    def __init__(self, network: nn.Module, head: Head) -> None:
        super().__init__()
        self.network = network
        self.head = head
        self._frozen_stages = 0
        self._backbone_frozen = False
        self._statistics_frozen = False
        self._tap = Tap()
        self._tap.attach(network.get_submodule(head.tapped), head.side)

    def forward(self, images: Tensor, maps: bool | None = None) -> Prediction:
        """Return the prediction of a batch, with its map if `maps` (default: in training only)."""
        logits = self.network(images)
        tapped = self._tap.take()
        if not (self.training if maps is None else maps):
            return Prediction(None, at_least_float32(logits))
        logit_map = self.head.logit_map(self.network, tapped, images, self.training)
        if self.training:
            logits = pool(logit_map)
        return Prediction(logit_map, at_least_float32(logits))

    def maps(self, images: Tensor) -> Tensor:
        """Return the logit map [B,L,G,G] of a batch, in either mode."""
        logit_map = self(images, maps=True).logit_map
        assert isinstance(logit_map, Tensor)
        return logit_map

    def check_side(self, side: int, setting: str) -> None:
        """Refuse square images of a side that the network does not take, as most transformers do."""
        taken = self.head.side_of_images
        if taken in (None, side):
            return
        image = torch.zeros(1, 3, side, side).to(next(self.network.parameters()))
        was_training = self.training
        try:
            with torch.no_grad():
                self.eval()(image)
        except Exception as error:
            raise UserError(
                f"{setting}: {side}, but the network takes images of {taken} x {taken}, not of that size "
                f"({error}). Choose {taken}, or another size of the network in model.args (timm: "
                f"`img_size: {side}`)."
            ) from None
        finally:
            self.train(was_training)

    def head_parameters(self) -> list[nn.Parameter]:
        return list(self.head.linear(self.network).parameters())

    def backbone_parameters(self) -> list[nn.Parameter]:
        head = {id(parameter) for parameter in self.head_parameters()}
        return [parameter for parameter in self.network.parameters() if id(parameter) not in head]

    @property
    def stages(self) -> list[list[nn.Module]]:
        """The backbone in consecutive stages, from the image up, as `freeze_stages` counts them."""
        return list(_stages(self.network, self.head.linear(self.network)))

    def freeze_backbone(self, frozen: bool = True) -> None:
        """Train the linear head only, with the backbone in eval mode and its backward skipped; or undo that.

        DistributedDataParallel records at its creation which parameters need gradients: freeze before you
        wrap a model, and wrap it again after a change.
        """
        self._backbone_frozen = frozen
        self._apply_freezing()

    def freeze_stages(self, count: int) -> None:
        """Keep the first `count` stages in eval mode; wrap for distributed training after this."""
        if not 0 <= count <= len(self.stages):
            raise UserError(f"freeze_stages: found {count}, this network has {len(self.stages)} stages")
        self._frozen_stages = count
        self._apply_freezing()

    def freeze_statistics(self, frozen: bool = True) -> None:
        """Let batch normalisation use its stored averages, also where its weights are trained; or undo that.

        The statistics of a pretrained network are better than those of a short training on small batches.
        """
        if frozen and not any(isinstance(module, BATCH_NORMS) for module in self.network.modules()):
            raise UserError("freeze_statistics: this network has no batch normalisation")
        self._statistics_frozen = frozen
        self.train(self.training)

    def _apply_freezing(self) -> None:
        # Images need no gradient, so autograd records nothing below the first parameter that does.
        for parameter in self.backbone_parameters():
            parameter.requires_grad_(not self._backbone_frozen)
        for module in self._frozen_modules():
            module.requires_grad_(False)
        self.train(self.training)

    def _frozen_modules(self) -> Iterator[nn.Module]:
        for stage in self.stages[: self._frozen_stages]:
            yield from stage

    def train(self, mode: bool = True) -> "SpatialClassifier":
        """Switch to training (or evaluation), except for what is frozen."""
        super().train(mode)
        if self._backbone_frozen:
            self.network.eval()
            if self.head.dropout is not None:
                self.network.get_submodule(self.head.dropout).train(mode)
        for module in self._frozen_modules():
            module.eval()
        if self._statistics_frozen:
            for module in self.network.modules():
                if isinstance(module, BATCH_NORMS):
                    module.eval()
        return self


def pool(logit_map: Tensor) -> Tensor:
    """Return the logits [B,L] of the pooled prediction, in at least float32."""
    return at_least_float32(logit_map).mean((2, 3))


class MapPooling(nn.Module):
    """A network that returns the logits [B,L] of map pooling: `bigscl.MapPooling(network)(images)`.

    Half the usual logit, half that of the hottest quarter of the cells: it finds small objects, which the
    mean over all cells hides. It needs no other training: a network is trained and exported with its usual
    pooling, and wrapped where the better ranking is worth the map. The network is one of
    `bigscl.build_model`, or the plain one of its library with exported weights.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        if not isinstance(network, SpatialClassifier):
            network = SpatialClassifier(network, find_head(network, type(network).__name__))
        self.classifier = network

    def forward(self, images: Tensor) -> Tensor:
        return map_pooled(self.classifier(images, maps=True))


def map_pooled(prediction: Prediction) -> Tensor:
    """Return [B,L]: half the logit, half that of the hottest quarter (rounded up) of each class's cells."""
    assert prediction.logit_map is not None, "map pooling needs the map"
    cells = at_least_float32(prediction.logit_map).flatten(2)
    # In order, so that their sum has the same last bits wherever the image is in its batch.
    hottest = cells.topk(num_hottest(cells.shape[2]), dim=2).values
    return 0.5 * prediction.logits + 0.5 * pool(hottest[..., None])


def num_hottest(num_cells: int) -> int:
    return -(-num_cells // 4)


def _stages(parent: nn.Module, head: nn.Module) -> Iterator[list[nn.Module]]:
    """Yield children with parameters, in order of definition: each block a stage, consecutive layers one.

    A child that holds nearly all layers (torchvision's `features`, timm's `blocks`) is divided further.
    """
    layers: list[nn.Module] = []
    total = _num_layers(parent)
    for child in parent.children():
        if child is head or not _num_layers(child):
            continue
        if not any(_num_layers(grandchild) for grandchild in child.children()):
            layers.append(child)
            continue
        if layers:
            yield layers
        layers = []
        if _num_layers(child) > 0.75 * total:
            yield from _stages(child, head)
        elif head not in child.modules():
            yield [child]
    if layers:
        yield layers


def _num_layers(module: nn.Module) -> int:
    return sum(1 for part in module.modules() if next(part.parameters(recurse=False), None) is not None)


# The average of the weights over the steps of a run


class WeightAverage(AveragedModel):
    """An exponential moving average of weights and buffers, whose update never waits for the GPU.

    Torch's own class reads its counter back from the device twice in each update.
    """

    def __init__(self, network: nn.Module, decay: float) -> None:
        super().__init__(network, use_buffers=True)
        self._decay = decay
        self._has_begun: bool | None = None
        """Whether anything was averaged; None until the counter is read, once."""

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **options: Any) -> Any:
        self._has_begun = None
        return super().load_state_dict(state_dict, *args, **options)

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        """Add the model's weights to the average; the first ones are the average."""
        if self._has_begun is None:
            self._has_begun = bool(self.n_averaged > 0)
        for averages, values in _by_kind(self.module, model):
            if not self._has_begun:
                torch._foreach_copy_(averages, values)
            elif averages[0].is_floating_point():
                torch._foreach_lerp_(averages, values, 1 - self._decay)
            else:
                for average, value in zip(averages, values, strict=True):
                    average.copy_(average * self._decay + value * (1 - self._decay))
        self._has_begun = True
        self.n_averaged += 1


def _by_kind(average: nn.Module, model: nn.Module) -> list[tuple[list[Tensor], list[Tensor]]]:
    """Return the tensors of both modules in pairs of lists, one pair for each type of number."""
    groups: defaultdict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = defaultdict(lambda: ([], []))
    for ours, theirs in zip(_tensors(average), _tensors(model), strict=True):
        averages, values = groups[ours.dtype]
        averages.append(ours)
        values.append(theirs)
    return list(groups.values())


def _tensors(module: nn.Module) -> list[Tensor]:
    return [each.detach() for each in (*module.parameters(), *module.buffers())]


# Batch normalisation over the batches of all ranks


def synchronize_batchnorm(network: nn.Module, size: int) -> None:
    """Replace the batch normalisation layers of a network by SyncBatchNorm, in place.

    Raises UserError if the network would compute something else then, as happens to layers of its own that
    are derived from batch normalisation and do more.
    """
    images = torch.rand(1, 3, size, size, device=next(network.parameters()).device)
    before = _evaluated(network, images)
    if not any(family.convert_sync_batchnorm(network) for family in FAMILIES.values()):
        nn.SyncBatchNorm.convert_sync_batchnorm(network)  # type: ignore[no-untyped-call]
    for module in network.modules():
        if isinstance(module, nn.SyncBatchNorm):
            module.register_forward_pre_hook(_in_float32_if_empty)
    after = _evaluated(network, images)
    if not torch.allclose(before, after, rtol=TOLERANCE, atol=TOLERANCE):
        raise UserError(
            f"hardware.sync_batchnorm: this network's logits change by up to "
            f"{(before - after).abs().max():.3g} when its layers are replaced by torch's SyncBatchNorm, so "
            f"some of them do more than normalise. Train it with sync_batchnorm: false."
        )


def _in_float32_if_empty(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Make a rank without images send statistics of the same type as the others.

    Under autocast its empty images are in half precision, and torch takes the type of the images then; of
    images that are there, the statistics are always in float32.
    """
    (images,) = inputs
    return (images if len(images) else images.float(),)


@torch.no_grad()
def _evaluated(network: nn.Module, images: Tensor) -> Tensor:
    modes = {module: module.training for module in network.modules()}
    prediction = network.eval()(images)
    for module, training in modes.items():
        module.training = training
    logits = getattr(prediction, "logits", prediction)
    assert isinstance(logits, Tensor)
    return logits
