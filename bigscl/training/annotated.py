"""The annotated positives of a dataset on the training device, without a copy in each step."""

# Shapes: N rows, P annotated positives, B batch, L classes.

from copy import copy

import torch
from torch import Tensor

from bigscl.store import Annotations


class AnnotatedClasses:
    """The annotated positives of all rows, on one device."""

    def __init__(
        self, annotations: Annotations, device: torch.device, started: Annotations | None = None
    ) -> None:
        """`started` are those whose heatmaps started at 1, if these are others."""
        self._started = None if started is None else AnnotatedClasses(started, device)
        self._num_classes = annotations.num_classes
        self._offsets = torch.from_numpy(annotations.offsets).to(device)
        # One entry more, which rows past the last positive may read.
        classes = torch.from_numpy(annotations.classes).to(torch.int32)
        self._classes = torch.cat([classes, classes.new_zeros(1)]).to(device)
        most = int((annotations.offsets[1:] - annotations.offsets[:-1]).max(initial=0))
        self._places = torch.arange(most, device=device)

    def to(self, device: torch.device) -> "AnnotatedClasses":
        """Return the same on another device."""
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
        mask = torch.zeros(len(ids), self._num_classes + 1, dtype=torch.bool, device=ids.device)
        mask.scatter_(1, torch.where(places < end[:, None], found, self._num_classes), True)
        return mask[:, :-1]

    def started(self, ids: Tensor) -> Tensor:
        """Return those whose heatmaps started at 1, bool [B,L]."""
        return (self._started or self).of(ids)
