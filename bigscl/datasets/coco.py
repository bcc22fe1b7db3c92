"""COCO: read a folder of images and an instances file."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from bigscl.common.files import BadFile, parse_errors
from bigscl.common.text import reason_of
from bigscl.common.user_error import UserError
from bigscl.datasets.multilabel import (
    Box,
    BoxedImage,
    Protocol,
    existing,
    existing_folder,
    fraction,
    multi_label_shards,
)
from bigscl.datasets.writer import Shards


def coco(
    source: Path, *, year: int, protocol: Protocol, resize: int | None, samples_per_shard: int
) -> Shards:
    """Return the shards of COCO: official `train` gives train and val, official `val` is the test part."""
    existing_folder(source, "a folder with annotations/ and the images")
    classes, official_train = _official(source, f"train{year}")
    val_classes, official_val = _official(source, f"val{year}")
    if classes != val_classes:
        raise BadFile(f"{source}: the categories of train{year} and val{year} differ, expected the same list")
    return multi_label_shards(
        "coco",
        classes=classes,
        official_train=official_train,
        official_val=official_val,
        protocol=protocol,
        resize=resize,
        samples_per_shard=samples_per_shard,
    )


def _official(source: Path, name: str) -> tuple[list[str], list[BoxedImage]]:
    """Return (class names, images with boxes), ids sorted as strings."""
    file = existing(source / "annotations" / f"instances_{name}.json", "COCO's instances file")
    folder = existing_folder(source / name, "the folder of its images")
    with parse_errors(file, "well-formed JSON", "Unpack the annotations again."):
        # Outlines are most of the file and are not needed: they are dropped while it is read.
        content = json.loads(file.read_bytes(), object_hook=_without_outline)
    try:
        classes, boxes = _class_names(content), _boxes(content)
        names = {str(image["id"]): image["file_name"] for image in content["images"] if image["id"] in boxes}
        if strange := [name for name in names.values() if not _is_inside(name)]:
            raise UserError(f"the file name {strange[0]!r} is not that of a file in the folder")
    except KeyError as error:
        raise BadFile(f"{file}: {error} is used but missing, expected an instances file of COCO") from None
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise BadFile(f"{file}: {reason_of(error)}; expected an instances file of COCO") from None
    return classes, [
        BoxedImage(
            path=existing(folder / names[key], f"an image named in {file.name}"), boxes=boxes[int(key)]
        )
        for key in sorted(names)
    ]


def _class_names(content: dict[str, Any]) -> list[str]:
    names = [category["name"] for category in content["categories"]]
    if wrong := [name for name in names if not isinstance(name, str) or not name.isprintable()]:
        raise UserError(f"the category {wrong[0]!r} has no printable name")
    return names


def _is_inside(name: Any) -> bool:
    return isinstance(name, str) and not Path(name).is_absolute() and ".." not in Path(name).parts


def _boxes(content: dict[str, Any]) -> dict[int, tuple[Box, ...]]:
    """Return the boxes of each image that has any, crowds included; classes are in the file's order."""
    numbers = {category["id"]: number for number, category in enumerate(content["categories"])}
    sides = {image["id"]: (image["width"], image["height"]) for image in content["images"]}
    boxes: dict[int, list[Box]] = defaultdict(list)
    for item in content["annotations"]:
        image = item["image_id"]
        if type(image) is not int:
            raise UserError(f"the image id {image!r} is not a number")
        (width, height), (left, top, box_width, box_height) = sides[image], item["bbox"]
        boxes[image].append(
            (
                numbers[item["category_id"]],
                fraction(left, width),
                fraction(top, height),
                fraction(left + box_width, width),
                fraction(top + box_height, height),
            )
        )
    return {image: tuple(own) for image, own in boxes.items()}


def _without_outline(item: dict[str, Any]) -> dict[str, Any]:
    item.pop("segmentation", None)
    return item
