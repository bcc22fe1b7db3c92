"""Everything that changes while a run trains, how it is saved, and how a run takes it up again."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from bigscl.config import Config
from bigscl.data.batch import Batch
from bigscl.method.estimator import LabelEstimator
from bigscl.method.schedule import Schedule
from bigscl.method.selection import Selection
from bigscl.models.spatial import SpatialClassifier, build_model
from bigscl.models.sync_batchnorm import synchronize_batchnorm
from bigscl.processes.ranks import Ranks
from bigscl.training.checkpoint import Checkpoint, CheckpointError, Progress, write_state, write_tensors
from bigscl.training.checkpoint_contents import check_optimizer, check_ranks, check_tensors, misfit
from bigscl.training.run import Data

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Memory:
    """What the store's snapshot of a checkpoint adds to it."""

    selection: Selection
    skipped: list[int]
    """Samples of the epoch at hand that could not be read."""
    visited: NDArray[np.bool_]
    """Rows that the epoch at hand has had."""


class State:
    """Weights, optimizer, averages, selection, and where the run stands."""

    def __init__(self, config: Config, data: Data, accelerator: Accelerator, ranks: Ranks) -> None:
        self._config = config
        self._accelerator = accelerator
        self._ranks = ranks
        self._schedule: Schedule = config.schedule
        self.progress = Progress()
        self.network = make_network(config, data.train.num_classes, accelerator.device, ranks.rank)
        self.model: nn.Module = self.network
        """The network as Accelerate wraps it for the phase."""
        self.optimizer: Any = None
        self.average = make_average(config, self.network)
        self.estimator = None
        if config.objective.needs.estimates:
            self.estimator = LabelEstimator(data.annotations, config.seed)
        self.selection = Selection.none(data.train.num_classes).to(accelerator.device)
        self.visited: NDArray[np.bool_] = np.zeros(len(data.train.keys), bool)
        """Rows that the epoch at hand has had: on this rank, or before the run was resumed."""
        self.skipped: list[int] = []
        """Those among them that could not be read."""
        self._phase_began: int | None = None

    @property
    def evaluated(self) -> SpatialClassifier:
        """The network that is validated and kept: the average of the weights, if there is one."""
        if self.average is None:
            return self.network
        assert isinstance(self.average.module, SpatialClassifier)
        return self.average.module

    def advance(self, **changes: Any) -> None:
        """Move on to where the run stands now."""
        self.progress = replace(self.progress, **changes)

    def note(self, batch: Batch) -> None:
        """The epoch has had these samples."""
        skipped = batch.skipped.cpu().numpy()
        self.visited[batch.ids.cpu().numpy()] = True
        self.visited[skipped] = True
        self.skipped += skipped.tolist()

    def forget_epoch(self) -> None:
        """A new epoch has had nothing yet."""
        self.visited[:] = False
        self.skipped.clear()

    def enter_phase(self, epoch: int, checkpoint: Checkpoint | None = None) -> None:
        """Freeze or free the backbone as the epoch's phase wants, with a new optimizer or the saved one."""
        began = self._schedule.phase_start(epoch)
        if began == self._phase_began:
            return
        if self.optimizer is not None:
            # DDP noted which parameters train when it was made: it is taken off and made anew.
            self._accelerator.unwrap_model(self.model, keep_fp32_wrapper=False)
            self._accelerator.free_memory()
        warmup = self._schedule.is_warmup(epoch)
        self.network.freeze_stages(self._config.model.freeze_stages)
        self.network.freeze_statistics(self._config.model.freeze_statistics)
        self.network.freeze_backbone(warmup)
        parameters = [each for each in self.network.parameters() if each.requires_grad]
        optimizer = make_optimizer(self._config, parameters)
        self.model, self.optimizer = self._accelerator.prepare(self.network, optimizer)
        self._phase_began = began
        if checkpoint is not None:
            self._restore_optimizer(checkpoint)
        count = sum(parameter.numel() for parameter in parameters)
        name = "warmup" if warmup else "main"
        logger.info("phase %s from epoch %d on: %s parameters train", name, began + 1, f"{count:,}")

    def files(self) -> dict[str, Callable[[Path], object]] | None:
        """Writers of a checkpoint's files on rank 0, None elsewhere. All ranks call it together."""
        rngs = self._ranks.gather(rng_state())
        visited = self._ranks.gather(np.packbits(self.visited).tobytes())
        if rngs is None or visited is None:
            return None
        seen = np.bitwise_or.reduce([np.frombuffer(each, np.uint8) for each in visited])
        scaler = self._accelerator.scaler
        optimizer = {
            "phase_began": self._phase_began,
            "optimizer": self.optimizer.state_dict(),
            "scaler": None if scaler is None else scaler.state_dict(),
        }
        files = {
            "model.safetensors": write_tensors(self.network.network.state_dict()),
            "optimizer.pt": write_state(optimizer),
            "ranks.pt": write_state({"rng": rngs, "visited": torch.from_numpy(seen)}),
        }
        if self.average is not None:
            files["average.pt"] = write_state(self.average.state_dict())
        if self.estimator is not None:
            files["estimator.pt"] = write_state(self.estimator.state())
        return files

    def check(self, checkpoint: Checkpoint) -> None:
        """Read every file of a checkpoint, or raise CheckpointError if one is damaged or does not fit."""
        weights = checkpoint.tensors("model.safetensors")
        check_tensors(checkpoint.path / "model.safetensors", weights, self.network.network.state_dict())
        check_optimizer(checkpoint.path / "optimizer.pt", checkpoint.state("optimizer.pt"))
        check_ranks(checkpoint.path / "ranks.pt", checkpoint.state("ranks.pt"), len(self.visited))
        if self.average is not None:
            average = checkpoint.state("average.pt")
            check_tensors(checkpoint.path / "average.pt", average, self.average.state_dict())
        if self.estimator is not None:
            estimator = checkpoint.state("estimator.pt")
            check_tensors(checkpoint.path / "estimator.pt", estimator, self.estimator.state())

    def restore(self, checkpoint: Checkpoint, memory: Memory | None) -> None:
        """Load a checkpoint that was checked, and the memory of its snapshot."""
        self.progress = checkpoint.progress
        self.network.network.load_state_dict(checkpoint.tensors("model.safetensors"))
        ranks = checkpoint.state("ranks.pt")
        if memory is None:
            packed = ranks["visited"].numpy()
            self.visited = np.unpackbits(packed, count=len(self.visited)).astype(bool)
        else:
            self.selection = memory.selection.to(self._accelerator.device)
            self.skipped, self.visited = memory.skipped, memory.visited
        if self.average is not None:
            self.average.load_state_dict(checkpoint.state("average.pt"))
        if self.estimator is not None:
            self.estimator.load(checkpoint.state("estimator.pt"))
        if self._ranks.rank < len(ranks["rng"]):
            set_rng_state(ranks["rng"][self._ranks.rank])

    def _restore_optimizer(self, checkpoint: Checkpoint) -> None:
        state = checkpoint.state("optimizer.pt")
        if state["phase_began"] != self._phase_began:
            return  # the checkpoint is the end of the phase before
        saved = state["optimizer"]
        if reason := misfit(saved, self.optimizer.state_dict(), self.optimizer.param_groups):
            raise CheckpointError(
                f"{checkpoint.path / 'optimizer.pt'}: does not fit optimizer.name "
                f"{self._config.optimizer.name} and what trains in this phase: {reason}. Resume with "
                f"the settings it was saved with."
            )
        self.optimizer.load_state_dict(saved)
        if state["scaler"] is not None and self._accelerator.scaler is not None:
            self._accelerator.scaler.load_state_dict(state["scaler"])

    def share_buffers(self) -> None:
        """Rank 0's batch statistics on every rank, as DDP gives them out before each step."""
        if self._ranks.world_size > 1:
            for buffer in self.network.buffers():
                torch.distributed.broadcast(buffer, 0)


def make_network(config: Config, num_classes: int, device: torch.device, rank: int) -> SpatialClassifier:
    """The network with the same weights on every rank; what it draws after that is each rank's own."""
    set_seed(config.seed)
    network = build_model(
        config.model.backbone, num_classes, weights=config.model.weights, pooling=config.model.pooling
    )
    if config.hardware.sync_batchnorm:
        synchronize_batchnorm(network, config.data.size)
    network = network.to(device)
    if config.hardware.channels_last:
        network = network.to(memory_format=torch.channels_last)
    if config.hardware.compile:
        network.compile()
    set_seed(config.seed * 1009 + rank)
    return network


def make_average(config: Config, network: SpatialClassifier) -> AveragedModel | None:
    """An average of the weights over the steps, if the config wants one."""
    if config.weight_ema is None:
        return None
    average = get_ema_multi_avg_fn(config.weight_ema)  # type: ignore[no-untyped-call]
    return AveragedModel(network, multi_avg_fn=average, use_buffers=True)


def make_optimizer(config: Config, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer that the config names; its learning rate is set before every step."""
    settings = config.optimizer
    decay = settings.weight_decay
    match settings.name:
        case "adam":
            return torch.optim.Adam(parameters, weight_decay=decay)
        case "adamw":
            return torch.optim.AdamW(parameters, weight_decay=decay)
        case "sgd":
            return torch.optim.SGD(parameters, lr=1.0, momentum=settings.momentum, weight_decay=decay)


def map_side(network: SpatialClassifier, size: int) -> int:
    """G: the side of the score maps that the network gives for images of this size."""
    was_training = network.training
    parameter = next(network.parameters())
    with torch.no_grad():
        maps = network.eval().maps(torch.zeros(1, 3, size, size, device=parameter.device))
    network.train(was_training)
    return maps.shape[-1]


def rng_state() -> bytes:
    """The state of torch's generators on this rank: what dropout draws next."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_available():
        states.append(torch.cuda.get_rng_state())
    return b"".join(len(state).to_bytes(8, "little") + state.numpy().tobytes() for state in states)


def set_rng_state(packed: bytes) -> None:
    """Undo `rng_state`."""
    states: list[Tensor] = []
    while packed:
        length = int.from_bytes(packed[:8], "little")
        states.append(torch.frombuffer(bytearray(packed[8 : 8 + length]), dtype=torch.uint8))
        packed = packed[8 + length :]
    torch.set_rng_state(states[0])
    if len(states) > 1 and torch.cuda.is_available():
        torch.cuda.set_rng_state(states[1])
