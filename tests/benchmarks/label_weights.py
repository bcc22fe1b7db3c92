"""Given labels as a person would give them: of large or of central objects first, or some of them wrong.

Arroyo, Perona and Cole (Understanding label bias in single positive multi-label learning, 2023) draw the
label of an image by the areas of its objects, or by one over the distances of their boxes' centres to the
image's centre. Here areas are those of the boxes, for shards have no masks; distances are in an image of
1 x 1, and none is less than NEAREST, so that no pixel more or less decides.
"""

import csv
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bigscl.common.user_error import UserError
from bigscl.data.index import Index, with_fingerprint
from bigscl.data.read_samples import read_metadata
from bigscl.store import Ragged

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


def draw_weighted(index: Index, seed: int, by: str) -> Index:
    """Return the samples with one given label each, drawn from the full ones with the chances of `by`."""
    full, weights = index.full_labels(), label_weights(index, by)
    rows = np.repeat(np.arange(len(full)), full.lengths)
    # The first of several exponential waiting times is that of value i with probability w_i / sum of w.
    waits = -np.log1p(-np.random.default_rng(seed).random(len(rows)))
    waits /= np.where(weights > 0, weights, 1.0)
    order = np.lexsort((waits, weights <= 0, rows))
    first = order[np.arange(len(rows)) == full.offsets[rows]]
    return with_fingerprint(
        replace(index, given=Ragged.from_lengths(full.lengths.clip(max=1), full.values[first]))
    )


def write_noisy_labels(index: Index, path: Path, share: float, seed: int) -> None:
    """Write a file for `data.labels_file`: given labels, wrong in a share of the images."""
    random = np.random.default_rng(seed)
    full = index.labels_of(index.ids(), "full") == 1
    given = index.labels_of(index.ids(), "given") == 1
    able = np.flatnonzero(given.any(axis=1) & ~full.all(axis=1))
    for row in random.permutation(able)[: round(share * len(able))]:
        given[row, random.choice(np.flatnonzero(given[row]))] = False
        given[row, random.choice(np.flatnonzero(~full[row]))] = True
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["key", "positives"])
        for sample, row in zip(index.ids().tolist(), given, strict=True):
            writer.writerow([index.name(sample), ";".join(map(str, np.flatnonzero(row)))])


if __name__ == "__main__":
    import argparse

    from bigscl.config import load_config
    from bigscl.training.run_folder import open_data

    parser = argparse.ArgumentParser()
    parser.add_argument("config", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--share", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    config = load_config(options.config, [f"--data.given.seed={options.seed}"])
    write_noisy_labels(open_data(config).train, options.output, options.share, options.seed)
