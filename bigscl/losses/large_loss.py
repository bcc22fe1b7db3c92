"""Large losses are rejected or corrected (Kim et al. 2022), also of boosted logits (2023)."""

# Shapes: B batch, L classes, G side of the score map; 8 classes share a byte.

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from bigscl.common.bounds import Share
from bigscl.losses.cross_entropy import at_least_float32, weighted
from bigscl.losses.registry import GlobalBatch, LossInputs, base_loss, section
from bigscl.losses.state import RunFacts, SampleRows, TrainedBatch, check_bytes

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from bigscl.common import torch_later as torch

Scheme = Literal["reject", "correct"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LargeLoss:
    rate: Share = 0.002
    """Share of a batch's labels: ll_r and ll_ct treat `epoch * rate` of them, ll_cp `rate` in each epoch."""

    def rate_at(self, epoch: int, *, lasting: bool) -> float:
        """Return the share of labels with a large loss: it grows by the epoch unless corrections last."""
        return min((min(epoch, 1) if lasting else epoch) * self.rate, 1.0)


def ll_r(
    logits: Tensor, labels: Tensor, epoch: int, threshold: Tensor | None = None, *, settings: LargeLoss
) -> Tensor:
    """As `an`, but unknown labels with a large loss have none."""
    is_large = find_large_losses(logits, labels, None, settings.rate_at(epoch, lasting=False), threshold)
    return large_loss(logits, labels, is_large, None, "reject")


def ll_ct(
    logits: Tensor, labels: Tensor, epoch: int, threshold: Tensor | None = None, *, settings: LargeLoss
) -> Tensor:
    """As `an`, but unknown labels with a large loss count as positives."""
    is_large = find_large_losses(logits, labels, None, settings.rate_at(epoch, lasting=False), threshold)
    return large_loss(logits, labels, is_large, None, "correct")


def ll_cp(
    logits: Tensor,
    labels: Tensor,
    corrections: Tensor,
    epoch: int,
    threshold: Tensor | None = None,
    *,
    settings: LargeLoss,
) -> Tensor:
    """As `ll_ct`, and labels that were corrected once stay positive."""
    is_large = find_large_losses(
        logits, labels, corrections, settings.rate_at(epoch, lasting=True), threshold
    )
    return large_loss(logits, labels, is_large, corrections, "correct")


def large_loss(
    logits: Tensor, labels: Tensor, is_large: Tensor, corrected: Tensor | None, scheme: Scheme
) -> Tensor:
    """As `an`, but unknown labels that are large have no loss or are positives, as `corrected` ones are."""
    is_large = is_large & (labels == -1)
    is_positive = labels == 1
    if corrected is not None:
        is_positive = is_positive | (corrected & (labels == -1))
    if scheme == "correct":
        return weighted(logits, is_positive | is_large, ~(is_positive | is_large))
    return weighted(logits, is_positive, ~is_positive & ~is_large)


def find_large_losses(
    logits: Tensor, labels: Tensor, corrected: Tensor | None, rate: float, threshold: Tensor | None
) -> Tensor:
    """Return which losses are among the largest of the global batch, at a share of its labels, bool [B,L]."""
    competing = competing_logits(logits, labels, corrected)
    return find_large(competing, num_large(competing.numel(), rate), threshold)


def find_large(competing: Tensor, num: int, threshold: Tensor | None = None) -> Tensor:
    """Return which losses are among the `num` largest of the global batch, as bool [B,L].

    Only the labels that are `competing` [B,L] can be. As negatives their loss is -log(1 - f), which grows
    with the logit: so `threshold` is the logit of rank `num` over all ranks; without it these samples are the
    whole batch. Ties are all large. (The authors' code leaves the one of rank `num` out of LL-Cp's
    corrections, but corrects it in the step.)
    """
    if num == 0 or not competing.numel():
        return competing > math.inf
    if threshold is None:
        threshold = competing.flatten().topk(num).values[-1]
    return (competing >= threshold) & (competing > -math.inf)


def competing_logits(logits: Tensor, labels: Tensor, corrected: Tensor | None) -> Tensor:
    """Return the logits of unknown labels that are not corrected yet, -inf elsewhere, without gradient."""
    competes = labels == -1 if corrected is None else (labels == -1) & ~corrected
    return at_least_float32(logits.detach()).where(competes, -math.inf)


def num_large(num_labels: int, rate: float) -> int:
    """Return how many of a batch's labels, known ones included, have a large loss: the rate, rounded up."""
    # A product such as 0.002 * 1000 may exceed the whole number that it stands for.
    return min(math.ceil(num_labels * rate - 1e-9), num_labels)


# The threshold over all ranks


def _threshold(
    inputs: LossInputs | None, batch: GlobalBatch, settings: LargeLoss, *, lasting: bool = False
) -> dict[str, Any]:
    return global_threshold(inputs, batch, settings.rate_at(batch.epoch, lasting=lasting))


def global_threshold(inputs: LossInputs | None, batch: GlobalBatch, rate: float) -> dict[str, Any]:
    """Return the logit from which on losses are large in the global batch, if ranks must agree on it.

    Each rank sends its largest logits, at most as many as there can be large ones: at the rates in use
    a few per cent of a batch's logits.
    """
    num = num_large(batch.num_samples * batch.num_classes, rate)
    if num == 0 or batch.world_size == 1:
        return {}
    size = min(num, batch.most_per_rank * batch.num_classes)
    largest = torch.full((size,), -math.inf, device=batch.device)
    if inputs is not None:
        competing = competing_logits(inputs.logits, inputs.labels, inputs.corrections).flatten()
        top = competing.topk(min(size, len(competing))).values
        largest[: len(top)] = top
    return {"threshold": batch.gather(largest).topk(num).values[-1]}


# LL-Cp's corrections: one bit for each class of every training image


class LabelCorrections(SampleRows):
    """Which unknown labels of every sample were corrected to positives, for the rest of the run."""

    file = "corrections.pt"

    def __init__(self, num_rows: int, num_classes: int, settings: LargeLoss = LargeLoss()) -> None:
        num_bytes = -(-num_classes // 8)
        sum_of = f"a bit for each of {num_rows:,} images x {num_classes:,} classes"
        check_bytes("ll_cp", num_rows * num_bytes, sum_of)
        super().__init__({"bits": torch.zeros(num_rows, num_bytes, dtype=torch.uint8)})
        self._num_classes, self._settings = num_classes, settings

    def inputs(self, ids: Tensor, epoch: int, device: torch.device) -> dict[str, Tensor]:
        return {"corrections": self.of(ids, device)}

    def of(self, ids: Tensor, device: torch.device) -> Tensor:
        return unpack(self.rows_of("bits", ids, device), self._num_classes)

    def update(self, trained: TrainedBatch) -> None:
        given = trained.inputs
        assert given.epoch is not None
        rate = self._settings.rate_at(given.epoch, lasting=True)
        is_large = find_large_losses(given.logits, given.labels, given.corrections, rate, given.threshold)
        copies, ready = trained.copy_to_host({"bits": pack(is_large)})
        self.add(trained.ids, copies["bits"], ready)

    def add(self, ids: Tensor, bits: Tensor, ready: Callable[[], object] = lambda: None) -> None:
        """Add corrections of these samples, packed and on the host, valid once `ready` returns."""

        def update() -> None:
            self.tables["bits"][ids] |= bits

        self.update_later(ids, ready, update)


def pack(flags: Tensor) -> Tensor:
    """Return bool [B,L] as bits, uint8 [B, L/8 rounded up]."""
    padded = torch.nn.functional.pad(flags.to(torch.uint8), (0, -flags.shape[1] % 8))
    bits = padded.reshape(len(flags), padded.shape[1] // 8, 8) << _shifts(flags.device)
    return bits.sum(2, dtype=torch.uint8)


def unpack(bits: Tensor, num_classes: int) -> Tensor:
    flags = (bits[:, :, None] >> _shifts(bits.device)) & 1
    return flags.flatten(1)[:, :num_classes].bool()


def _shifts(device: torch.device) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)


def _corrections(run: RunFacts) -> LabelCorrections:
    return LabelCorrections(len(run.annotations.given), run.annotations.num_classes, run.settings)


# BoostLU: large losses of logits with boosted positive evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class BoostLu:
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


def _boosted_threshold(inputs: LossInputs | None, batch: GlobalBatch, settings: BoostLu) -> dict[str, Any]:
    if inputs is not None:
        assert inputs.logit_map is not None, "boostlu needs the map"
        inputs = replace(inputs, logits=boosted_logits(inputs.logits, inputs.logit_map, settings.alpha))
    return global_threshold(inputs, batch, settings.rate_at(batch.epoch))


SETTING = section("large_loss", LargeLoss, "ll_r, ll_ct and ll_cp")
base_loss("ll_r", ll_r, setting=SETTING, statistics=_threshold)
base_loss("ll_ct", ll_ct, setting=SETTING, statistics=_threshold)
base_loss("ll_cp", ll_cp, setting=SETTING, statistics=partial(_threshold, lasting=True), state=_corrections)
base_loss("boostlu", boostlu, setting=section("boostlu", BoostLu), statistics=_boosted_threshold)
