"""Multi-label datasets: the common part of VOC and COCO.

The single-positive protocol is that of Cole et al. (CVPR 2021), bit for bit.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bigscl.common.files import BadFile
from bigscl.common.text import printable
from bigscl.common.user_error import UserError
from bigscl.datasets.writer import ImageFile, MultiLabel, Resize, Sample, Shards, key_of

SEED = 1200
VALIDATION_SHARE = 0.2
Box = tuple[int, float, float, float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxedImage:
    """An image file and the boxes of all its objects."""

    path: Path
    boxes: tuple[Box, ...]

    @property
    def labels(self) -> tuple[int, ...]:
        """The classes of the objects, ascending."""
        return tuple(sorted({box[0] for box in self.boxes}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """The number of labels of each image that training sees, and the seed that draws them."""

    num_positives: int
    num_negatives: int
    seed: int

    def samples(self, images: Sequence[BoxedImage], num_classes: int, resize: Resize | None) -> list[Sample]:
        """Return one sample per image of an official set, with all labels and the given ones."""
        matrix = label_matrix([image.labels for image in images], num_classes)
        positives, negatives = draw_given(
            matrix, seed=self.seed, num_positives=self.num_positives, num_negatives=self.num_negatives
        )
        return [
            Sample(
                key=key_of(Path(image.path.name)),
                image=ImageFile(path=str(image.path), resize=resize),
                label=MultiLabel(full=image.labels, given=given, negatives=absent, boxes=image.boxes),
                source="/".join(image.path.parts[-2:]),
            )
            for image, given, absent in zip(images, positives, negatives, strict=True)
        ]


def multi_label_shards(
    kind: str,
    *,
    classes: Sequence[str],
    official_train: Sequence[BoxedImage],
    official_val: Sequence[BoxedImage],
    protocol: Protocol,
    resize: int | None,
    samples_per_shard: int,
) -> Shards:
    """Return `train` and `val` from the official training set, and `test`, the official validation set."""
    square = Resize(size=resize, mode="square") if resize is not None else None
    samples = protocol.samples(official_train, len(classes), square)
    training, validation = split(len(samples), seed=protocol.seed)
    settings: dict[str, Any] = {
        "num_positives": protocol.num_positives,
        "num_negatives": protocol.num_negatives,
        "seed": protocol.seed,
        "resize": resize,
    }
    return Shards(
        kind=kind,
        classes=classes,
        parts={
            "train": [samples[row] for row in training],
            "val": [samples[row] for row in validation],
            "test": protocol.samples(official_val, len(classes), square),
        },
        settings=settings,
        samples_per_shard=samples_per_shard,
    )


def label_matrix(labels: Sequence[tuple[int, ...]], num_classes: int) -> NDArray[np.bool_]:
    """Return `[N, L]`, True where the image has the class."""
    matrix = np.zeros((len(labels), num_classes), dtype=bool)
    for row, classes in zip(matrix, labels, strict=True):
        row[list(classes)] = True
    return matrix


def fraction(position: float, length: float) -> float:
    """Return a pixel position as a fraction of its side; raise UserError if they are not pixels."""
    if not (0 < length < math.inf and math.isfinite(position)):
        raise UserError(f"pixel {position} of {length}, expected numbers, the second larger than 0")
    return round(min(max(position / length, 0.0), 1.0), 5)


def existing_folder(path: Path, what: str) -> Path:
    """Return the path of a folder; raise an error that says what was expected if it is not one."""
    if existing(path, what).is_dir():
        return path
    raise BadFile(f"{printable(str(path))}: a file, expected {what}")


def existing(path: Path, what: str) -> Path:
    """Return the path; raise an error that says what was expected if nothing is there."""
    if not path.exists():
        raise FileNotFoundError(f"{printable(str(path))}: not there, expected {what}")
    return path


# The protocol


def draw_given(
    labels: NDArray[np.bool_], *, seed: int = SEED, num_positives: int = 1, num_negatives: int = 0
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Return (given positives, given negatives) of each row of a `[N, L]` label matrix.

    A row with fewer labels gives all of them. The positives do not depend on `num_negatives`.
    """
    if num_positives < 1 or num_negatives < 0:
        raise UserError(
            f"given labels: {num_positives} positives and {num_negatives} negatives, "
            f"expected at least 1 and 0"
        )
    random = np.random.RandomState(seed)
    positives, negatives = [], []
    for row in labels.astype(bool):
        present, absent = np.flatnonzero(row), np.flatnonzero(~row)
        random.shuffle(present)
        # Also if no negative is kept: the published label files were drawn from this stream.
        random.shuffle(absent)
        positives.append(tuple(sorted(present[:num_positives].tolist())))
        negatives.append(tuple(sorted(absent[:num_negatives].tolist())))
    return positives, negatives


def split(num_samples: int, *, seed: int = SEED) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return (training rows, validation rows) of the official training set, each ascending."""
    order = np.random.RandomState(seed).permutation(num_samples)
    # np.round is half to even, as in the published splits.
    num_training = num_samples - int(np.round(VALIDATION_SHARE * num_samples))
    return np.sort(order[:num_training]), np.sort(order[num_training:])
