"""Multi-label datasets with boxes: Pascal VOC and COCO.

The single-positive protocol is that of Cole et al. (CVPR 2021), bit for bit.
"""

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any
from xml.etree import ElementTree

import numpy as np
import typer
from numpy.typing import NDArray

from bigscl.common.files import BadFile, parse_errors
from bigscl.common.text import printable, reason_of
from bigscl.common.user_error import UserError
from bigscl.datasets.writer import ImageFile, MultiLabel, Resize, Sample, Shards, key_of

SEED = 1200
Seed = Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed of the order, the split and the labels.")]
VALIDATION_SHARE = 0.2
Box = tuple[int, float, float, float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxedImage:
    """An image file and the boxes of all its objects."""

    path: Path
    boxes: tuple[Box, ...]

    @property
    def labels(self) -> tuple[int, ...]:
        return tuple(sorted({box[0] for box in self.boxes}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """Which labels of a multi-label dataset training may see, and how its images are stored."""

    num_positives: Annotated[
        int, typer.Option("--positives", min=1, max=10**7, help="Number of positive labels kept per image.")
    ] = 1
    num_negatives: Annotated[
        int, typer.Option("--negatives", min=0, max=10**7, help="Number of negative labels kept per image.")
    ] = 0
    seed: Seed = SEED
    resize: Annotated[
        int | None,
        typer.Option(min=1, max=10_000, help="Resize images to this square. Default: original bytes."),
    ] = None

    def samples(self, images: Sequence[BoxedImage], num_classes: int) -> list[Sample]:
        """Return one sample per image of an official set, with all labels and the given ones."""
        square = None if self.resize is None else Resize(size=self.resize, mode="square")
        matrix = label_matrix([image.labels for image in images], num_classes)
        positives, negatives = draw_given(
            matrix, seed=self.seed, num_positives=self.num_positives, num_negatives=self.num_negatives
        )
        return [
            Sample(
                key=key_of(Path(image.path.name)),
                image=ImageFile(path=str(image.path), resize=square),
                label=MultiLabel(full=image.labels, given=given, negatives=absent, boxes=image.boxes),
                source="/".join(image.path.parts[-2:]),
            )
            for image, given, absent in zip(images, positives, negatives, strict=True)
        ]


def multi_label_shards(
    kind: str,
    classes: Sequence[str],
    official_train: Sequence[BoxedImage],
    official_val: Sequence[BoxedImage],
    protocol: Protocol,
) -> Shards:
    """Return `train` and `val` from the official training set, and `test`, the official validation set."""
    samples = protocol.samples(official_train, len(classes))
    training, validation = split(len(samples), seed=protocol.seed)
    return Shards(
        kind=kind,
        classes=classes,
        parts={
            "train": [samples[row] for row in training],
            "val": [samples[row] for row in validation],
            "test": protocol.samples(official_val, len(classes)),
        },
        settings=asdict(protocol),
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
    if not path.exists():
        raise FileNotFoundError(f"{printable(str(path))}: not there, expected {what}")
    return path


# The protocol


def draw_given(
    labels: NDArray[np.bool_], *, seed: int = SEED, num_positives: int = 1, num_negatives: int = 0
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Return (given positives, given negatives) of each row of a `[N, L]` matrix: as many as there are."""
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


# Pascal VOC: a VOCdevkit folder

# fmt: off
VOC_CLASSES = (
    "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow",
    "diningtable", "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train",
    "tvmonitor",
)
# fmt: on


def voc(source: Path, *, year: int, protocol: Protocol) -> Shards:
    """Return the shards of VOC: official `train` gives train and val, official `val` is the test part."""
    root = _root(source, year)
    train, val = (_official_voc(root, name) for name in ("train", "val"))
    return multi_label_shards("voc", VOC_CLASSES, train, val, protocol)


def _root(source: Path, year: int) -> Path:
    """Return the folder that holds `Annotations`: `source`, or VOC<year> or VOCdevkit/VOC<year> in it."""
    existing_folder(source, "a VOCdevkit folder")
    for root in (source, source / f"VOC{year}", source / "VOCdevkit" / f"VOC{year}"):
        if (root / "Annotations").is_dir():
            return root
    raise FileNotFoundError(
        f"{source}: no folder Annotations in it, nor in VOC{year} or VOCdevkit/VOC{year}. "
        f"Point to the VOCdevkit, and name its year."
    )


def _official_voc(root: Path, name: str) -> list[BoxedImage]:
    """Return the images of an official set by file name, without those whose objects are all difficult."""
    listing = existing(root / "ImageSets" / "Main" / f"{name}.txt", "the list of images of an official set")
    with parse_errors(listing, "a list of images", "Unpack the devkit again."):
        keys = sorted(listing.read_text().split())
    images = [_read_image(root, key) for key in keys]
    return [image for image in images if image.boxes]


def _read_image(root: Path, key: str) -> BoxedImage:
    annotation = existing(root / "Annotations" / f"{key}.xml", "the annotation of a listed image")
    with parse_errors(annotation, "well-formed XML", "Unpack the devkit again."):
        tree = ElementTree.parse(annotation).getroot()
    width, height = _number(tree, "size/width", annotation), _number(tree, "size/height", annotation)
    boxes = [
        _voc_box(item, width, height, annotation)
        for item in tree.findall("object")
        if item.findtext("difficult", "0").strip() != "1"
    ]
    image = existing(root / "JPEGImages" / f"{key}.jpg", "a listed image")
    return BoxedImage(path=image, boxes=tuple(boxes))


def _voc_box(item: ElementTree.Element, width: float, height: float, file: Path) -> Box:
    name = item.findtext("name", "").strip()
    if name not in VOC_CLASSES:
        raise BadFile(f"{file}: object {name!r} is none of the {len(VOC_CLASSES)} VOC classes")
    x0, y0, x1, y1 = (_number(item, f"bndbox/{edge}", file) for edge in ("xmin", "ymin", "xmax", "ymax"))
    # VOC counts pixels from 1 and includes the last one.
    with parse_errors(file, "an annotation of VOC", "Unpack the devkit again."):
        left, top = fraction(x0 - 1, width), fraction(y0 - 1, height)
        return VOC_CLASSES.index(name), left, top, fraction(x1, width), fraction(y1, height)


def _number(element: ElementTree.Element, path: str, file: Path) -> float:
    text = element.findtext(path)
    try:
        return float(text or "")
    except ValueError:
        raise BadFile(f"{file}: {path} is {text!r}, expected a number") from None


# COCO: a folder of images and an instances file


def coco(source: Path, *, year: int, protocol: Protocol) -> Shards:
    """Return the shards of COCO: official `train` gives train and val, official `val` is the test part."""
    existing_folder(source, "a folder with annotations/ and the images")
    classes, official_train = _official_coco(source, f"train{year}")
    val_classes, official_val = _official_coco(source, f"val{year}")
    if classes != val_classes:
        raise BadFile(f"{source}: the categories of train{year} and val{year} differ, expected the same list")
    return multi_label_shards("coco", classes, official_train, official_val, protocol)


def _official_coco(source: Path, name: str) -> tuple[list[str], list[BoxedImage]]:
    """Return (class names, images with boxes), ids sorted as strings."""
    file = existing(source / "annotations" / f"instances_{name}.json", "COCO's instances file")
    folder = existing_folder(source / name, "the folder of its images")
    with parse_errors(file, "well-formed JSON", "Unpack the annotations again."):
        # Outlines are most of the file and are not needed: they are dropped while it is read.
        content = json.loads(
            file.read_bytes(), object_pairs_hook=lambda pairs: {k: v for k, v in pairs if k != "segmentation"}
        )
    try:
        classes, boxes = [category["name"] for category in content["categories"]], _coco_boxes(content)
        if wrong := [name for name in classes if not isinstance(name, str) or not name.isprintable()]:
            raise UserError(f"the category {wrong[0]!r} has no printable name")
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


def _is_inside(name: Any) -> bool:
    return isinstance(name, str) and not Path(name).is_absolute() and ".." not in Path(name).parts


def _coco_boxes(content: dict[str, Any]) -> dict[int, tuple[Box, ...]]:
    """Return the boxes of each image that has any, crowds included; classes are in the file's order."""
    numbers = {category["id"]: number for number, category in enumerate(content["categories"])}
    sides = {image["id"]: (image["width"], image["height"]) for image in content["images"]}
    boxes: dict[int, list[Box]] = defaultdict(list)
    for item in content["annotations"]:
        image = item["image_id"]
        if type(image) is not int:
            raise UserError(f"the image id {image!r} is not a number")
        (width, height), (left, top, box_width, box_height) = sides[image], item["bbox"]
        x0, y0 = fraction(left, width), fraction(top, height)
        x1, y1 = fraction(left + box_width, width), fraction(top + box_height, height)
        boxes[image].append((numbers[item["category_id"]], x0, y0, x1, y1))
    return {image: tuple(own) for image, own in boxes.items()}
