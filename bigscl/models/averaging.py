"""The running average of a network's weights over the steps of a run."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel


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
        """Load a saved average, and read its counter again."""
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
