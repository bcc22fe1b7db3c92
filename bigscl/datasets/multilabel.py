"""Multi-label datasets under the single-positive protocol: the common part of VOC and COCO."""

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
from bigscl.datasets.image_files import ImageFile, Resize, key_of
from bigscl.datasets.protocol import observe, split
from bigscl.datasets.writing import MultiLabel, Sample, Shards

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
        """Return one sample per image of an official set, with all labels and the observed ones."""
        matrix = label_matrix([image.labels for image in images], num_classes)
        positives, negatives = observe(
            matrix, seed=self.seed, num_positives=self.num_positives, num_negatives=self.num_negatives
        )
        return [
            Sample(
                key=key_of(Path(image.path.name)),
                image=ImageFile(path=str(image.path), resize=resize),
                label=MultiLabel(labels=image.labels, observed=observed, negatives=absent, boxes=image.boxes),
            )
            for image, observed, absent in zip(images, positives, negatives, strict=True)
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
