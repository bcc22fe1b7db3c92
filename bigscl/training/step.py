"""A step: the prediction of a batch, its loss against labels and memory, and the gradient."""

# Shapes: B batch, L classes, G side of the score map, W side of the heatmap, k classes with a heatmap.

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bigscl.config import Config
from bigscl.data.loader import Batch, normalize
from bigscl.distributed.ranks import Ranks
from bigscl.losses.inputs import LossInputs
from bigscl.losses.losses import predicted_count
from bigscl.losses.objective import Loss
from bigscl.losses.precision import probabilities
from bigscl.losses.pseudo_labels import competing_logits, large_rate, num_large
from bigscl.memory.lookup import MemoryBatch, updated_scores
from bigscl.training.loss_state import TrainedBatch
from bigscl.training.model_state import ModelState
from bigscl.training.run_folder import AnyMemory, Data
from bigscl.training.run_progress import rng_state, set_rng_state


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Predicted:
    """What the memory learns of a batch, on the device."""

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
        prediction = state.model(self._normalized(images), maps=self._needs_maps)
        maps = None if prediction.logit_map is None else probabilities(prediction.logit_map)
        # What a loss keeps may be on the host: it takes the ids that are there.
        kept: Any = {} if state.loss_state is None else state.loss_state.inputs(batch.ids, self.epoch, device)
        inputs = replace(
            self._inputs(stored, prediction.logits, labels, maps),
            positives_per_image=self._positives_per_image,
            epoch=self.epoch,
            progress=self.epoch / self._config.schedule.epochs,
            **kept,
        )
        inputs = self._with_statistics(inputs, count)
        loss = self._objective(inputs, gamma=gamma)
        self._accelerator.backward(loss.total.sum() * scale)
        if state.loss_state is not None:
            state.loss_state.learn(self._trained(batch, stored, inputs, rate))
        return loss, Predicted(logits=prediction.logits, maps=maps)

    def _trained(
        self, batch: Batch, stored: MemoryBatch | None, inputs: LossInputs, rate: float
    ) -> TrainedBatch:
        needs, scores = self._objective.needs, None
        if stored is not None and needs.cuts:
            scores = updated_scores(stored, inputs.logits, self._config.store)
        # The scaler of fp16 would make the host wait for its factor.
        factor = self._gradient_factor if needs.estimates else 1.0
        return TrainedBatch(ids=batch.ids, inputs=inputs, scores=scores, rate=rate, gradient_factor=factor)

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
        self._join_statistics(count)
        used = prediction.logits if prediction.logit_map is None else prediction.logit_map
        self._accelerator.backward(used.sum() * 0.0)
        self._state.model.train()

    def _normalized(self, images: Tensor) -> Tensor:
        """Return the network's input, in the memory format of its weights."""
        pixels = normalize(images, self._config.data.mean, self._config.data.std)
        return pixels if self._config.hardware.channels_last else pixels.contiguous()

    def _inputs(
        self, stored: MemoryBatch | None, logits: Tensor, labels: Tensor, maps: Tensor | None
    ) -> LossInputs:
        """Return what the losses are computed from, with what is remembered of the batch."""
        if stored is None:
            return LossInputs(logits=logits, labels=labels)
        needs = self._objective.needs
        return stored.inputs(logits, labels, maps if needs.heatmaps else None, corrected=needs.counts)

    # Statistics of the global batch

    def _with_statistics(self, inputs: LossInputs, count: int) -> LossInputs:
        """Add what the objective needs to know of the batches of all ranks, `count` samples."""
        return replace(
            inputs,
            mean_counts=self._mean_counts(inputs.logits, inputs.estimates, count),
            class_means=self._class_means(inputs.logits, count),
            threshold=self._threshold(inputs, count),
        )

    def _join_statistics(self, count: int) -> None:
        """Exchange with the other ranks as `_with_statistics` does, for a batch of no samples."""
        device = self._accelerator.device
        if num_counts := self._objective.needs.num_mean_counts:
            self._accelerator.reduce(torch.zeros(num_counts, device=device), reduction="sum")
        self._class_means(torch.zeros(0, self._num_classes, device=device), count)
        self._threshold(None, count)

    def _mean_counts(self, logits: Tensor, estimates: Tensor | None, count: int) -> tuple[Tensor, ...]:
        """Return mean numbers of predicted positives over the global batch, if the objective needs them."""
        if not self._objective.needs.mean_counts:
            return ()
        counted = (logits,) if estimates is None else (logits, estimates)
        sums = torch.stack([predicted_count(each.detach()).sum() for each in counted])
        return tuple(self._accelerator.reduce(sums, reduction="sum") / count)

    def _class_means(self, logits: Tensor, count: int) -> Tensor | None:
        """Return the mean prediction of each class over the global batch [L], if the objective needs it."""
        if not self._objective.needs.class_means:
            return None
        sums: Tensor = self._accelerator.reduce(probabilities(logits.detach()).sum(0), reduction="sum")
        return sums / max(count, 1)

    def _threshold(self, inputs: LossInputs | None, count: int) -> Tensor | None:
        """Return the logit from which on losses are large in the global batch, if ranks must agree on it.

        Each rank sends its largest logits, at most as many as there can be large ones: at the rates in use
        a few per cent of a batch's logits.
        """
        if not self._objective.needs.threshold or self._ranks.world_size == 1:
            return None
        num = num_large(count * self._num_classes, large_rate(self._objective, self.epoch))
        if num == 0:
            return None
        # A batch may have one sample more than the others, see `batch_lengths`.
        size = min(num, (self._config.data.batch_size + 1) * self._num_classes)
        largest = torch.full((size,), -math.inf, device=self._accelerator.device)
        if inputs is not None:
            found = competing_logits(inputs.logits, inputs.labels, inputs.corrections).flatten()
            found = found.topk(min(size, len(found))).values
            largest[: len(found)] = found
        gathered: Tensor = self._accelerator.gather(largest)
        return gathered.topk(num).values[-1]

    @property
    def _gradient_factor(self) -> float:
        """The factor in a gradient that DDP and the scaler divide out."""
        scaler = self._accelerator.scaler
        return self._ranks.world_size * (1.0 if scaler is None else scaler.get_scale())

    @property
    def _needs_maps(self) -> bool:
        return self._memory.keeps_heatmaps or self._objective.needs.heatmaps
