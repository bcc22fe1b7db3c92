"""Labels, boxes and questions in other formats: COCO, Label Studio, FiftyOne, MultiLabel-ImageNet."""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TextIO
from urllib.parse import quote
from xml.sax.saxutils import quoteattr

from bigscl.common.files import atomic_write
from bigscl.common.text import printable
from bigscl.common.user_error import UserError
from bigscl.data.labels.real_labels import WNID

LabelFormat = Literal["coco", "label-studio", "fiftyone", "multilabel-imagenet"]
FILES: dict[LabelFormat, tuple[str, ...]] = {
    "coco": (),
    "label-studio": ("tasks.json", "config.xml"),
    "fiftyone": ("labels.json", "boxes.json"),
    "multilabel-imagenet": (),
}
"""Files of the folder that is written; COCO and MultiLabel-ImageNet are a single file."""
Box = tuple[float, float, float, float]
DIGITS = 4
"""Of pixels and percents: enough to return to fractions of the image with as many digits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """A class of an image."""

    number: int
    """Of the class."""
    score: float
    box: Box | None = None
    """x0, y0, x1, y1 as fractions of the upright image; None if it is not known where the class is."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """More to say of it, as JSON: whether it is annotated."""
    question: str | None = None
    """Text of the question whether the image shows the class; None for a label."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledImage:
    """An image file and its labels."""

    id: int
    file: str
    """Its path below the folder of all images."""
    labels: Sequence[Label]
    """All of them labels, or all of them questions."""
    width: int = 0
    height: int = 0
    """In pixels; 0 for questions, which need no size."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """More to say of it, as JSON: its shard and key, by which others find it again."""


Write = Callable[[LabelledImage], None]


@contextmanager
def label_writer(
    form: LabelFormat,
    output: Path,
    class_names: Sequence[str],
    *,
    made_by: str,
    images: str = "",
    info: Mapping[str, Any] | None = None,
    questions: bool = False,
) -> Iterator[Write]:
    """Yield `write(image)`; the files appear whole at the end, or not at all.

    `made_by` says where the labels come from, `info` more of that for COCO. `images` is put before the name
    of each image: a folder, or an address as Label Studio needs it. FiftyOne is told where the images are
    when it imports, and takes no `questions`.
    """
    if form == "coco":
        if output.suffix != ".json":
            raise UserError(f"{output}: COCO annotations are written as .json")
        with atomic_write(output) as partial, partial.open("w") as file:
            with _coco(file, class_names, {"description": made_by, **(info or {})}, images) as write:
                yield write
        return
    if form == "multilabel-imagenet":
        if output.suffix not in (".txt", ".tsv"):
            raise UserError(f"{output}: lines of MultiLabel-ImageNet are written as .txt or .tsv")
        with atomic_write(output) as partial, partial.open("w", encoding="utf-8") as file:
            yield _multilabel_imagenet(file, class_names)
        return
    check_folder(output, form, FILES[form])
    first, second = (atomic_write(output / name) for name in FILES[form])
    with first as first_file, second as other, first_file.open("w") as file:
        if form == "label-studio":
            interface = QUESTION_CONFIG if questions else label_studio_config(class_names)
            other.write_text(interface, encoding="utf-8")
            with _label_studio(file, class_names, made_by, images) as write:
                yield write
        else:
            with other.open("w") as boxes, _fiftyone(file, boxes, class_names) as write:
                yield write


def check_folder(output: Path, what: str, files: Sequence[str]) -> None:
    """Refuse an output that is a file, or that was meant to be one."""
    if output.is_file() or output.suffix in (".json", ".jsonl", ".csv", ".parquet", ".xml", ".zip"):
        raise UserError(f"{output}: {what} is written as a folder with {' and '.join(files)}")


def _json(value: Any) -> str:
    """Return JSON in ASCII, whatever letters a name has; never NaN, which is none."""
    return json.dumps(value, allow_nan=False)


def _item_writer(file: TextIO) -> Callable[[str], None]:
    """Return a function that writes the items of a list or an object, one per line."""
    separator = "\n"

    def write(item: str) -> None:
        nonlocal separator
        file.write(separator + item)
        separator = ",\n"

    return write


def _corner_and_size(box: Box, width: float, height: float) -> tuple[float, float, float, float]:
    """Return x, y, width, height of a box in an image of this size."""
    x, y, right, bottom = box[0] * width, box[1] * height, box[2] * width, box[3] * height
    return round(x, DIGITS), round(y, DIGITS), round(right - x, DIGITS), round(bottom - y, DIGITS)


# COCO


@contextmanager
def _coco(file: TextIO, class_names: Sequence[str], info: Mapping[str, Any], images: str) -> Iterator[Write]:
    """Write images with all of their labels, and an annotation for each label with a box or question."""
    # Detectors take 0 for the background, and COCO's evaluation takes annotation 0 for none.
    categories = [{"id": number + 1, "name": name} for number, name in enumerate(class_names)]
    head = {"info": info, "licenses": [], "categories": categories}
    file.write(f'{_json(head)[:-1]}, "images": [')
    # Annotations follow the images, and are as many: not in memory.
    with tempfile.TemporaryFile("w+", dir=Path(file.name).parent) as annotations:
        write_image, write_annotation, count = _item_writer(file), _item_writer(annotations), 0
        asked = set[int]()  # images of questions; several writes may have the same

        def write(image: LabelledImage) -> None:
            nonlocal count
            entry = {"id": image.id, "file_name": with_folder(images, image.file), **image.facts}
            labels = [
                {"category_id": label.number + 1, "score": label.score, **label.facts}
                for label in image.labels
            ]
            if image.width:
                write_image(_json(entry | {"width": image.width, "height": image.height, "labels": labels}))
            elif image.id not in asked:
                asked.add(image.id)
                write_image(_json(entry))
            for label, values in zip(image.labels, labels, strict=True):
                if label.box is not None or label.question is not None:
                    count += 1
                    extra = _coco_box(label.box, image) if label.box else {"attributes": {"yes": None}}
                    write_annotation(_json({"id": count, "image_id": image.id, **values, **extra}))

        yield write
        file.write('\n], "annotations": [')
        annotations.seek(0)
        shutil.copyfileobj(annotations, file)
        file.write("\n]}\n")


def _coco_box(box: Box, image: LabelledImage) -> dict[str, Any]:
    bbox = _corner_and_size(box, image.width, image.height)
    return {"bbox": bbox, "area": round(bbox[2] * bbox[3], DIGITS), "iscrowd": 0}


# Label Studio

IMAGE, CHOICES, BOXES, ANSWER = "image", "labels", "boxes", "answer"
"""Names of the parts of the labelling interfaces, which predictions and answers refer to."""
QUESTION_CONFIG = (
    f'<View><Image name="{IMAGE}" value="${IMAGE}"/><Header value="$question"/>'
    f'<Choices name="{ANSWER}" toName="{IMAGE}"><Choice value="yes" hotkey="y"/>'
    '<Choice value="no" hotkey="n"/></Choices></View>\n'
)
"""The labelling interface for questions."""


def label_studio_config(class_names: Sequence[str]) -> str:
    """Return the labelling interface for these tasks: several choices, and boxes."""
    values = [quoteattr(printable(name)) for name in class_names]
    choices = "".join(f"    <Choice value={value}/>\n" for value in values)
    labels = "".join(f"    <Label value={value}/>\n" for value in values)
    return (
        f'<View>\n  <Image name="{IMAGE}" value="${IMAGE}"/>\n'
        f'  <Choices name="{CHOICES}" toName="{IMAGE}" choice="multiple">\n{choices}  </Choices>\n'
        f'  <RectangleLabels name="{BOXES}" toName="{IMAGE}">\n{labels}  </RectangleLabels>\n</View>\n'
    )


@contextmanager
def _label_studio(file: TextIO, class_names: Sequence[str], made_by: str, images: str) -> Iterator[Write]:
    # As in the labelling interface, which is XML and so has no control characters.
    names = [printable(name) for name in class_names]
    file.write("[")
    write_task = _item_writer(file)

    def write(image: LabelledImage) -> None:
        data = {IMAGE: image_address(images, image.file), "id": image.id, **image.facts}
        for label in image.labels:
            if label.question is not None:  # A task for each: what is not answered can be skipped.
                asked = {"question": label.question, "class": class_names[label.number], "score": label.score}
                write_task(_json({"data": {**data, **asked, **label.facts}}))
        if image.width:
            data["labels"] = [
                {"name": names[label.number], "score": label.score, **label.facts} for label in image.labels
            ]
            write_task(_json({"data": data, "predictions": _predictions(image, names, made_by)}))

    yield write
    file.write("\n]\n")


def _predictions(image: LabelledImage, names: Sequence[str], made_by: str) -> list[dict[str, Any]]:
    if not image.labels:
        return []
    common = {"to_name": IMAGE, "original_width": image.width, "original_height": image.height}
    chosen = [names[label.number] for label in image.labels]
    result: list[dict[str, Any]] = [
        {"id": "labels", "type": "choices", "from_name": CHOICES, **common, "value": {"choices": chosen}}
    ]
    for label in image.labels:
        if label.box is not None:
            rectangle = dict(
                zip(("x", "y", "width", "height"), _corner_and_size(label.box, 100, 100), strict=True)
            )
            value = {**rectangle, "rotation": 0, "rectanglelabels": [names[label.number]]}
            kind = {"id": f"box-{label.number}", "type": "rectanglelabels", "from_name": BOXES}
            result.append({**kind, **common, "value": value, "score": label.score})
    mean = round(sum(label.score for label in image.labels) / len(image.labels), DIGITS)
    return [{"model_version": made_by, "score": mean, "result": result}]


def image_address(images: str, file: str) -> str:
    """Return where Label Studio finds an image: escaped, except in a bucket, where names are plain."""
    scheme, separator, _ = images.partition("://")
    plain = "://" in file or (separator and scheme not in ("http", "https"))
    return with_folder(images, file if plain else quote(file))


def with_folder(images: str, file: str) -> str:
    """Return the path of an image below the folder of all images; a URL has its own."""
    return images + file if file and "://" not in file else file


# FiftyOne


@contextmanager
def _fiftyone(labels: TextIO, boxes: TextIO, class_names: Sequence[str]) -> Iterator[Write]:
    """Write a FiftyOneImageClassificationDataset and a FiftyOneImageDetectionDataset of the same images."""
    for file in (labels, boxes):
        file.write(f'{{"classes": {_json(list(class_names))}, "labels": {{')
    write_labels, write_boxes = _item_writer(labels), _item_writer(boxes)

    def write(image: LabelledImage) -> None:
        # FiftyOne finds images by their names without extension.
        name = _json(os.path.splitext(image.file)[0])
        targets = [
            {"label": label.number, "confidence": label.score, "attributes": label.facts}
            for label in image.labels
        ]
        placed = [
            {**target, "bounding_box": _corner_and_size(label.box, 1, 1)}
            for label, target in zip(image.labels, targets, strict=True)
            if label.box is not None
        ]
        write_labels(f"{name}: {_json(targets)}")
        write_boxes(f"{name}: {_json(placed)}")

    yield write
    for file in (labels, boxes):
        file.write("\n}}\n")


# MultiLabel-ImageNet


def _multilabel_imagenet(file: TextIO, class_names: Sequence[str]) -> Write:
    """Return `write(image)`, which writes a line as `bigscl.data.labels.label_files` reads it."""

    def write(image: LabelledImage) -> None:
        given = [label.number for label in image.labels if label.facts["annotated"]]
        if len(given) != 1:
            raise UserError(
                f"{printable(image.file)}: has {len(given)} given labels, lines of MultiLabel-ImageNet have "
                f"one. Choose another --format."
            )
        name = class_names[given[0]]
        folder = printable(name.split()[0] if WNID.match(name) else name)
        numbers = ",".join(str(label.number) for label in image.labels)
        scores = ",".join(f"{label.score:.{DIGITS}f}" for label in image.labels)
        path = f"{folder}/{printable(image.file.rpartition('/')[2])}"
        file.write(f"{path}\t{given[0]}\t{numbers}\t{scores}\n")

    return write
