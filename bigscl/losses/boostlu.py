"""BoostLU (Kim et al. 2023): large losses of logits with boosted positive evidence. No torch import."""

# Shapes: B batch, L classes, G side of the score map.

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from bigscl.common.bounds import Share
from bigscl.losses.cross_entropy import at_least_float32
from bigscl.losses.inputs import LossInputs
from bigscl.losses.large_loss import Scheme, find_large_losses, global_threshold, large_loss
from bigscl.losses.registry import GlobalBatch, base_loss, section

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class BoostLu:
    """Logits boosted where the map has positive evidence (Kim et al. 2023)."""

    alpha: Annotated[float, Field(ge=1)] = 5.0
    """Factor of the map's positive logits, before the mean over its cells; 1 changes nothing."""
    scheme: Scheme = "reject"
    """Whether unknown labels with a large loss have none (as ll_r) or count as positives (as ll_ct)."""
    rate: Share = 0.005
    """Share of a batch's labels: `epoch * rate` of them have a large loss."""

    def rate_at(self, epoch: int) -> float:
        """Return the share of a batch's labels whose loss counts as large in an epoch."""
        return min(epoch * self.rate, 1.0)


def boostlu(
    logits: Tensor,
    labels: Tensor,
    logit_map: Tensor,
    epoch: int,
    threshold: Tensor | None = None,
    *,
    settings: BoostLu,
) -> Tensor:
    """As `ll_r` or `ll_ct`, for the mean of the map with its positive cells times alpha.

    Networks that are trained with missing labels look at the same regions as those with all labels, but find
    less evidence there; the factor makes up for it.
    """
    boosted = boosted_logits(logits, logit_map, settings.alpha)
    is_large = find_large_losses(boosted, labels, None, settings.rate_at(epoch), threshold)
    return large_loss(boosted, labels, is_large, None, settings.scheme)


def boosted_logits(logits: Tensor, logit_map: Tensor, alpha: float) -> Tensor:
    """Return the mean of the map with its positive cells times alpha; `logits` are its plain mean."""
    return at_least_float32(logits) + (alpha - 1) * at_least_float32(logit_map).relu().mean((2, 3))


def _threshold(inputs: LossInputs | None, batch: GlobalBatch, settings: BoostLu) -> dict[str, Any]:
    if inputs is not None:
        assert inputs.logit_map is not None, "boostlu needs the map"
        inputs = replace(inputs, logits=boosted_logits(inputs.logits, inputs.logit_map, settings.alpha))
    return global_threshold(inputs, batch, settings.rate_at(batch.epoch))


base_loss("boostlu", boostlu, setting=section("boostlu", BoostLu), statistics=_threshold)
