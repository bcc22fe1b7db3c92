"""Given labels as a person would give them: of large or of central objects first.

Arroyo, Perona and Cole (Understanding label bias in single positive multi-label learning, 2023) draw the
label of an image by the areas of its objects, or by one over the distances of their boxes' centres to the
image's centre. Here areas are those of the boxes, for shards have no masks; distances are in an image of
1 x 1, and none is less than NEAREST, so that no pixel more or less decides.
"""

import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bigscl.common.user_error import UserError
from bigscl.data.index import Index
from bigscl.data.read_samples import read_metadata

logger = logging.getLogger(__name__)

NEAREST = 0.01


def label_weights(index: Index, by: str) -> NDArray[np.float64]:
    """Return the weight of each full label in the draw, from the boxes in the shards' json.

    A class has the sum over its boxes; without boxes it has 0, and is named only if all others of its image
    are. An image without boxes is drawn from uniformly, which is logged. Shards without any are refused.
    """
    full = index.full_labels()
    weights = np.zeros(len(full.values))
    for sample_id, boxes in _boxes(index):
        places = {int(label): full.offsets[sample_id] + n for n, label in enumerate(full[sample_id])}
        for number, weight in _box_weights(boxes, by):
            if number in places:
                weights[places[number]] += weight
    labelled = np.flatnonzero(full.lengths)
    without = np.add.reduceat(weights, full.offsets[labelled]) <= 0
    if without.all():
        raise UserError(
            f"by {by}: none of these {index.num_samples} samples has boxes of its labels (`boxes` in the "
            f"json of the shards: [class, x0, y0, x1, y1] each, in 0 to 1)."
        )
    if without.any():
        logger.warning(
            "by %s: %d of %d images have no boxes of their labels, first %s; theirs are drawn uniformly",
            *(by, without.sum(), len(labelled), index.name(int(labelled[without.argmax()]))),
        )
    return weights


def _boxes(index: Index) -> Iterator[tuple[int, Any]]:
    """Yield (id, boxes) of every sample; the json of one shard at a time is held."""
    ids = index.ids()
    for own in np.split(ids, np.flatnonzero(np.diff(ids // index.rows_per_shard)) + 1):
        for sample_id, fields in read_metadata(index, own).items():
            yield sample_id, fields.get("boxes", ())


def _box_weights(boxes: Any, by: str) -> list[tuple[int, float]]:
    table = np.array(boxes, np.float64).reshape(-1, 5)
    low, high = table[:, 1:3], table[:, 3:5]
    if by == "size":
        weights = (high - low).clip(0, 1).prod(axis=1)
    else:
        weights = 1 / np.linalg.norm((low + high) / 2 - 0.5, axis=1).clip(NEAREST)
    return list(zip(table[:, 0].astype(int).tolist(), weights.tolist(), strict=True))
