"""The model of a run and all that trains with it: optimizer, phases, averaged weights, state of the loss."""

import logging
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn

from bigscl.config import Config
from bigscl.config.schedule import Schedule
from bigscl.distributed.ranks import Ranks
from bigscl.losses.objective import BASES
from bigscl.losses.state import LossState, RunFacts
from bigscl.models.spatial import SpatialClassifier, WeightAverage, build_model, synchronize_batchnorm
from bigscl.store import Annotations
from bigscl.training.checkpoint.checkpoint_folder import (
    Checkpoint,
    CheckpointError,
    Writer,
    check_optimizer,
    check_tensors,
    misfit,
    write_state,
    write_tensors,
)
from bigscl.training.optimizers import make_optimizer, set_learning_rate
from bigscl.training.run_folder import Data

logger = logging.getLogger(__name__)

WEIGHTS, OPTIMIZER, AVERAGE = "model.safetensors", "optimizer.pt", "average.pt"
"""Files of a checkpoint; what the loss keeps has a file of its own name."""


class ModelState:
    """Network, optimizer, average of the weights and what the loss keeps, of a run on one rank."""

    def __init__(self, config: Config, data: Data, accelerator: Accelerator, ranks: Ranks) -> None:
        self._config = config
        self._ranks = ranks
        self._schedule: Schedule = config.schedule
        self._phase_began: int | None = None
        self.accelerator = accelerator
        self.network = make_network(config, data.train.num_classes, accelerator.device, ranks.rank)
        self.model: nn.Module = self.network
        """The network as Accelerate wraps it for the phase."""
        self.optimizer: Any = None
        self.average = make_average(config, self.network)
        self.loss_state = make_loss_state(config, data.annotations, accelerator.device, ranks.rank)

    @property
    def evaluated(self) -> SpatialClassifier:
        """The network that is validated and kept: with averaged weights, if the run averages them."""
        if self.average is None:
            return self.network
        assert isinstance(self.average.module, SpatialClassifier)
        return self.average.module

    # Phases and steps

    def enter_phase(self, epoch: int, checkpoint: Checkpoint | None = None) -> None:
        """Freeze what the epoch's phase freezes, and start with a new optimizer or the saved one."""
        began = self._schedule.phase_start(epoch)
        if began == self._phase_began:
            return
        if self.optimizer is not None:
            # DDP noted which parameters train when it was made: remove it and wrap the network again.
            self.accelerator.unwrap_model(self.model, keep_fp32_wrapper=False)
            self.accelerator.free_memory()
            # On one process the network itself is marked as prepared: it would not get its precision again.
            self.network.__dict__.pop("_is_accelerate_prepared", None)
        warmup = self._schedule.is_warmup(epoch)
        self.network.freeze_stages(self._config.model.freeze_stages)
        self.network.freeze_statistics(self._config.model.freeze_statistics)
        self.network.freeze_backbone(warmup)
        parameters = [each for each in self.network.parameters() if each.requires_grad]
        optimizer = make_optimizer(self._config.optimizer, self.network)
        self.model, self.optimizer = self.accelerator.prepare(self.network, optimizer)
        self._phase_began = began
        if checkpoint is not None:
            self._restore_optimizer(checkpoint)
        count = sum(parameter.numel() for parameter in parameters)
        name = "warmup" if warmup else "main"
        logger.info("phase %s from epoch %d on: %s parameters train", name, began + 1, f"{count:,}")

    def begin_step(self, learning_rate: float) -> None:
        """Set the learning rate and clear the gradients."""
        set_learning_rate(self.optimizer.param_groups, learning_rate)
        self.optimizer.zero_grad()

    def end_step(self) -> None:
        """Clip the gradients, step the optimizer, and update the average of the weights."""
        if self._config.optimizer.clip is not None:
            self.accelerator.clip_grad_norm_(self.model.parameters(), self._config.optimizer.clip)
        self.optimizer.step()
        if self.average is not None:
            self.average.update_parameters(self.network)

    def share_loss_state(self, *, ends_epoch: bool) -> None:
        """Bring what the loss keeps to the same state on all ranks."""
        if self.loss_state is not None:
            self.loss_state.share(self._ranks, ends_epoch=ends_epoch)

    def share_buffers(self) -> None:
        """Give every rank the batch statistics of rank 0, which are saved, in the network that is validated.

        DDP does so before each step, but each rank averages the statistics that it has after the step.
        """
        if self._ranks.world_size > 1:
            for buffer in self.evaluated.buffers():
                torch.distributed.broadcast(buffer, 0)

    # Saving and restoring

    def files(self) -> dict[str, Writer]:
        """Return the writers of a checkpoint's files."""
        scaler = self.accelerator.scaler
        optimizer = {
            "phase_began": self._phase_began,
            "optimizer": self.optimizer.state_dict(),
            "scaler": None if scaler is None else scaler.state_dict(),
        }
        files = {WEIGHTS: write_tensors(self.network.network.state_dict()), OPTIMIZER: write_state(optimizer)}
        if self.average is not None:
            files[AVERAGE] = write_state(self.average.state_dict())
        if self.loss_state is not None:
            files[self.loss_state.file] = write_state(self.loss_state.state())
        return files

    def check(self, checkpoint: Checkpoint) -> None:
        """Read these files of a checkpoint; raise CheckpointError if one is damaged or does not fit."""
        weights = checkpoint.tensors(WEIGHTS)
        check_tensors(checkpoint.path / WEIGHTS, weights, self.network.network.state_dict())
        check_optimizer(checkpoint.path / OPTIMIZER, checkpoint.state(OPTIMIZER))
        if self.average is not None:
            average = checkpoint.state(AVERAGE)
            check_tensors(checkpoint.path / AVERAGE, average, self.average.state_dict())
        if self.loss_state is not None:
            file = self.loss_state.file
            check_tensors(checkpoint.path / file, checkpoint.state(file), self.loss_state.state())

    def restore(self, checkpoint: Checkpoint) -> None:
        """Load a checkpoint that was checked; `enter_phase` loads its optimizer."""
        self.network.network.load_state_dict(checkpoint.tensors(WEIGHTS))
        if self.average is not None:
            self.average.load_state_dict(checkpoint.state(AVERAGE))
        if self.loss_state is not None:
            self.loss_state.load(checkpoint.state(self.loss_state.file))

    def _restore_optimizer(self, checkpoint: Checkpoint) -> None:
        state = checkpoint.state(OPTIMIZER)
        if state["phase_began"] != self._phase_began:
            return  # the checkpoint is the end of the phase before
        saved = state["optimizer"]
        if reason := misfit(saved, self.optimizer.state_dict(), self.optimizer.param_groups):
            raise CheckpointError(
                f"{checkpoint.path / OPTIMIZER}: does not fit optimizer.name "
                f"{self._config.optimizer.name} and what trains in this phase: {reason}. Resume with "
                f"the settings it was saved with."
            )
        self.optimizer.load_state_dict(saved)
        if state["scaler"] is not None and self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(state["scaler"])


def make_network(config: Config, num_classes: int, device: torch.device, rank: int) -> SpatialClassifier:
    """Return the network with the same weights on every rank; later random numbers differ between ranks."""
    set_seed(config.seed)
    network = build_model(
        config.model.backbone, num_classes, weights=config.model.weights, args=config.model.args
    )
    network.check_side(config.data.eval_size or config.data.size, "data.eval_size")
    if config.hardware.sync_batchnorm:
        synchronize_batchnorm(network, config.data.size)
    network = network.to(device)
    if config.hardware.channels_last:
        network = network.to(memory_format=torch.channels_last)
    if config.hardware.compile:
        network.compile()
    set_seed(config.seed * 1009 + rank)
    return network


def make_average(config: Config, network: SpatialClassifier) -> WeightAverage | None:
    """Return an average of the weights over the steps, or None if the config sets no `weight_ema`."""
    return None if config.weight_ema is None else WeightAverage(network, config.weight_ema)


def make_loss_state(
    config: Config, annotations: Annotations, device: torch.device, rank: int
) -> LossState | None:
    """Return what the run's base loss keeps from step to step; None for most losses."""
    term = BASES[config.objective.base]
    if term.state is None:
        return None
    facts = RunFacts(
        settings=term.settings(config.objective),
        annotations=annotations,
        seed=config.seed,
        num_epochs=config.schedule.epochs,
        device=device,
        is_first=rank == 0,
    )
    return term.state(facts)


def map_side(network: SpatialClassifier, size: int) -> int:
    """Return G, the side of the network's score maps for images of this size."""
    network.check_side(size, "data.size")
    was_training = network.training
    parameter = next(network.parameters())
    with torch.no_grad():
        maps = network.eval().maps(torch.zeros(1, 3, size, size, device=parameter.device))
    network.train(was_training)
    return maps.shape[-1]
