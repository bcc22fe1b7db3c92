"""The model of a run and all that trains with it: optimizer, phases, averaged weights, state of the loss."""

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor, nn

from bigscl.common.user_error import UserError
from bigscl.config import Config
from bigscl.config.schedule import Schedule
from bigscl.config.schema import OptimizerConfig
from bigscl.distributed.ranks import Ranks
from bigscl.losses.objective import BASES
from bigscl.losses.state import LossState, RunFacts
from bigscl.models.spatial import SpatialClassifier, WeightAverage, build_model, synchronize_batchnorm
from bigscl.store import Annotations
from bigscl.training.checkpoint_folder import (
    Checkpoint,
    CheckpointError,
    Writer,
    check_optimizer,
    check_tensors,
    misfit,
    write_state,
    write_tensors,
)
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


# The optimizer of a run: its algorithm, and the parameters by weight decay and by depth

RATE_FACTOR = "rate_factor"
"""Name of a group's factor of the learning rate; groups without one have 1."""


def make_optimizer(settings: OptimizerConfig, network: SpatialClassifier) -> torch.optim.Optimizer:
    """Return the optimizer of what trains in a network; its learning rate is set before every step."""
    groups = parameter_groups(settings, network)
    decay = settings.weight_decay
    # Left out by default, so that torch chooses.
    fused: dict[str, Any] = {"fused": True} if settings.fused else {}
    if settings.fused and (device := next(network.parameters()).device).type != "cuda":
        raise UserError(f"optimizer.fused: needs a GPU, this run is on {device.type}. Set it to false.")
    match settings.name:
        case "adam":
            return torch.optim.Adam(groups, weight_decay=decay, **fused)
        case "adamw":
            return torch.optim.AdamW(groups, weight_decay=decay, **fused)
        case "lamb":
            return Lamb(groups, weight_decay=decay)
        case "sgd":
            return torch.optim.SGD(groups, lr=1.0, momentum=settings.momentum, weight_decay=decay)


def set_learning_rate(groups: Sequence[dict[str, Any]], rate: float) -> None:
    """Set the learning rate of every group, lower for those nearer to the image if layers decay."""
    for group in groups:
        group["lr"] = rate * group.get(RATE_FACTOR, 1.0)


def parameter_groups(settings: OptimizerConfig, network: SpatialClassifier) -> list[dict[str, Any]]:
    """Return the parameters that train, in groups of one weight decay and one factor of the learning rate."""
    groups: dict[tuple[float, bool], list[nn.Parameter]] = {}
    factors = _factors(network, settings.layer_decay)
    for parameter in network.parameters():
        if parameter.requires_grad:
            decays = settings.decay_norms_and_biases or parameter.ndim > 1
            groups.setdefault((factors.get(id(parameter), 1.0), decays), []).append(parameter)
    return [
        {
            "params": parameters,
            **({} if decays else {"weight_decay": 0.0}),
            **({} if settings.layer_decay is None else {RATE_FACTOR: factor}),
        }
        for (factor, decays), parameters in groups.items()
    ]


def _factors(network: SpatialClassifier, decay: float | None) -> dict[int, float]:
    """Return the factor of each parameter by its id: `decay` for each stage between it and the output."""
    if decay is None:
        return {}
    stages = network.stages
    # Parameters of no stage, such as the position embedding of a transformer, act on the image.
    factors = {id(parameter): decay ** len(stages) for parameter in network.backbone_parameters()}
    for number, stage in enumerate(stages):
        for parameter in (each for module in stage for each in module.parameters()):
            factors[id(parameter)] = decay ** (len(stages) - number)
    return factors


class Lamb(torch.optim.Optimizer):
    """LAMB (You et al. 2020): Adam, with each tensor's update as long as the tensor, times the rate.

    As timm has it: with bias correction, and plain Adam for groups without weight decay. The gradient is not
    clipped here, `optimizer.clip: 1.0` does what timm's default does.
    """

    def __init__(
        self,
        parameters: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have a gradient; return what the closure returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            if parameters := [each for each in group["params"] if each.grad is not None]:
                self._update(group, parameters)
        return loss

    def _update(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        """Update tensors of a group together: each call is one kernel on GPUs, or few."""
        gradients = [each.grad for each in parameters if each.grad is not None]
        means, squares = zip(*self._averages(parameters), strict=True)
        (beta1, beta2), step, decay = group["betas"], group["step"], group["weight_decay"]
        torch._foreach_lerp_(means, gradients, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
        divisors = torch._foreach_sqrt(squares)
        torch._foreach_div_(divisors, (1 - beta2**step) ** 0.5)
        torch._foreach_add_(divisors, group["eps"])
        updates = torch._foreach_div(means, 1 - beta1**step)
        torch._foreach_div_(updates, divisors)
        if decay:
            torch._foreach_add_(updates, parameters, alpha=decay)
            lengths = torch.stack(torch._foreach_norm(parameters))
            ratios = lengths / torch.stack(torch._foreach_norm(updates))
            # A tensor of zeros, or an update of zeros, has no length to go by.
            ratios = torch.where((lengths > 0) & ratios.isfinite(), ratios, 1.0)
            torch._foreach_mul_(updates, ratios.unbind())
        torch._foreach_add_(parameters, updates, alpha=-group["lr"])

    def _averages(self, parameters: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the running averages of each tensor's gradient and of its square."""
        for parameter in parameters:
            state = self.state[parameter]
            if not state:
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
            yield state["exp_avg"], state["exp_avg_sq"]
