"""Mixed images of a batch: what the network sees, what the losses are computed from, what the memory gets."""

# Shapes: B batch, L classes, S side of the images, G side of the score map.

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bigscl.config.mixing import Mixing, MixRow
from bigscl.data.loader import Batch
from bigscl.losses.cross_entropy import at_least_float32
from bigscl.losses.registry import PER_IMAGE, LossInputs, MixedInputs
from bigscl.memory.heatmaps import outside

SHARE = MixRow._fields.index("share")
BOX = slice(MixRow._fields.index("left"), None)


def mix_batches(
    batches: Iterable[Batch],
    mixing: Mixing,
    *,
    size: int,
    map_side: int,
    seed: int,
    epoch: int,
    pin_memory: bool,
) -> Iterator[Batch]:
    """Yield the batches with the mix of each image, and with the boxes that the memory leaves out."""

    def mixed(batch: Batch) -> Batch:
        rows = mixing.rows(batch.ids.tolist(), size=size, seed=seed, epoch=epoch)
        mix = Mix(rows=torch.from_numpy(rows))
        parts = [mix.rows, mix.hidden_boxes(map_side)]
        rows_B5, erased = [part.pin_memory() for part in parts] if pin_memory else parts
        return replace(batch, mix=rows_B5, erased=erased)

    # Here, not at the first batch: loader workers are started by the thread that asks for the iterator.
    iterator = iter(batches)
    return (mixed(batch) for batch in iterator)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Mix:
    """The mix of a batch."""

    rows: Tensor
    """float32 [B,5]: a `MixRow` of each image."""

    @property
    def share(self) -> Tensor:
        """Weight of the image's own labels, [B]."""
        return self.rows[:, SHARE]

    @property
    def is_blended(self) -> Tensor:
        """Which images have Mixup, bool [B]."""
        return (self.share < 1) & (self.rows[:, BOX] == 0).all(1)

    @property
    def neighbours(self) -> Tensor:
        """The place of each image's neighbour, [B]; the last one of an odd batch is its own."""
        count = len(self.rows)
        return (torch.arange(count, device=self.rows.device) ^ 1).clamp(max=count - 1)

    def pixels(self, images: Tensor) -> Tensor:
        """Return the mixed images [B,3,S,S]."""
        kept = outside(self.rows[:, BOX], images.shape[-1]).to(images.dtype)
        weight = torch.where(self.is_blended[:, None, None], self.share[:, None, None], kept)
        return torch.lerp(images[self.neighbours], images, weight[:, None])

    def visible(self, side: int) -> Tensor:
        """Return the cells of a map that show the image alone, bool [B,side,side]: none with Mixup."""
        return outside(self.rows[:, BOX], side) & ~self.is_blended[:, None, None]

    def hidden_boxes(self, map_side: int) -> Tensor:
        """Return the boxes [B,4] that the memory leaves out: the whole view if no cell is visible."""
        is_hidden = ~self.visible(map_side).any((1, 2))
        whole = self.rows.new_tensor([0.0, 0.0, 1.0, 1.0])
        return torch.where(is_hidden[:, None], whole, self.rows[:, BOX])

    def visible_logits(self, logits: Tensor, logit_map: Tensor) -> Tensor:
        """Return logits [B,L] pooled over the visible cells; those of images with all or none are kept."""
        cells = self.visible(logit_map.shape[-1])[:, None]
        count = cells.sum((2, 3))
        pooled = (at_least_float32(logit_map) * cells).sum((2, 3)) / count.clamp(min=1)
        return torch.where((count > 0) & (count < cells[0].numel()), pooled, logits)

    def inputs(self, inputs: LossInputs, visible_logits: Tensor, map_side: int) -> MixedInputs:
        """Return what the losses of mixed images are computed from."""
        values = {name: getattr(inputs, name) for name in PER_IMAGE}
        neighbours = {name: value[self.neighbours] for name, value in values.items() if value is not None}
        cells, maps = self.visible(map_side), {}
        if inputs.maps is not None and inputs.target is not None:
            # Zero in both: they agree there.
            maps = {name: getattr(inputs, name) * cells[:, None] for name in ("maps", "target")}
        return MixedInputs(
            share=self.share,
            neighbours=replace(inputs, **neighbours),
            visible=replace(inputs, logits=visible_logits, **maps),
            is_visible=cells.any((1, 2)),
        )
