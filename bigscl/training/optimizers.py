"""The optimizer of a run: its algorithm, and the parameters by weight decay and by depth."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bigscl.common.user_error import UserError
from bigscl.config.schema import OptimizerConfig
from bigscl.models.spatial import SpatialClassifier

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
