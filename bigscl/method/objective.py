"""What a run minimises: one of the base losses plus gamma times a consistency, with every part named."""

# Shapes: B batch, L classes, G side of the score map, k classes with a heatmap.

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from bigscl.method.losses import Norm, an, an_ls, bce, cl, en, ep, epr, role, scl_dense, scl_topk, wan

Base = Literal["bce", "an", "an_ls", "wan", "en", "ep", "epr", "role"]
Consistency = Literal["none", "cl", "scl"]


class Loss(NamedTuple):
    """A loss and its parts, each [B], by the names they have in the logs."""

    total: Tensor
    base: Tensor
    consistency: Tensor
    """Before its weight gamma."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """What a run minimises: a base loss, and gamma times a consistency."""

    base: Base = "en"
    consistency: Consistency = "scl"
    norm: Norm = "mse"
    smoothing: float = 0.1
    """Of `an_ls`."""
    positives_per_image: float | None = None
    """K of `epr` and `role`."""

    def __post_init__(self) -> None:
        for name, options in (("base", Base), ("consistency", Consistency), ("norm", Norm)):
            found = getattr(self, name)
            if found not in get_args(options):
                raise ValueError(f"{name}: found {found!r}, expected one of {get_args(options)}")
        if self.base in ("epr", "role") and self.positives_per_image is None:
            raise ValueError(f"positives_per_image: {self.base} needs the number of positives per image")

    @property
    def needs_maps(self) -> bool:
        """Whether the network must give its maps."""
        return self.consistency == "scl"

    def __call__(
        self,
        logit_map: Tensor | None,
        logits: Tensor,
        labels: Tensor,
        *,
        gamma: float = 1.0,
        expected: Tensor | None = None,
        scores: Tensor | None = None,
        target: Tensor | None = None,
        classes: Tensor | None = None,
        estimates: Tensor | None = None,
        mean_counts: tuple[Tensor, ...] = (),
    ) -> Loss:
        """The loss of a prediction.

        `expected` [B,L] is for en and ep, `scores` [B,L] for cl, `target` for scl: [B,L,G,G], or [B,k,G,G]
        with its `classes` [B,k]; `estimates` [B,L] for role; `mean_counts` of the global batch for epr (the
        network's) and role (the network's and the estimator's).
        """
        base = self._base(logits, labels, expected, estimates, mean_counts)
        if self.consistency == "none":
            return Loss(base, base, torch.zeros_like(base))
        if self.consistency == "cl":
            consistency = cl(logits, _given("scores", scores), norm=self.norm)
        elif classes is None:
            consistency = scl_dense(_given("logit_map", logit_map), _given("target", target), norm=self.norm)
        else:
            maps = _given("logit_map", logit_map)
            consistency = scl_topk(maps, classes, _given("target", target), norm=self.norm)
        return Loss(base + gamma * consistency, base, consistency)

    def _base(
        self,
        logits: Tensor,
        labels: Tensor,
        expected: Tensor | None,
        estimates: Tensor | None,
        mean_counts: tuple[Tensor, ...],
    ) -> Tensor:
        match self.base:
            case "bce":
                return bce(logits, labels)
            case "an":
                return an(logits, labels)
            case "an_ls":
                return an_ls(logits, labels, smoothing=self.smoothing)
            case "wan":
                return wan(logits, labels)
            case "en":
                return en(logits, labels, _given("expected", expected))
            case "ep":
                return ep(logits, labels, _given("expected", expected))
        assert self.positives_per_image is not None
        if self.base == "epr":
            return epr(logits, labels, self.positives_per_image, *mean_counts)
        return role(logits, _given("estimates", estimates), labels, self.positives_per_image, mean_counts)


def _given(name: str, value: Tensor | None) -> Tensor:
    if value is None:
        raise ValueError(f"{name}: missing, and this objective needs it")
    return value
