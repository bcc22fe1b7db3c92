"""A step: what the network says of a batch, how that agrees with labels and memory, what to remember."""

# Shapes: B batch, L classes, G side of the score map, W side of the heatmap, k classes with a heatmap.

import torch
from accelerate import Accelerator
from torch import Tensor

from bigscl.config import Config
from bigscl.data.batch import Batch, normalize
from bigscl.method.heatmaps import blend, blend_scores, gather_classes, to_view
from bigscl.method.losses import LossInputs, predicted_count
from bigscl.method.objective import Loss
from bigscl.method.precision import probabilities
from bigscl.models.spatial import Prediction
from bigscl.processes.ranks import Ranks
from bigscl.store import HeatmapStore, Rows
from bigscl.training.run import Data
from bigscl.training.state import State, rng_state, set_rng_state
from bigscl.training.transfer import Memory, to_device


class Step:
    """Forward, loss and backward of a batch at a time, on one rank."""

    def __init__(
        self,
        config: Config,
        data: Data,
        state: State,
        store: HeatmapStore | None,
        accelerator: Accelerator,
        ranks: Ranks,
    ) -> None:
        self._config = config
        self._objective = config.objective
        self._positives_per_image = data.positives_per_image
        self._state = state
        self._store = store
        self._accelerator = accelerator
        self._ranks = ranks
        self._settled: torch.nn.Module | None = None

    def settle(self) -> None:
        """Let DDP arrange its buckets before the first real step of a phase, or after a resume.

        DDP packs gradients into buckets, and after its first backward packs them once more in the order in
        which they arrived. From three ranks on a sum depends on the packing, so that a resumed run, whose DDP
        is new, would differ in the last bits. The first backward is therefore one that changes nothing, and
        the same whatever the store's layout: every real step meets the final buckets.
        """
        if self._ranks.world_size == 1 or self._settled is self._state.model:
            return
        drawn = rng_state()
        # In eval mode also under SyncBatchNorm: with an empty batch on every rank, its means would be NaN.
        self._backward_of_nothing(1, training=False, maps=True)
        self._state.optimizer.zero_grad()
        set_rng_state(drawn)
        self._settled = self._state.model

    def __call__(
        self, batch: Batch, rows: Rows | None, *, count: int, gamma: float, rate: float
    ) -> tuple[Loss, dict[str, Tensor]]:
        """Add to the gradient of the mean loss over `count` samples of all ranks.

        Gives the loss, and the batch's rows of the memory after this look.
        """
        state, device = self._state, self._accelerator.device
        # DDP averages over ranks; the sum over samples is divided by their true number.
        scale = self._ranks.world_size / count
        batch = batch.to(device, non_blocking=True)
        memory = None if rows is None else to_device(rows, device)
        prediction = state.model(self._normalized(batch.images), maps=self._needs_maps)
        estimates = None if state.estimator is None else state.estimator.of(batch.ids, device)
        inputs = LossInputs(
            logits=prediction.logits,
            labels=batch.labels,
            maps=None if prediction.logit_map is None else probabilities(prediction.logit_map),
            scores=None if memory is None else memory.scores,
            target=self._target(batch, memory, prediction),
            classes=None if memory is None else memory.classes,
            expected=None if memory is None else state.selection.expected(memory.scores, batch.ids),
            positives_per_image=self._positives_per_image,
            mean_counts=self._mean_counts(prediction.logits, estimates, count),
            estimates=estimates,
        )
        loss = self._objective(inputs, gamma=gamma)
        self._accelerator.backward(loss.total.sum() * scale)
        if state.estimator is not None and estimates is not None:
            assert estimates.grad is not None
            state.estimator.step(batch.ids, estimates.grad / self._gradient_factor, rate)
        return loss, self._updates(batch, memory, inputs)

    def idle(self) -> None:
        """Take part in the others' step with nothing: the collectives match, no gradient, no statistics."""
        # SyncBatchNorm leaves an empty batch out of the statistics, but wants to hear of it from every rank.
        synced = self._config.hardware.sync_batchnorm
        self._backward_of_nothing(0 if synced else 1, training=synced, maps=self._needs_maps)

    def _backward_of_nothing(self, num_images: int, *, training: bool, maps: bool) -> None:
        side, device = self._config.data.size, self._accelerator.device
        self._state.model.train(training)
        prediction = self._state.model(torch.zeros(num_images, 3, side, side, device=device), maps=maps)
        if num_counts := self._objective.needs.num_mean_counts:
            self._accelerator.reduce(torch.zeros(num_counts, device=device), reduction="sum")
        used = prediction.logits if prediction.logit_map is None else prediction.logit_map
        self._accelerator.backward(used.sum() * 0.0)
        self._state.model.train()

    def _normalized(self, images: Tensor) -> Tensor:
        """The network's input, in the memory format of its weights."""
        pixels = normalize(images, self._config.data.mean, self._config.data.std)
        return pixels if self._config.hardware.channels_last else pixels.contiguous()

    def _target(self, batch: Batch, memory: Memory | None, prediction: Prediction) -> Tensor | None:
        """What the maps should agree with: the heatmaps through the view, [B,L or k,G,G]."""
        if memory is None or not self._objective.needs.heatmaps:
            return None
        assert prediction.logit_map is not None
        side = prediction.logit_map.shape[-1]
        if memory.heatmaps is None:
            # Only scores, until the top classes are chosen: a heatmap that has its score everywhere.
            return memory.scores.float()[:, :, None, None].expand(-1, -1, side, side)
        return to_view(memory.heatmaps, batch.views, side)

    @torch.no_grad()
    def _updates(self, batch: Batch, memory: Memory | None, inputs: LossInputs) -> dict[str, Tensor]:
        """The running averages after this look."""
        if memory is None:
            return {}
        momentum = self._config.store.momentum
        visits = memory.visits if self._config.store.ema == "debiased" else None
        pooled = inputs.logits.float().sigmoid()
        updates = {"scores": blend_scores(memory.scores, pooled, momentum, visits)}
        if memory.heatmaps is None:
            return updates
        assert inputs.maps is not None
        maps, views = inputs.maps, batch.views
        if memory.classes is not None:
            maps = gather_classes(maps, memory.classes)
        if memory.counts is None:
            updates["heatmaps"] = blend(memory.heatmaps, maps, views, momentum, erased=batch.erased)
        else:
            updates["heatmaps"], updates["counts"] = blend(
                memory.heatmaps, maps, views, momentum, erased=batch.erased, counts=memory.counts
            )
        return updates

    def _mean_counts(self, logits: Tensor, estimates: Tensor | None, count: int) -> tuple[Tensor, ...]:
        """Mean numbers of predicted positives over the global batch, where the objective needs them."""
        if not self._objective.needs.mean_counts:
            return ()
        counted = (logits,) if estimates is None else (logits, estimates)
        sums = torch.stack([predicted_count(each.detach()).sum() for each in counted])
        return tuple(self._accelerator.reduce(sums, reduction="sum") / count)

    @property
    def _gradient_factor(self) -> float:
        """How many times a gradient is that of the mean loss, before DDP and the scaler undo it."""
        scaler = self._accelerator.scaler
        return self._ranks.world_size * (1.0 if scaler is None else scaler.get_scale())

    @property
    def _needs_maps(self) -> bool:
        remembers = self._store is not None and self._store.group.layout != "scores"
        return remembers or self._objective.needs.heatmaps
