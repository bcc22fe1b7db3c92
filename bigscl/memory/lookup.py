"""Stored scores and heatmaps of a batch, targets for the losses, and the new moving averages."""

# Shapes: B batch, L classes, G side of the score map, W side of the heatmap, k classes with a heatmap.

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bigscl.common.user_error import UserError
from bigscl.config import StoreConfig
from bigscl.data.crops import Box, ViewRow, box_extents, check_rows
from bigscl.losses.registry import LossInputs
from bigscl.memory.heatmaps import (
    blend,
    blend_scores,
    gather_classes,
    remaining_start,
    spatial_score,
    to_view,
    without_initial_value,
)
from bigscl.selection.thresholds import ONE, Thresholds
from bigscl.store import MAX_COUNT, NOT_KEPT, Annotations, Rows, class_dtype

Ids = Tensor | NDArray[np.integer[Any]] | Sequence[int]
Boxes = Tensor | NDArray[np.floating[Any]] | Sequence[Sequence[float]]
HOST_ARRAYS = ("last_epoch",)
"""Arrays that no computation on the device uses."""


class SampleViews(NamedTuple):
    """Which samples a batch shows, and which part of each image."""

    ids: Ids
    """[B]: rows of the index."""
    views: Boxes | None = None
    """[B,5]: a `ViewRow` of each, fractions of the image and 1 where mirrored. Default: all of it."""
    erased: Boxes | None = None
    """[B,4]: left, top, width, height of an erased box in fractions of the view; all 0 for none.

    A row keeps all its values, and counts no visit, where the box is the whole view.
    """


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CheckedViews:
    """Sample views whose numbers fit."""

    rows: NDArray[np.int64]
    views: Tensor
    erased: Tensor | None


class GivenClasses:
    """The annotated positives of all rows, on one device."""

    def __init__(
        self, annotations: Annotations, device: torch.device, started: Annotations | None = None
    ) -> None:
        """`started` are those whose heatmaps started at 1, if these are others."""
        self._started = None if started is None else GivenClasses(started, device)
        self.num_classes = annotations.num_classes
        self._offsets = torch.tensor(annotations.given.offsets).to(device)  # a copy: indexes are read-only
        # One entry more, which rows past the last positive may read.
        classes = torch.from_numpy(annotations.given.values).to(torch.int32)
        self._classes = torch.cat([classes, classes.new_zeros(1)]).to(device)
        most = int(annotations.given.lengths.max(initial=0))
        self._places = torch.arange(most, device=device)

    def to(self, device: torch.device) -> "GivenClasses":
        moved = copy(self)
        moved._offsets, moved._classes = self._offsets.to(device), self._classes.to(device)
        moved._places = self._places.to(device)
        moved._started = None if self._started is None else self._started.to(device)
        return moved

    def of(self, ids: Tensor) -> Tensor:
        """Return the annotated positives of some rows, bool [B,L]; the host does not wait for the device."""
        first, end = self._offsets[ids], self._offsets[ids + 1]
        places = first[:, None] + self._places
        found = self._classes[places.clamp(max=len(self._classes) - 1)].long()
        # A column more for the places that are not the row's own.
        mask = torch.zeros(len(ids), self.num_classes + 1, dtype=torch.bool, device=ids.device)
        mask.scatter_(1, torch.where(places < end[:, None], found, self.num_classes), True)
        return mask[:, :-1]

    def started(self, ids: Tensor) -> Tensor:
        """Return those whose heatmaps started at 1, bool [B,L]."""
        return (self._started or self).of(ids)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class MemoryBatch:
    """Stored values of a batch, on the training device; None for arrays that the store does not keep."""

    rows: NDArray[np.int64]
    """[B]: the sample ids, on the host."""
    ids: Tensor
    """int64 [B]: the sample ids."""
    views: Tensor
    """float32 [B,5]"""
    erased: Tensor | None
    """float32 [B,4]; None if nothing can be erased."""
    selection: Thresholds
    arrays: Mapping[str, Tensor]
    """The store's arrays by name, with the shapes of one row of the store behind B; those of its layout.

    `scores` are of all classes also where only the highest are kept: the others have the floor of their row.
    """
    annotations: GivenClasses
    momentum: float
    """Momentum mu of the running averages."""
    source: object = None
    """The pass over an epoch that it belongs to; it is updated in the same pass."""

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def scores(self) -> Tensor:
        """float16 [B,L]"""
        return self.arrays["scores"]

    @property
    def heatmaps(self) -> Tensor | None:
        """float16 [B,L,W,W], or [B,k,W,W] with `classes`; None where only scores are kept."""
        return self.arrays.get("heatmaps")

    @property
    def classes(self) -> Tensor | None:
        """int64 [B,k]; None where all classes have heatmaps, or none has."""
        return self.arrays.get("classes")

    @property
    def expected(self) -> Tensor:
        """The expected positives, bool [B,L]."""
        return self.selection.expected(self.selection_score, self.ids)

    @property
    def pseudo_positives(self) -> Tensor | None:
        """Those with the highest scores, bool [B,L]; None if they were not selected."""
        fewer = self.selection.pseudo_positives
        return None if fewer is None else fewer.expected(self.selection_score, self.ids)

    @property
    def annotated(self) -> Tensor:
        """The annotated positives, bool [B,L]."""
        return self.annotations.of(self.ids)

    @property
    def selection_score(self) -> Tensor:
        """Values that rank expected positives, float16 [B,L]; NOT_KEPT for scores that are not kept."""
        scores, spatial = self.scores, self.arrays.get("spatial_score")
        kept = self.arrays.get("score_classes")
        if kept is not None:
            scores = torch.full_like(scores, float(NOT_KEPT)).scatter(1, kept, scores.gather(1, kept))
        if spatial is None or self.classes is None:
            return scores if spatial is None else spatial
        return scores.scatter(1, self.classes, spatial)

    def target(self, side: int) -> Tensor:
        """Return the heatmaps as the views see them, [B,L,side,side], or [B,k,side,side] of `classes`."""
        if self.heatmaps is None:
            # Only scores, until the top classes are chosen: the score stands for every cell.
            return self.scores.float()[:, :, None, None].expand(-1, -1, side, side)
        return to_view(self.heatmaps, self.views, side)

    def corrected_target(self, side: int) -> tuple[Tensor, Tensor]:
        """Return the same less the initial values, and how far each cell is to be trusted, [B,1,side,side].

        After n visits of a cell it is the mean of what was seen, `(H - mu^n h0) / (1 - mu^n)`, and its weight
        is `1 - mu^n`: nothing for a cell that was never seen.
        """
        if self.heatmaps is None:
            raise UserError(
                "scl_corrected: this store keeps scores only so far, and counts no visits of heatmap cells. "
                "Use consistency scl, or store.warmup_heatmaps: dense."
            )
        visits = self.arrays["cell_visits"]
        seen = 1 - remaining_start(visits, self.momentum)[:, None]
        target = self._without_initial_value(self.heatmaps, visits) / seen.clamp(min=1e-6)
        return to_view(target.clamp(max=1), self.views, side), to_view(seen, self.views, side)

    def _without_initial_value(self, heatmaps: Tensor, counts: Tensor, *, debiased: bool = False) -> Tensor:
        started = self.annotations.started(self.ids)
        started = started if self.classes is None else started.gather(1, self.classes)
        return without_initial_value(
            heatmaps, started, remaining_start(counts, self.momentum, debiased=debiased)
        )

    def ranking_of(self, scores: Tensor, heatmaps: Tensor, counts: Tensor, *, debiased: bool) -> Tensor:
        """Return what expected positives are ranked by, from these scores, heatmaps and visits."""
        heat = self._without_initial_value(heatmaps, counts, debiased=debiased)
        return spatial_score(scores, heat, self.annotated, self.classes)

    def inputs(
        self, logits: Tensor, labels: Tensor, maps: Tensor | None = None, *, corrected: bool = False
    ) -> LossInputs:
        """Return what an objective is computed from.

        `logits` [B,L] are those of the pooled prediction, `labels` int8 [B,L] are 1 positive, 0 negative and
        -1 unknown, `maps` [B,L,G,G] are probabilities; only spatial consistency needs them. `corrected`
        targets are those of `scl_corrected`.
        """
        target, weight = None, None
        if maps is not None and corrected:
            target, weight = self.corrected_target(maps.shape[-1])
        elif maps is not None:
            target = self.target(maps.shape[-1])
        return LossInputs(
            logits=logits,
            labels=labels,
            maps=maps,
            scores=self.scores,
            target=target,
            weight=weight,
            classes=self.classes,
            expected=self.expected,
            pseudo_positives=self.pseudo_positives,
        )


def to_device(
    rows: Rows,
    sample_views: CheckedViews,
    selection: Thresholds,
    annotations: GivenClasses,
    *,
    device: torch.device,
    momentum: float,
    source: object = None,
) -> MemoryBatch:
    """Return the rows of a batch, and how it looks at them, as tensors on the device."""

    # As they are: a conversion on the host would make an unpinned copy, whose transfer blocks.
    def move(array: NDArray[Any] | Tensor) -> Tensor:
        return torch.as_tensor(array).to(device, non_blocking=True)

    def as_used(array: NDArray[Any]) -> Tensor:
        # torch indexes by int64, and has few operations on wider unsigned integers. Every device can convert
        # their bits as signed ones.
        if array.dtype.kind != "u" or array.dtype.itemsize == 1:
            return move(array)
        signed = array.view(np.dtype(f"i{array.dtype.itemsize}"))
        return move(signed).long() & np.iinfo(array.dtype).max

    arrays = {name: as_used(array) for name, array in rows.items() if name not in HOST_ARRAYS}
    if "score_classes" in arrays:
        floors = arrays.pop("score_floor")[:, None].expand(-1, annotations.num_classes)
        arrays["scores"] = floors.scatter(1, arrays["score_classes"], arrays["scores"])
    return MemoryBatch(
        rows=sample_views.rows,
        ids=move(sample_views.rows),
        views=move(sample_views.views),
        erased=None if sample_views.erased is None else move(sample_views.erased),
        selection=selection,
        arrays=arrays,
        annotations=annotations,
        momentum=momentum,
        source=source,
    )


def to_rows(arrays: Mapping[str, NDArray[Any]], num_classes: int) -> Rows:
    """Return updated arrays, copied to the host, as rows of the store."""
    # A view, as the values may not be there yet. Only classes are signed: see `highest_scores`.
    signed = {name: array for name, array in arrays.items() if array.dtype.kind == "i"}
    unsigned = {name: array.view(np.dtype(f"u{array.dtype.itemsize}")) for name, array in signed.items()}
    return Rows(num_classes, **{**arrays, **unsigned})


@torch.no_grad()
def highest_scores(scores: Tensor, first: Tensor, second: Tensor | None, count: int) -> dict[str, Tensor]:
    """Return what a row keeps of its scores [B,L], by the names of the store's arrays.

    They are its `count` highest, ties to the lowest class; before them the classes that `first` marks (bool
    [B,L]), then the classes `second` [B,k]. The floor is the highest score that is left out. Classes are the
    bits of the store's type, as signed integers.
    """
    num_classes = scores.shape[1]
    rank = scores.view(torch.int16).int() & 0xFFFF  # halves from 0 to 1 order like their bits
    if second is not None:
        rank = rank.scatter(1, second, ONE + 1)
    rank = torch.where(first, ONE + 2, rank)
    # Keys are unique, so any device finds the same ones.
    wide = rank if 2**16 * num_classes < 2**31 else rank.long()
    keys = wide * num_classes + torch.arange(num_classes - 1, -1, -1, device=scores.device, dtype=wide.dtype)
    best = (num_classes - 1 - keys.topk(count, dim=1).values % num_classes).long()
    classes = best.sort(dim=1).values
    bits = torch.int16 if class_dtype(num_classes).itemsize == 2 else torch.int32
    return {
        "scores": scores.gather(1, classes),
        "score_classes": classes.to(bits),
        "score_floor": scores.scatter(1, classes, 0).amax(1),
    }


@torch.no_grad()
def updated_scores(stored: MemoryBatch, logits: Tensor, settings: StoreConfig) -> Tensor:
    """Return the scores of a batch after its prediction, float16 [B,L]."""
    visits = stored.arrays["sample_visits"] if settings.ema == "debiased" else None
    return blend_scores(stored.scores, logits.float().sigmoid(), settings.momentum, visits)


@torch.no_grad()
def updated_averages(
    stored: MemoryBatch, logits: Tensor, maps: Tensor | None, settings: StoreConfig
) -> dict[str, Tensor]:
    """Return the new averages of a batch by array, from logits [B,L] and probability maps [B,L,G,G]."""
    updated = _updated(stored, logits, maps, settings)
    if stored.erased is None:
        return updated
    is_hidden = (box_extents(stored.erased) >= 1).all(1)
    before = dict(stored.arrays)
    if (kept := before.get("score_classes")) is not None:
        before["scores"] = stored.scores.gather(1, kept)
        before["score_floor"] = stored.scores.scatter(1, kept, 0).amax(1)  # all other classes have it
    return {
        name: torch.where(is_hidden.view(-1, *[1] * (new.ndim - 1)), before[name].to(new.dtype), new)
        for name, new in updated.items()
    }


def _updated(
    stored: MemoryBatch, logits: Tensor, maps: Tensor | None, settings: StoreConfig
) -> dict[str, Tensor]:
    debiased = settings.ema == "debiased"
    scores = updated_scores(stored, logits, settings)
    visits = stored.arrays["sample_visits"]
    updated = {"scores": scores, "sample_visits": visits + (visits < MAX_COUNT)}
    if "score_classes" in stored.arrays:
        count = stored.arrays["score_classes"].shape[1]
        updated |= highest_scores(scores, stored.annotated, stored.classes, count)
    if stored.heatmaps is None:
        return updated
    assert maps is not None
    if stored.classes is not None:
        maps = gather_classes(maps, stored.classes)
    updated["heatmaps"], counts = blend(
        stored.heatmaps,
        maps,
        stored.views,
        settings.momentum,
        erased=stored.erased,
        counts=stored.arrays["cell_visits"],
        debiased=debiased,
    )
    if counts is None:
        return updated
    updated["cell_visits"] = counts
    if "spatial_score" in stored.arrays:
        updated["spatial_score"] = stored.ranking_of(scores, updated["heatmaps"], counts, debiased=debiased)
    return updated


# Arguments of users


def sample_views_of(batch: Any) -> SampleViews:
    """Return the samples of a batch that has `ids`, `views` and `erased` as attributes or as keys."""
    if isinstance(batch, SampleViews):
        return batch
    is_mapping = isinstance(batch, Mapping)
    found: dict[str, Any] = {
        name: batch.get(name) if is_mapping else getattr(batch, name, None) for name in SampleViews._fields
    }
    if found["ids"] is None:
        raise UserError(
            f"batch: found {type(batch).__name__} without `ids`. Give batches with `ids` and `views`, or "
            f"pass sample_views=lambda batch: bigscl.SampleViews(ids, views) to say where they are."
        )
    return SampleViews(**found)


def check_sample_views(sample_views: SampleViews) -> CheckedViews:
    """Return ids, views and erased boxes as arrays and tensors; UserError if they do not fit."""
    rows = as_rows(sample_views.ids)
    if len(np.unique(rows)) < len(rows):
        values, counts = np.unique(rows, return_counts=True)
        raise RepeatedSample(f"sample {values[counts > 1][0]} is twice in one batch. {ONCE}")
    given = [ViewRow()] * len(rows) if sample_views.views is None else sample_views.views
    views = check_rows("views", ViewRow, given, len(rows))
    boxes = sample_views.erased
    erased = None if boxes is None else check_rows("erased", Box, boxes, len(rows))
    return CheckedViews(rows=rows, views=views, erased=erased)


def as_rows(ids: Ids) -> NDArray[np.int64]:
    """Return sample ids as an array on the host; UserError if they are none."""
    found = np.asarray(ids.cpu() if isinstance(ids, Tensor) else ids)
    if found.size == 0:
        found = found.astype(np.int64)
    if found.ndim != 1 or not np.issubdtype(found.dtype, np.integer):
        raise UserError(
            f"ids: found {found.dtype} {list(found.shape)}, expected whole numbers [B]: rows of the index"
        )
    return found.astype(np.int64, copy=False)


class RepeatedSample(UserError):
    """A sample came up a second time in one epoch."""


ONCE = (
    "The memory updates each sample at most once per epoch: its scores must be those of the epoch before. "
    "Read the shards without resampling, or leave out what `memory.is_new(ids)` says is not new."
)
