"""ReaL and reviewed labels of ImageNet's validation images, matched to images by their number.

ReaL (Beyer et al., 2020) has labels of all of them. Experts reviewed the predictions of many networks for
20,000 (Shankar et al., 2020; tfds `imagenet2012_multilabel`): for each image classes are correct, unclear
or wrong.
"""

import json
import re
import reprlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bigscl.common.files import BadFile, parse_errors
from bigscl.common.user_error import UserError

NUMBER = re.compile(r"ILSVRC2012_val_(\d{8})")
WNID = re.compile(r"n\d{8}")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RealLabels:
    """The ReaL labels of some predicted images."""

    labels: NDArray[np.int8]
    """[n,L]; a row without a 1 is an image that ReaL does not evaluate."""
    missing: tuple[str, ...]
    """Validation images that were not predicted, evaluated by ReaL or not."""
    num_images: int
    """The size of the whole validation set."""


def read_real_labels(path: Path) -> list[list[int]]:
    """Return the classes of each validation image: item i is of ILSVRC2012_val_{i+1}, and may be empty."""
    if not path.is_file():
        raise FileNotFoundError(
            f"{path}: no such file. It is real.json of google-research/reassessed-imagenet."
        )
    with parse_errors(path, "JSON", "Download it again."):
        lists = json.loads(path.read_text())
    if not isinstance(lists, list) or not all(isinstance(own, list) for own in lists):
        raise BadFile(f"{path}: expected a list with a list of classes for each validation image")
    wrong = (label for own in lists for label in own if type(label) is not int or label < 0)
    if (label := next(wrong, None)) is not None or any(None in own for own in lists):
        raise BadFile(f"{path}: found the class {reprlib.repr(label)}, expected numbers from 0 on")
    return lists


def match_real_labels(
    real_labels: Sequence[Sequence[int]], keys: Sequence[str], class_names: Sequence[str]
) -> RealLabels:
    """Return the labels of images by the ILSVRC2012_val number in their keys, never by order."""
    _check_classes(real_labels, class_names)
    numbers = image_numbers(keys)
    if (largest := max(numbers, default=0)) > len(real_labels):
        raise UserError(f"{image_name(largest)}: predicted, but ReaL has {len(real_labels)} images only")
    labels = np.zeros((len(keys), len(class_names)), np.int8)
    for row, number in zip(labels, numbers, strict=True):
        row[list(real_labels[number - 1])] = 1
    missing = sorted(set(range(1, len(real_labels) + 1)) - set(numbers))
    return RealLabels(
        labels=labels, missing=tuple(image_name(number) for number in missing), num_images=len(real_labels)
    )


def image_numbers(keys: Sequence[str]) -> list[int]:
    """Return the number of each validation image from its key; each may occur once."""
    found = [NUMBER.search(key) for key in keys]
    strange = [key for key, match in zip(keys, found, strict=True) if match is None]
    if strange:
        raise UserError(
            f"{len(strange)} of {len(keys)} keys name no ILSVRC2012_val image, as {strange[0]!r}; expected "
            f"ILSVRC2012_val_ and eight digits somewhere in each: ReaL labels are matched by that number."
        )
    numbers = [int(match[1]) for match in found if match is not None]
    twice = [number for number, count in Counter(numbers).items() if count > 1]
    if twice:
        names = ", ".join(image_name(number) for number in twice[:3])
        raise UserError(f"{len(twice)} images were predicted more than once: {names}. Give each image once.")
    return numbers


def image_name(number: int) -> str:
    """Return the name of a validation image, without its extension."""
    return f"ILSVRC2012_val_{number:08d}"


def _check_classes(real_labels: Sequence[Sequence[int]], class_names: Sequence[str]) -> None:
    largest = max((label for own in real_labels for label in own), default=-1)
    if largest >= len(class_names):
        raise UserError(f"ReaL has class {largest}, the predictions have only {len(class_names)} classes")
    wnids = [name.split()[0] for name in class_names if WNID.match(name)]
    if len(wnids) == len(class_names) and wnids != sorted(wnids):
        place = next(
            n for n, (name, other) in enumerate(zip(wnids, sorted(wnids), strict=True)) if name != other
        )
        raise UserError(
            f"class {place} is {wnids[place]}; ReaL counts classes by sorted wnid, where it is "
            f"{sorted(wnids)[place]}. Index the shards with the classes in that order."
        )


# Reviewed labels


@dataclass(frozen=True, slots=True)
class ReviewedImage:
    """The classes of an image that experts agreed on, and those that they did not."""

    correct: frozenset[int]
    unclear: frozenset[int]


def read_reviewed_labels(path: Path, class_names: Sequence[str]) -> dict[int, ReviewedImage]:
    """Return the images that count, by their number: those with a correct class that are not problematic.

    The file is that of the authors (`initial_annots`, `problematic_images`), or has the classes alone:
    `{key: {"correct": [...], "unclear": [...], "wrong": [...]}}`. Classes are wnids or numbers.
    """
    if not path.is_file():
        raise FileNotFoundError(
            f"{path}: no such file. It is human_accuracy_v3.0.0.json of tfds imagenet2012_multilabel."
        )
    with parse_errors(path, "reviewed labels in JSON", "Download it again."):
        content = json.loads(path.read_text())
        images = content.get("initial_annots", content)
        problematic = {_number(key) for key in content.get("problematic_images", ())}
        numbers = {name.split()[0]: number for number, name in enumerate(class_names) if WNID.match(name)}
        found = {
            number: ReviewedImage(
                *(_reviewed_classes(classes.get(kind, ()), numbers, class_names) for kind in REVIEWED)
            )
            for key, classes in images.items()
            if (number := _number(key)) is not None and number not in problematic
        }
    return {number: image for number, image in found.items() if image.correct}


REVIEWED = ("correct", "unclear")


def _number(key: str) -> int | None:
    """Return the number of a validation image; None for an image of another set."""
    match = NUMBER.search(key)
    return None if match is None else int(match[1])


def _reviewed_classes(
    values: Sequence[object], numbers: Mapping[str, int], class_names: Sequence[str]
) -> frozenset[int]:
    classes = [numbers.get(value, -1) if isinstance(value, str) else value for value in values]
    for value, number in zip(values, classes, strict=True):
        if type(number) is not int or not 0 <= number < len(class_names):
            raise UserError(
                f"class {reprlib.repr(value)} is none of the {len(class_names)} classes, as "
                f"{class_names[0]!r}; expected wnids that begin the names of classes, or numbers"
            )
    return frozenset(number for number in classes if type(number) is int)
