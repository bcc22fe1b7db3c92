"""What a loss keeps from step to step, beside the memory: label estimates, corrections, or histograms."""

# Shapes: B batch, L classes.

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from bigscl.config import Config
from bigscl.distributed.ranks import Ranks
from bigscl.losses.class_histograms import (
    UNKNOWN,
    ClassHistograms,
    class_priors,
    lowest_cuts,
    observed_share,
)
from bigscl.losses.corrections import LabelCorrections, pack
from bigscl.losses.estimator import LabelEstimator
from bigscl.losses.inputs import LossInputs
from bigscl.losses.objective import Objective
from bigscl.losses.precision import probabilities
from bigscl.losses.pseudo_labels import large_in
from bigscl.memory.device import copy_to_host
from bigscl.training.run_folder import Data


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainedBatch:
    """A batch after its backward pass."""

    ids: Tensor
    """int64 [B], on the host."""
    inputs: LossInputs
    scores: Tensor | None
    """float16 [B,L]: the scores that the memory learns of it; None without a memory."""
    rate: float
    """The network's learning rate."""
    gradient_factor: float
    """The factor in the gradient of estimates that DDP and the scaler divide out."""


class LossState(Protocol):
    """What a loss keeps. All ranks call `share` together; a checkpoint is saved after it."""

    file: str
    """The file of a checkpoint that holds it."""

    def inputs(self, ids: Tensor, epoch: int, device: torch.device) -> dict[str, Tensor]:
        """Return fields of `LossInputs` for a batch, whose ids are on the host."""
        ...

    def learn(self, trained: TrainedBatch) -> None:
        """Learn from a batch, without waiting for the device."""
        ...

    def share(self, ranks: Ranks, *, ends_epoch: bool) -> None:
        """Bring all ranks to the state that follows from the batches of all."""
        ...

    def state(self) -> dict[str, Tensor]:
        """Return everything that a checkpoint must keep."""
        ...

    def load(self, state: dict[str, Tensor]) -> None:
        """Load what `state` returned."""
        ...


def make_loss_state(config: Config, data: Data, device: torch.device, rank: int) -> LossState | None:
    """Return what the run's base loss keeps; None for most losses."""
    needs, num_classes = config.objective.needs, data.annotations.num_classes
    if needs.estimates:
        return Estimates(LabelEstimator(data.annotations, config.seed))
    if needs.corrections:
        num_rows = len(data.annotations.offsets) - 1
        return Corrections(LabelCorrections(num_rows, num_classes), config.objective)
    if needs.cuts or needs.priors:
        return Histograms(ClassHistograms(num_classes, device), config, is_first=rank == 0)
    return None


class Estimates:
    """The label estimates of ROLE."""

    file = "estimator.pt"

    def __init__(self, estimator: LabelEstimator) -> None:
        self._estimator = estimator

    def inputs(self, ids: Tensor, epoch: int, device: torch.device) -> dict[str, Tensor]:
        """Return the estimates of a batch."""
        return {"estimates": self._estimator.of(ids, device)}

    def learn(self, trained: TrainedBatch) -> None:
        """Step along the gradient of the estimates, one call later."""
        estimates = trained.inputs.estimates
        assert estimates is not None
        assert estimates.grad is not None
        gradient = (estimates.grad / trained.gradient_factor).float()
        copies, ready = copy_to_host({"gradient": gradient})
        self._estimator.step(trained.ids, copies["gradient"], trained.rate, ready)

    def share(self, ranks: Ranks, *, ends_epoch: bool) -> None:
        """Give every rank the estimates of all ranks."""
        self._estimator.share(ranks)

    def state(self) -> dict[str, Tensor]:
        """Return the estimates and the state of their optimizer."""
        return self._estimator.state()

    def load(self, state: dict[str, Tensor]) -> None:
        """Load what `state` returned."""
        self._estimator.load(state)


class Corrections:
    """The corrected labels of LL-Cp."""

    file = "corrections.pt"

    def __init__(self, corrections: LabelCorrections, objective: Objective) -> None:
        self._corrections, self._objective = corrections, objective

    def inputs(self, ids: Tensor, epoch: int, device: torch.device) -> dict[str, Tensor]:
        """Return the corrections of a batch in earlier epochs."""
        return {"corrections": self._corrections.of(ids, device)}

    def learn(self, trained: TrainedBatch) -> None:
        """Add the labels whose loss was large, one call later."""
        copies, ready = copy_to_host({"bits": pack(large_in(trained.inputs, self._objective))})
        self._corrections.add(trained.ids, copies["bits"], ready)

    def share(self, ranks: Ranks, *, ends_epoch: bool) -> None:
        """Give every rank the corrections of all ranks."""
        self._corrections.share(ranks)

    def state(self) -> dict[str, Tensor]:
        """Return the corrections as bits."""
        return self._corrections.state()

    def load(self, state: dict[str, Tensor]) -> None:
        """Load what `state` returned."""
        self._corrections.load(state)


class Histograms:
    """The cuts of EM+APL, or the class priors of CRISP, by histograms of the epoch before."""

    file = "histograms.pt"

    def __init__(self, histograms: ClassHistograms, config: Config, *, is_first: bool) -> None:
        self._histograms, self._objective, self._is_first = histograms, config.objective, is_first
        self._num_epochs = config.schedule.epochs
        self._epoch: int | None = None
        self._inputs: dict[str, Tensor] = {}

    def inputs(self, ids: Tensor, epoch: int, device: torch.device) -> dict[str, Tensor]:
        """Return the cuts or the priors, which are the same in the whole epoch."""
        if epoch != self._epoch:
            arrays = self._cuts(epoch) if self._objective.needs.cuts else self._priors()
            self._inputs = {name: torch.as_tensor(array).to(device) for name, array in arrays.items()}
            self._epoch = epoch
        return self._inputs

    def _cuts(self, epoch: int) -> Mapping[str, Any]:
        """A share of each class's unknown labels that grows by equal steps up to the last epoch."""
        settings = self._objective.em_apl
        rounds = epoch - settings.start_epoch + 1
        share = settings.share * max(rounds, 0) / max(self._num_epochs - settings.start_epoch, 1)
        return {"cuts": lowest_cuts(self._histograms.complete[UNKNOWN], min(share, 1.0))}

    def _priors(self) -> Mapping[str, Any]:
        settings, counts = self._objective.crisp, self._histograms.complete
        return {
            "priors": class_priors(counts, settings.delta, settings.tau).astype(np.float32),
            "observed_share": observed_share(counts).astype(np.float32),
        }

    def learn(self, trained: TrainedBatch) -> None:
        """Count the scores that the memory learns, if the loss cuts those; else the predictions."""
        values = trained.scores if self._objective.needs.cuts else probabilities(trained.inputs.logits)
        assert values is not None
        self._histograms.add(values, trained.inputs.labels)

    def share(self, ranks: Ranks, *, ends_epoch: bool) -> None:
        """Give rank 0 the counts of all ranks; at the end of an epoch they are complete, on every rank."""
        self._histograms.share(ranks, ends_epoch=ends_epoch)

    def state(self) -> dict[str, Tensor]:
        """Return the counts of the epoch before and of this one so far."""
        return self._histograms.state()

    def load(self, state: dict[str, Tensor]) -> None:
        """Load what `state` returned."""
        self._histograms.load(state, is_first=self._is_first)
        self._epoch = None
