"""Mixup and CutMix: how much of each image of a batch is its neighbour's, drawn by (seed, epoch, sample ids).

The images of a batch are neighbours in pairs: the first and the second, the third and the fourth. The config
holds these values, so importing this module imports no torch.
"""

# Shapes: B samples of a batch.

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from bigscl.common.bounds import Share
from bigscl.data.crops import Purpose, uniforms

Alpha = Annotated[float, Field(ge=0, le=1)]
NUM_TRIES = 16
"""Of draws of a Beta distribution, at least half of which are taken: all fail once in 65,000 times."""
NUM_UNIFORMS = 4 + 2 * NUM_TRIES
Numbers = NDArray[np.float64]


class MixRow(NamedTuple):
    """How an image is mixed, a row of a batch's `mix`. Default: not at all."""

    share: float = 1.0
    """Weight of the image's own labels; the rest is that of its neighbour's."""
    left: float = 0.0
    """The box, in fractions of the view, that shows the neighbour. No box: all pixels are blended."""
    top: float = 0.0
    width: float = 0.0
    height: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixing:
    """Mixup and CutMix between neighbours in a batch."""

    mixup: Alpha = 0.0
    """Mixup: parameter of the Beta distribution of the image's share; 0: none. The memory skips the image."""
    cutmix: Alpha = 0.0
    """CutMix: the same of the area that is kept; 0: none. The pasted box is left out of the memory."""
    probability: Share = 1.0
    """Share of the images that are mixed."""
    cutmix_share: Share = 0.5
    """Share of the mixed images that have CutMix, if there is Mixup too."""

    def rows(self, ids: Sequence[int], *, size: int, seed: int, epoch: int) -> NDArray[np.float32]:
        """Return a `MixRow` for each image of a batch, [B,5]; it depends on these arguments alone."""
        rows = np.tile(np.array(MixRow(), np.float32), (len(ids), 1))
        # An odd batch has one without a neighbour. One generator serves the batch: a sample comes once per
        # epoch, so its first id names it.
        paired = len(ids) - len(ids) % 2
        if not paired:
            return rows
        drawn = uniforms(seed, epoch, ids[0], Purpose.MIX, paired * NUM_UNIFORMS)
        random = np.array(drawn).reshape(paired, NUM_UNIFORMS)
        is_mixed, draws = random[:, 0] < self.probability, random[:, 4:]
        cut_share = self.cutmix_share if self.mixup and self.cutmix else float(self.cutmix > 0)
        is_cut = is_mixed & (random[:, 1] < cut_share)
        if self.mixup:
            rows[:paired, 0] = np.where(is_mixed, beta(self.mixup, draws), 1.0)
        if self.cutmix:
            boxes = pasted_boxes(beta(self.cutmix, draws), random[:, 2:4], size) / size
            kept = 1 - boxes[:, 2] * boxes[:, 3]
            rows[:paired][is_cut] = np.column_stack([kept, boxes])[is_cut]
        return rows


def beta(alpha: float, uniform: Numbers) -> Numbers:
    """Return numbers of the Beta distribution with both parameters `alpha`, one for each row of uniform ones.

    Johnk's way: of pairs (u, v) take the first with x + y <= 1, x = u^(1/alpha) and y = v^(1/alpha); the
    number is x / (x + y). In logarithms, as x may be far below the smallest number that is not 0.
    """
    # Never log 0.
    log_x, log_y = np.log(uniform.reshape(len(uniform), -1, 2).clip(2.0**-54)).transpose(2, 0, 1) / alpha
    first = (np.logaddexp(log_x, log_y) <= 0).argmax(1)
    places = np.arange(len(uniform))
    # Far apart they are 0 and 1.
    apart = (log_y - log_x)[places, first].clip(-700, 700)
    return np.asarray(1 / (1 + np.exp(apart)))


def pasted_boxes(kept: Numbers, centres: Numbers, size: int) -> NDArray[Any]:
    """Return boxes in pixels of area `1 - kept` around centres, cut off at the edge as by the paper."""
    side = (size * np.sqrt(1 - kept)).astype(np.int64)[:, None]
    middle = (centres * size).astype(np.int64)
    start, end = (middle - side // 2).clip(0, size), (middle + side // 2).clip(0, size)
    return np.concatenate([start, end - start], 1)
