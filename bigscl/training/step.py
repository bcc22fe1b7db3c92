"""A step: the prediction of a batch, its loss against labels and memory, and the gradient."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bigscl.config import Config
from bigscl.data.augmentation import Mixing, MixRow
from bigscl.data.loader import Batch, normalize
from bigscl.distributed.ranks import Ranks
from bigscl.losses.cross_entropy import at_least_float32, probabilities
from bigscl.losses.objective import Loss
from bigscl.losses.registry import PER_IMAGE, GlobalBatch, LossInputs, MixedInputs
from bigscl.losses.state import TrainedBatch
from bigscl.memory.epoch_io import copy_to_host
from bigscl.memory.heatmaps import outside
from bigscl.memory.lookup import MemoryBatch, updated_scores
from bigscl.models.spatial import Prediction
from bigscl.training.model_state import ModelState
from bigscl.training.run_folder import Data
from bigscl.training.run_memory import AnyMemory
from bigscl.training.run_progress import rng_state, set_rng_state

# Shapes: B batch, L classes, S side of the images, G side of the score map, W side of the heatmap, k classes
# with a heatmap.

# Mixed images: what the network sees, what the losses are computed from, what the memory gets

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


# The step


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Predicted:
    """New values of a batch for the memory, on the device."""

    logits: Tensor
    """[B,L]"""
    maps: Tensor | None
    """[B,L,G,G], probabilities; None if only scores are kept."""


class Step:
    """Computes prediction, loss and gradient of one batch at a time, on one rank."""

    def __init__(
        self, config: Config, data: Data, state: ModelState, memory: AnyMemory, ranks: Ranks
    ) -> None:
        self._config = config
        self._objective = config.objective
        self._positives_per_image = data.positives_per_image
        self._num_classes = data.annotations.num_classes
        self._state = state
        self._memory = memory
        self._accelerator = state.accelerator
        self._ranks = ranks
        self._prepared: torch.nn.Module | None = None
        self.epoch = 0
        """The epoch that is being trained, from 0: some losses change with it."""

    def prepare_buckets(self) -> None:
        """Let DDP arrange its buckets before the first real step of a phase, or after a resume.

        DDP packs gradients into buckets, and after its first backward packs them once more in the order in
        which they arrived. From three ranks on a sum depends on the packing, so that a resumed run, whose DDP
        is new, would differ in the last bits. The first backward is therefore one that changes nothing, and
        the same for every layout of the store: every real step uses the final buckets.
        """
        if self._ranks.world_size == 1 or self._prepared is self._state.model:
            return
        drawn = rng_state()
        # In eval mode also under SyncBatchNorm: with an empty batch on every rank, its means would be NaN.
        self._zero_gradient_step(1, training=False, maps=True, count=0)
        self._state.optimizer.zero_grad()
        set_rng_state(drawn)
        self._prepared = self._state.model

    def __call__(
        self, batch: Batch, stored: MemoryBatch | None, *, count: int, gamma: float, rate: float
    ) -> tuple[Loss, Predicted]:
        """Add a batch to the gradient of the mean loss over `count` samples of all ranks.

        Returns the losses of its samples, and the prediction for the memory.
        """
        state, device = self._state, self._accelerator.device
        # DDP averages over ranks; the sum over samples is divided by their true number.
        scale = self._ranks.world_size / count
        images = batch.images.to(device, non_blocking=True)
        labels = batch.labels.to(device, non_blocking=True)
        mix = None if batch.mix is None else Mix(rows=batch.mix.to(device, non_blocking=True))
        prediction = state.model(self._pixels(images, mix), maps=self._needs_maps)
        maps = None if prediction.logit_map is None else probabilities(prediction.logit_map)
        # What a loss keeps may be on the host: it takes the ids that are there.
        kept: Any = {} if state.loss_state is None else state.loss_state.inputs(batch.ids, self.epoch, device)
        inputs = replace(
            self._inputs(stored, prediction.logits, labels, maps),
            positives_per_image=self._positives_per_image,
            epoch=self.epoch,
            progress=self.epoch / self._config.schedule.epochs,
            logit_map=prediction.logit_map,
            **kept,
        )
        inputs = replace(inputs, **self._statistics(inputs, count))
        logits = prediction.logits
        if mix is None:
            loss = self._objective(inputs, gamma=gamma)
        else:
            logits, mixed = self._mixed(mix, inputs, prediction)
            loss = self._objective.of_mixed(inputs, mixed, gamma=gamma)
        self._accelerator.backward(loss.total.sum() * scale)
        if state.loss_state is not None:
            state.loss_state.update(self._trained(batch, stored, inputs, rate))
        return loss, Predicted(logits=logits, maps=maps)

    def _mixed(self, mix: Mix, inputs: LossInputs, prediction: Prediction) -> tuple[Tensor, MixedInputs]:
        """Return the logits of what shows each image alone, for the memory; and what the losses are from."""
        if prediction.logit_map is None:
            # Nothing is remembered.
            return prediction.logits, mix.inputs(inputs, prediction.logits, 1)
        logits = mix.visible_logits(prediction.logits, prediction.logit_map)
        return logits, mix.inputs(inputs, logits, prediction.logit_map.shape[-1])

    def _trained(
        self, batch: Batch, stored: MemoryBatch | None, inputs: LossInputs, rate: float
    ) -> TrainedBatch:
        def scores() -> Tensor:
            assert stored is not None, "this loss needs a memory"
            return updated_scores(stored, inputs.logits, self._config.store)

        return TrainedBatch(
            ids=batch.ids,
            inputs=inputs,
            rate=rate,
            updated_scores=scores,
            gradient_factor=self._gradient_factor,
            copy_to_host=copy_to_host,
        )

    def idle(self, count: int) -> None:
        """Join the other ranks' collectives with zero gradient, and without changing batch statistics.

        `count` is the number of samples of all ranks.
        """
        # SyncBatchNorm leaves an empty batch out of the statistics, but needs it from every rank.
        synced = self._config.hardware.sync_batchnorm
        self._zero_gradient_step(0 if synced else 1, training=synced, maps=self._needs_maps, count=count)

    def _zero_gradient_step(self, num_images: int, *, training: bool, maps: bool, count: int) -> None:
        side, device = self._config.data.size, self._accelerator.device
        self._state.model.train(training)
        prediction = self._state.model(torch.zeros(num_images, 3, side, side, device=device), maps=maps)
        self._statistics(None, count)
        used = prediction.logits if prediction.logit_map is None else prediction.logit_map
        self._accelerator.backward(used.sum() * 0.0)
        self._state.model.train()

    def _pixels(self, images: Tensor, mix: Mix | None) -> Tensor:
        """Return the network's input, in the memory format of its weights."""
        pixels = normalize(images, self._config.data.mean, self._config.data.std)
        if mix is not None:
            pixels = mix.pixels(pixels).contiguous(memory_format=torch.channels_last)
        return pixels if self._config.hardware.channels_last else pixels.contiguous()

    def _inputs(
        self, stored: MemoryBatch | None, logits: Tensor, labels: Tensor, maps: Tensor | None
    ) -> LossInputs:
        """Return what the losses are computed from, with what is remembered of the batch."""
        if stored is None:
            return LossInputs(logits=logits, labels=labels)
        needs = self._objective.needs
        maps = maps if "maps" in needs else None
        return stored.inputs(logits, labels, maps, corrected="weight" in needs)

    def _statistics(self, inputs: LossInputs | None, count: int) -> dict[str, Any]:
        """Return what the losses need of the batches of all ranks, `count` samples; None: none here."""
        batch = GlobalBatch(
            num_samples=count,
            num_classes=self._num_classes,
            # A batch may have one sample more than the others, see `batch_lengths`.
            most_per_rank=self._config.data.batch_size + 1,
            world_size=self._ranks.world_size,
            epoch=self.epoch,
            device=self._accelerator.device,
            sum=partial(self._accelerator.reduce, reduction="sum"),
            gather=self._accelerator.gather,
        )
        statistics: dict[str, Any] = {}
        for term in self._objective.terms:
            if term.statistics is not None:
                statistics |= term.statistics(inputs, batch, term.settings(self._objective))
        return statistics

    def _gradient_factor(self) -> float:
        """Return the factor in a gradient that DDP and the scaler divide out."""
        scaler = self._accelerator.scaler
        return self._ranks.world_size * (1.0 if scaler is None else scaler.get_scale())

    @property
    def _needs_maps(self) -> bool:
        # Of an image with CutMix the memory gets the scores of the cells that show it.
        mixes = self._config.data.mix is not None and self._config.store.kind != "none"
        return mixes or self._memory.keeps_heatmaps or bool({"maps", "logit_map"} & self._objective.needs)
