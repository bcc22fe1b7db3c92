"""Pascal VOC: read a VOCdevkit folder."""

from pathlib import Path
from xml.etree import ElementTree

from bigscl.common.files import BadFile, parse_errors
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

# fmt: off
CLASSES = (
    "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow",
    "diningtable", "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train",
    "tvmonitor",
)
# fmt: on


def voc(source: Path, *, year: int, protocol: Protocol, resize: int | None, samples_per_shard: int) -> Shards:
    """Return the shards of VOC: official `train` gives train and val, official `val` is the test part."""
    root = _root(source, year)
    return multi_label_shards(
        "voc",
        classes=CLASSES,
        official_train=_official(root, "train"),
        official_val=_official(root, "val"),
        protocol=protocol,
        resize=resize,
        samples_per_shard=samples_per_shard,
    )


def _root(source: Path, year: int) -> Path:
    """Return the folder that holds `Annotations`: `source`, or VOC<year> or VOCdevkit/VOC<year> in it."""
    existing_folder(source, "a VOCdevkit folder")
    candidates = (source, source / f"VOC{year}", source / "VOCdevkit" / f"VOC{year}")
    for root in candidates:
        if (root / "Annotations").is_dir():
            return root
    raise FileNotFoundError(
        f"{source}: no folder Annotations in it, nor in VOC{year} or VOCdevkit/VOC{year}. "
        f"Point to the VOCdevkit, and name its year."
    )


def _official(root: Path, name: str) -> list[BoxedImage]:
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
        _box(item, width, height, annotation)
        for item in tree.findall("object")
        if item.findtext("difficult", "0").strip() != "1"
    ]
    image = existing(root / "JPEGImages" / f"{key}.jpg", "a listed image")
    return BoxedImage(path=image, boxes=tuple(boxes))


def _box(item: ElementTree.Element, width: float, height: float, file: Path) -> Box:
    name = item.findtext("name", "").strip()
    if name not in CLASSES:
        raise BadFile(f"{file}: object {name!r} is none of the {len(CLASSES)} VOC classes")
    x0, y0, x1, y1 = (_number(item, f"bndbox/{edge}", file) for edge in ("xmin", "ymin", "xmax", "ymax"))
    # VOC counts pixels from 1 and includes the last one.
    with parse_errors(file, "an annotation of VOC", "Unpack the devkit again."):
        return (
            CLASSES.index(name),
            fraction(x0 - 1, width),
            fraction(y0 - 1, height),
            fraction(x1, width),
            fraction(y1, height),
        )


def _number(element: ElementTree.Element, path: str, file: Path) -> float:
    text = element.findtext(path)
    try:
        return float(text or "")
    except ValueError:
        raise BadFile(f"{file}: {path} is {text!r}, expected a number") from None
