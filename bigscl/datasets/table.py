"""Tables of images and their labels: CSV, TSV, Parquet, JSON lines, and Hugging Face datasets."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from bigscl.common.files import LONGEST_NUMBER, BadFile, ClassNumbers, Row, parse_errors, read_table
from bigscl.common.text import first_few, printable
from bigscl.common.url_secrets import public, take
from bigscl.common.user_error import UserError
from bigscl.datasets.writer import (
    ImageFile,
    MultiLabel,
    Picture,
    RemoteImage,
    Resize,
    Sample,
    Shards,
    encoded_image,
    key_of,
)

# Columns by the names that people give them; the first of a table counts.
IMAGE_NAMES = (
    *("image", "path", "file", "filename", "file_name", "filepath", "file_path", "image_path"),
    *("url", "image_url", "img", "image_id"),
)
LABEL_NAMES = (
    *("labels", "label", "classes", "class", "categories", "category", "positives", "tags", "target"),
    "fine_label",
)
SPLIT_NAMES = ("split", "subset", "partition", "set", "fold")
SPLITS = {"training": "train", "validation": "val", "valid": "val", "dev": "val", "testing": "test"}
EDGES = ("x0", "y0", "x1", "y1")
Edges = tuple[float, float, float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class TableOptions:
    """How a table is to be read. Columns that are not named are found by their usual names."""

    image: str | None = None
    label: str | None = None
    split: str | None = None
    separator: str = ";"
    """Between the labels of a cell of text."""
    full: tuple[str, ...] = ()
    """Splits whose labels are all classes of an image: their other classes are absent."""
    class_names: tuple[str, ...] | None = None
    """Names by number. Default: the labels of the table, sorted, or its numbers."""
    resize: int | None = None
    seed: int = 0


@dataclass(slots=True, kw_only=True)
class LabelledImage:
    """An image of a table, with the labels of all of its rows as they were written."""

    image: Picture
    source: str
    labels: list[str | int] = field(default_factory=list)
    boxes: list[tuple[str | int, Edges]] = field(default_factory=list)


Parts = dict[str, dict[str, LabelledImage]]
"""Images by split, then by their source."""


def table(path: Path, images: Path | None, options: TableOptions) -> Shards:
    """Return the shards of a table with an image, and one or several labels, in each row.

    Images are files in the folder `images` (default: that of the table) or URLs. An image may have several
    rows. Boxes are the columns x0, y0, x1, y1, or lists [class, x0, y0, x1, y1] in the column `boxes`.
    """
    return _shards("table", _read(path, images, options), options, path)


def labelled_paths(
    path: Path, class_names: Sequence[str] | None
) -> tuple[list[tuple[str, list[int]]], tuple[str, ...]]:
    """Return the training images of a table with their classes, in its order, and the classes' names."""
    images = list(_read(path, None, TableOptions()).get("train", {}).values())
    names = tuple(class_names or _class_names(images))
    numbers = ClassNumbers(names)
    return [
        (image.source, sorted({numbers.of(label, image.source) for label in image.labels}))
        for image in images
    ], names


def _read(path: Path, images: Path | None, options: TableOptions) -> Parts:
    """Return the images of a table by their splits, in its order."""
    found: list[_Columns] = []

    def check(names: list[str]) -> None:
        found[:] = [_Columns.of(names, options)]

    rows = read_table(path, check, "a header that names a column of images and one of labels")
    if not rows:
        raise BadFile(f"{path}: no rows")
    columns, folder = found[0], path.parent if images is None else images
    short = _short(options)
    parts: Parts = {}
    missing: dict[str, None] = {}
    for number, row in enumerate(rows, 1):
        with parse_errors(f"{path}: row {number}", "an image with labels", "Correct the row, or remove it."):
            source = _text(row, columns.image)
            labels = _labels(row.get(columns.label), options.separator)
            split = _split_name(row.get(columns.split)) if columns.split else "train"
            boxes = _boxes(row, labels)
        of_split = parts.setdefault(split, {})
        if source not in of_split:
            image: Picture = RemoteImage(url=take(source), resize=short)
            if "://" not in source:
                image = ImageFile(path=str(folder / source), resize=short)
                if not Path(image.path).is_file():
                    missing[image.path] = None
            of_split[source] = LabelledImage(image=image, source=public(take(source)))
        of_split[source].labels += [label for label in labels if label not in of_split[source].labels]
        of_split[source].boxes += boxes
    if missing:
        raise BadFile(
            f"{path}: {len(missing)} images are not there: {first_few(missing, len(missing), most=3)}. "
            f"--images FOLDER says where the paths of the table start."
        )
    return parts


def _shards(kind: str, parts: Parts, options: TableOptions, origin: object) -> Shards:
    """Return the shards of labelled images. A part with one label for every image has plain `cls` labels."""
    everything = [image for part in parts.values() for image in part.values()]
    classes = options.class_names or _class_names(everything)
    numbers = ClassNumbers(classes)
    if unknown := [split for split in options.full if split not in parts]:
        raise UserError(f"{origin}: no split '{printable(unknown[0])}', found {', '.join(parts)}")
    written = {
        split: _samples(list(part.values()), numbers, split in options.full) for split, part in parts.items()
    }
    if "train" in written:
        # RandomState, because its stream is fixed: any version of numpy gives the same shards.
        order = np.random.RandomState(options.seed).permutation(len(written["train"]))
        written["train"] = [written["train"][row] for row in order]
    return Shards(
        kind=kind,
        classes=classes,
        parts=dict(sorted(written.items(), key=lambda part: part[0] != "train")),
        settings={"resize": options.resize, "seed": options.seed, "full": list(options.full)},
    )


def _samples(images: Sequence[LabelledImage], numbers: ClassNumbers, full: bool) -> list[Sample]:
    labels = [tuple(sorted({numbers.of(label, image.source) for label in image.labels})) for image in images]
    single = not full and all(len(own) == 1 for own in labels) and not any(image.boxes for image in images)
    return [
        Sample(
            key=key_of(Path(image.source.partition("://")[2] or image.source.lstrip("/"))),
            image=image.image,
            source=image.source,
            label=own[0]
            if single
            else MultiLabel(
                full=own if full else None,
                given=own,
                boxes=tuple((numbers.of(label, image.source), *edges) for label, edges in image.boxes),
            ),
        )
        for image, own in zip(images, labels, strict=True)
    ]


# Columns and cells


@dataclass(frozen=True, slots=True, kw_only=True)
class _Columns:
    image: str
    label: str
    split: str | None

    @classmethod
    def of(cls, names: list[str], options: TableOptions) -> "_Columns":
        return cls(
            image=_needed("images", names, options.image, IMAGE_NAMES, "--image-column"),
            label=_needed("labels", names, options.label, LABEL_NAMES, "--label-column"),
            split=_column(names, options.split, SPLIT_NAMES, "--split-column"),
        )


def _column(names: list[str], wanted: str | None, usual: Sequence[str], option: str) -> str | None:
    if wanted is not None:
        if wanted not in names:
            raise UserError(f"{option} {wanted}: no such column, found {', '.join(names)}")
        return wanted
    by_lower = {name.strip().lower(): name for name in reversed(names)}
    return next((by_lower[name] for name in usual if name in by_lower), None)


def _needed(what: str, names: list[str], wanted: str | None, usual: Sequence[str], option: str) -> str:
    column = _column(names, wanted, usual, option)
    if column is None:
        raise UserError(f"found the columns {', '.join(names)}, none of {what}: name it with {option}")
    return column


def _text(row: Row, column: str) -> str:
    value = row.get(column)
    if not isinstance(value, str) or not value.strip():
        raise UserError(f"{column} is {value!r:.60}, expected a path or a URL")
    return value.strip()


def _labels(value: Any, separator: str) -> list[str | int]:
    """Return the labels of a cell: a list, JSON of a list, or text with separators."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = json.loads(value)
    if isinstance(value, str):
        return [part.strip() for part in value.split(separator) if part.strip()]
    if value is None:
        return []
    labels = list(value) if isinstance(value, list | tuple | np.ndarray) else [value]
    if wrong := [label for label in labels if isinstance(label, bool) or not isinstance(label, str | int)]:
        raise UserError(f"label {wrong[0]!r:.60}, expected a name or a number")
    return labels


def _split_name(value: Any) -> str:
    name = str(value).strip()
    if not name.replace("-", "").replace("_", "").isalnum() or not name.isascii():
        raise UserError(f"split {name!r:.60}, expected a word such as train or val")
    return SPLITS.get(name.lower(), name.lower())


def _boxes(row: Row, labels: list[str | int]) -> list[tuple[str | int, Edges]]:
    """Return (class, edges) of each box of a row; its own columns hold the box of its only label."""
    value = row.get("boxes")
    if isinstance(value, str):
        value = json.loads(value) if value.strip() else None
    boxes = [(box[0], tuple(float(edge) for edge in box[1:])) for box in ([] if value is None else value)]
    edges = [row.get(name) for name in EDGES]
    if all(edge not in (None, "") for edge in edges):
        if len(labels) != 1:
            raise UserError(f"a box ({', '.join(EDGES)}) and {len(labels)} labels, expected one label")
        boxes.append((labels[0], tuple(float(edge) for edge in edges)))  # type: ignore[arg-type]
    checked: list[tuple[str | int, Edges]] = []
    for label, box in boxes:
        if len(box) != 4 or not (0 <= box[0] <= box[2] <= 1 and 0 <= box[1] <= box[3] <= 1):
            raise UserError(f"box {box}, expected {', '.join(EDGES)} as fractions of the image, 0 to 1")
        x0, y0, x1, y1 = (round(edge, 5) for edge in box)
        checked.append((label, (x0, y0, x1, y1)))
    return checked


def _short(options: TableOptions) -> Resize | None:
    return None if options.resize is None else Resize(size=options.resize, mode="short")


# Classes


def _as_number(label: str | int) -> int | None:
    if isinstance(label, int):
        return label
    is_number = label.isascii() and label.isdecimal() and len(label) <= LONGEST_NUMBER
    return int(label) if is_number else None


def _class_names(images: Iterable[LabelledImage]) -> tuple[str, ...]:
    """Return the names of the labels, sorted; of labels that are all numbers, every number up to the last."""
    labels = {label for image in images for label in image.labels}
    if not labels:
        raise UserError("no labels in any row. --label-column names the column that has them")
    numbers = [_as_number(label) for label in labels]
    known = [number for number in numbers if number is not None]
    if len(known) == len(labels):
        return tuple(str(number) for number in range(max(known) + 1))
    return tuple(sorted({str(label) for label in labels}))


# Hugging Face datasets


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetImage:
    """An image in a Hugging Face dataset, decoded only if its size or format has to change."""

    rows: Any
    """One split; its files are memory-mapped, so that a copy for another process is small."""
    row: int
    column: str
    resize: Resize | None

    def encoded(self) -> tuple[str, bytes]:
        value = self.rows[self.row][self.column]
        content = value["bytes"] if value["bytes"] is not None else Path(value["path"]).read_bytes()
        return encoded_image(content, self.resize)


def hugging_face(name: str, options: TableOptions, *, config: str | None = None) -> Shards:
    """Return the shards of a Hugging Face dataset: on the hub, a folder, or one that was saved to disk."""
    try:
        import datasets
    except ImportError:
        raise UserError("shards hf: needs the package datasets: pip install 'bigscl[hf]'") from None
    datasets.disable_progress_bars()
    try:
        with parse_errors(name, "a dataset", "Give the name of a dataset on the hub, or a folder."):
            is_saved = Path(name, "dataset_dict.json").is_file() or Path(name, "state.json").is_file()
            loaded = datasets.load_from_disk(name) if is_saved else datasets.load_dataset(name, config)
    except BadFile as error:
        if not isinstance(error.__cause__, PermissionError):
            raise
        raise UserError(
            f"{name}: no permission for {error.__cause__.filename}. If this is the cache of the package "
            f"datasets, set HF_HOME to a folder that you may write."
        ) from None
    splits = dict(loaded) if isinstance(loaded, dict) else {"train": loaded}
    parts: Parts = {}
    for split, rows in splits.items():
        image, label = _feature_columns(datasets, name, rows.features, options)
        rows = rows.cast_column(image, datasets.Image(decode=False))
        if getattr(rows, "_indices", None) is not None:
            rows = rows.flatten_indices()
        parts[_split_name(split)] = _images_of_split(rows, name, split, image, label, options)
        if options.class_names is None and (names := _names_of(rows.features[label])) is not None:
            options = replace(options, class_names=tuple(names))
    return _shards("hf", parts, options, name)


def _feature_columns(datasets: Any, name: str, features: Any, options: TableOptions) -> tuple[str, str]:
    """Return the columns of images and labels: those named, or the first of their type or usual name."""
    pictures = [column for column, kind in features.items() if isinstance(kind, datasets.Image)]
    labels = [column for column, kind in features.items() if _names_of(kind) is not None]
    with parse_errors(name, "a dataset of labelled images", "Name its columns."):
        return (
            _needed("images", list(features), options.image, pictures, "--image-column"),
            _needed("labels", list(features), options.label, [*labels, *LABEL_NAMES], "--label-column"),
        )


def _names_of(kind: Any) -> list[str] | None:
    """Return the class names of a feature, or of the entries of a list; None if it has none."""
    inner = getattr(kind, "feature", kind[0] if isinstance(kind, list) and kind else kind)
    names = getattr(inner, "names", None)
    return list(names) if names else None


def _images_of_split(
    rows: Any, name: str, split: str, image: str, label: str, options: TableOptions
) -> dict[str, LabelledImage]:
    short, found = _short(options), dict[str, LabelledImage]()
    paths = _paths(rows, image)
    for row, (path, value) in enumerate(zip(paths, rows[label], strict=True)):
        # Files inside of Parquet often have no name, or that of another row.
        source = f"{split}/{row:08d}" if path is None else path.removeprefix(f"{Path(name).absolute()}/")
        if source in found:
            source = f"{split}/{row:08d}"
        picture = DatasetImage(rows=rows, row=row, column=image, resize=short)
        found[source] = LabelledImage(image=picture, source=source, labels=_labels(value, options.separator))
    return found


def _paths(rows: Any, image: str) -> Iterator[str | None]:
    """Yield the name of each image file, without its bytes."""
    column = rows.data.column(image).combine_chunks()
    yield from column.field("path").to_pylist()
