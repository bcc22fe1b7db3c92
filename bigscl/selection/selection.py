"""The expected positives of an epoch: for each class the images of highest score, as one cut per class."""

# Shapes: B batch, L classes, n rows of a chunk.

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bigscl.selection.ranking import Cuts, rank
from bigscl.store import Transport


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Selection:
    """A cut per class: sample n is expected positive iff s > tau, or s == tau and n <= last_id."""

    tau: Tensor
    """float16 [L]"""
    last_id: Tensor
    """int64 [L]"""
    num_expected: Tensor | None = None
    """int64 [L]: how many positives of each class were requested; None in cuts that did not store it."""
    surest: "Selection | None" = None
    """The surest of these, which a loss may count as positives."""
    named_first: bool = False
    """Whether annotated positives were ranked before all others, whatever their values."""

    @classmethod
    def none(cls, num_classes: int) -> "Selection":
        """Return a selection of nothing, as before the first selection."""
        return cls(
            tau=torch.ones(num_classes, dtype=torch.float16),
            last_id=torch.full((num_classes,), -1, dtype=torch.int64),
        )

    @classmethod
    def from_json(cls, cuts: Mapping[str, Any]) -> "Selection":
        """Return the selection that `to_json` described, bit for bit."""
        return selection_of(Cuts.from_json(cuts))

    def to_json(self) -> dict[str, Any]:
        """Return the cuts as plain numbers, which represent every float16 exactly."""
        return self.cuts().to_json()

    def cuts(self) -> Cuts:
        """Return the cuts in numpy."""
        return Cuts(
            tau=self.tau.cpu().numpy(),
            last_id=self.last_id.cpu().numpy(),
            num_expected=None if self.num_expected is None else self.num_expected.cpu().numpy(),
            surest=None if self.surest is None else self.surest.cuts(),
            named_first=self.named_first,
        )

    def to(self, device: torch.device | str) -> "Selection":
        """Return the cuts on a device."""
        surest = None if self.surest is None else self.surest.to(device)
        return replace(self, tau=self.tau.to(device), last_id=self.last_id.to(device), surest=surest)

    def expected(self, values: Tensor, ids: Tensor) -> Tensor:
        """Return which classes are expected positives of each sample, bool [B,L].

        `values` [B,L] are the stored ones that were ranked: scores, or the spatial ranking.
        """
        assert values.dtype == torch.float16, f"values are {values.dtype}; cuts hold for the stored float16"
        return (values > self.tau) | ((values == self.tau) & (ids[:, None] <= self.last_id))


def expected_counts(
    counts: NDArray[np.int64], positives_per_image: float | NDArray[np.float64]
) -> NDArray[np.int64]:
    """Return the expected positives p_i = round(K * count_i) of each class, from its annotated positives.

    K is one number, or one for each class.
    """
    num_expected: NDArray[np.int64] = np.rint(positives_per_image * counts).astype(np.int64)
    return num_expected


def surest_counts(
    counts: NDArray[np.int64], num_expected: NDArray[np.int64], share: float
) -> NDArray[np.int64]:
    """Return the annotated positives of each class and this share of the others that are expected."""
    others = np.maximum(num_expected - counts, 0)
    surest: NDArray[np.int64] = np.minimum(counts, num_expected) + np.rint(share * others).astype(np.int64)
    return surest


def select(
    chunks: Iterable[tuple[NDArray[np.int64], NDArray[np.float16]]],
    num_expected: NDArray[np.int64],
    transport: Transport,
    *,
    gather_bytes: int = 2**26,
) -> Selection:
    """Select the `num_expected[i]` samples of highest score as expected positives of each class i.

    The result is exact, ties by lowest id; a class that expects more positives than there are samples takes
    all. It is the same on every rank, for any division of the samples. Each rank passes its own (ids [n],
    scores [n,L]), no id twice; they are read once. Memory beyond a chunk is about 60 bytes per expected
    positive: it grows with K times the samples, not with the classes. Rank 0 gathers about `gather_bytes` at
    a time.
    """
    return selection_of(rank(chunks, num_expected, transport, gather_bytes=gather_bytes))


def selection_of(cuts: Cuts) -> Selection:
    """Return the selection that these cuts make."""
    return Selection(
        tau=torch.from_numpy(cuts.tau),
        last_id=torch.from_numpy(cuts.last_id),
        num_expected=None if cuts.num_expected is None else torch.from_numpy(cuts.num_expected),
        surest=None if cuts.surest is None else selection_of(cuts.surest),
        named_first=cuts.named_first,
    )
