"""The expected positives of an epoch, as one threshold per class. No torch import."""

# Shapes: B batch, L classes.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, overload

import numpy as np
from numpy.typing import NDArray

from bigscl.common.text import first_few
from bigscl.common.user_error import UserError
from bigscl.store import KeptScores, Ranked, Transport, on_rank_zero

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from bigscl.common import torch_later as torch

ONE = int(np.float16(1).view(np.uint16))
"""The bits of the highest score."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Thresholds:
    """A threshold per class: sample n is an expected positive iff s > score, or s == score and n <= tie_id.

    They are arrays of numpy, or tensors after `to`.
    """

    score: Any
    """float16 [L]"""
    tie_id: Any
    """int64 [L]"""
    num_expected: NDArray[np.int64] | None = None
    """[L]: how many positives of each class were requested; None before the first selection."""
    pseudo_positives: Thresholds | None = None
    """Those of fewer expected positives, the highest scores, which a loss may count as positives."""
    given_first: bool = False
    """Whether given positives were ranked before all others, whatever their values."""
    positives: NDArray[np.int64] | None = None
    """[L]: positives, given or expected, of all images with each class as a given one; None: not counted."""
    approximate: NDArray[np.int64] | None = None
    """[L]: images that may have left out a score as high as the threshold; None: all scores are kept."""

    @classmethod
    def none(cls, num_classes: int) -> Thresholds:
        """Return thresholds that select nothing, as before the first selection."""
        return cls(score=np.ones(num_classes, np.float16), tie_id=np.full(num_classes, -1, np.int64))

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Thresholds:
        """Return the thresholds that `to_json` described, bit for bit."""
        score, tie_id = np.asarray(values["score"], np.float16), np.asarray(values["tie_id"], np.int64)
        counts, fewer = values.get("num_expected"), values.get("pseudo_positives")
        found, approximate = values.get("approximate"), None
        if found is not None:
            classes, approximate = np.asarray(found["classes"], np.int64), np.zeros(len(score), np.int64)
            if classes.size and not 0 <= classes.min() <= classes.max() < len(score):
                raise UserError(f"selection: approximate classes up to {classes.max()} of {len(score)}")
            approximate[classes] = np.asarray(found["images"], np.int64)
        thresholds = cls(
            score=score,
            tie_id=tie_id,
            num_expected=None if counts is None else np.asarray(counts, np.int64),
            pseudo_positives=None if fewer is None else Thresholds.from_json(fewer),
            given_first=bool(values.get("given_first", False)),
            approximate=approximate,
        )
        for name in ("tie_id", "num_expected"):
            numbers = getattr(thresholds, name)
            if numbers is not None and numbers.shape != score.shape:
                raise UserError(
                    f"selection: {score.size} values of score but {numbers.size} of {name}, expected as many"
                )
        if counts is None and thresholds.any:
            raise UserError("selection: num_expected is missing")
        return thresholds

    def to_json(self) -> dict[str, Any]:
        """Return the thresholds as plain numbers, which represent every float16 exactly."""
        values = {"score": self.score.tolist(), "tie_id": self.tie_id.tolist()}
        if self.num_expected is not None:
            values["num_expected"] = self.num_expected.tolist()
        if self.pseudo_positives is not None:
            values["pseudo_positives"] = self.pseudo_positives.to_json()
        if self.approximate is not None:
            classes = self.approximate_classes()
            values["approximate"] = {"classes": classes, "images": self.approximate[classes].tolist()}
        return {**values, "given_first": True} if self.given_first else values

    def approximate_classes(self) -> list[int]:
        return [] if self.approximate is None else list(np.flatnonzero(self.approximate).tolist())

    def to(self, device: torch.device | str) -> Thresholds:
        score, tie_id = torch.as_tensor(self.score).to(device), torch.as_tensor(self.tie_id).to(device)
        fewer = None if self.pseudo_positives is None else self.pseudo_positives.to(device)
        return replace(self, score=score, tie_id=tie_id, pseudo_positives=fewer)

    @overload
    def expected(self, scores: NDArray[Any], ids: NDArray[np.int64]) -> NDArray[np.bool_]: ...

    @overload
    def expected(self, scores: Tensor, ids: Tensor) -> Tensor: ...

    def expected(self, scores: Any, ids: Any) -> Any:
        """Return which classes are expected positives of each sample, bool [B,L].

        `scores` [B,L] are the stored values that were ranked: scores, or the spatial ranking.
        """
        found = str(scores.dtype).rpartition(".")[2]
        assert found == "float16", f"scores are {found}; thresholds hold for the stored float16"
        values, score = _in_order(scores), _in_order(self.score)
        above, ties = values > score, values == score
        # Ties are rare. On a GPU the question whether there is any would make the host wait.
        if isinstance(ties, np.ndarray) and not ties.any():
            return above
        return above | (ties & (ids[:, None] <= self.tie_id))

    @property
    def any(self) -> bool:
        return bool((self.tie_id >= 0).any())

    def same_as(self, other: Thresholds) -> bool:
        """Return whether both select the same samples from the same scores."""
        return np.array_equal(self.score, other.score) and np.array_equal(self.tie_id, other.tie_id)


def _in_order(values: Any) -> Any:
    """Return values that compare as these do, fast."""
    # The bits of scores in 0 to 1 have the order of the scores; numpy compares float16 23 times slower. Bits
    # of negative values, as of a score that is not kept, are negative integers.
    if not isinstance(values, np.ndarray):
        return values
    bits = np.ascontiguousarray(values).view(np.int16)
    # The sum makes -0 a 0.
    return bits if bits.min(initial=0) >= 0 else (values + np.float16(0)).view(np.int16)


class FloorCounts:
    """How many images of this rank have each floor, where rows keep only their highest scores."""

    def __init__(self) -> None:
        self._counts = np.zeros(ONE + 1, np.int64)

    def note(self, ids: NDArray[np.int64], scores: Ranked) -> None:
        assert isinstance(scores, KeptScores)
        bits = np.minimum(scores.floors.view(np.uint16), ONE)
        self._counts += np.bincount(bits, minlength=ONE + 1)

    def marked(self, thresholds: Thresholds, ranks: Transport) -> Thresholds:
        """Return the thresholds with the images of all ranks whose floor reaches each of them. Collective."""
        parts = ranks.gather(self._counts.tobytes())

        def count() -> bytes:
            assert parts is not None
            total = np.sum([np.frombuffer(part, np.int64) for part in parts], axis=0)
            at_least = np.cumsum(total[::-1])[::-1]
            reached: NDArray[np.int64] = at_least[thresholds.score.view(np.uint16)]
            return reached.tobytes()

        reached = np.frombuffer(on_rank_zero(ranks, count), np.int64)
        assert thresholds.num_expected is not None
        return replace(thresholds, approximate=np.where(thresholds.num_expected > 0, reached, 0))


def approximate_text(thresholds: Thresholds, names: Sequence[str]) -> str:
    """Return which classes are approximate, and why, for people; `names` are those of these classes."""
    assert thresholds.approximate is not None
    count, images = f"{len(names):,} of {len(thresholds.score):,}", thresholds.approximate.max()
    return (
        f"{count} classes are approximate ({first_few(names, len(names))}): up to {images:,} images may have "
        f"left out a score as high as their threshold. A store with more top_scores is exact for more classes"
    )


def expected_counts(
    counts: NDArray[np.int64], positives_per_image: float | NDArray[np.float64]
) -> NDArray[np.int64]:
    """Return the expected positives p_i = round(K * count_i) of each class; K is a number or [L]."""
    return np.asarray(np.rint(positives_per_image * counts), np.int64)


def pseudo_positive_counts(
    counts: NDArray[np.int64], num_expected: NDArray[np.int64], share: float
) -> NDArray[np.int64]:
    """Return the given positives of each class and this share of the others that are expected."""
    others = np.maximum(num_expected - counts, 0)
    chosen: NDArray[np.int64] = np.rint(share * others).astype(np.int64)
    return np.minimum(counts, num_expected) + chosen
