"""Single-label image folders: one folder per class, as in ImageNet."""

import os
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bigscl.common.files import BadFile, parse_errors
from bigscl.common.user_error import UserError
from bigscl.datasets.multilabel import existing, existing_folder
from bigscl.datasets.writer import SUFFIXES, ImageFile, Resize, Sample, Shards, key_of

LONGEST_NUMBER = 20
HINT = "ILSVRC2012_devkit_t12/data/meta.mat, or a file with one class a line"
SPLITS = ("train", "val", "test")
# ImageNet's test images have no public labels.
OTHER_SPLITS = "To leave a split out, name the others: --split train --split val."


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatLabels:
    """The files with the labels of a split without class folders; see `read_ground_truth`."""

    ground_truth: Path
    synsets: Path | None


def folder(
    source: Path, *, splits: list[str], flat: FlatLabels | None, resize: int | None, seed: int
) -> Shards:
    """Return the shards of `source`/<split>/<class>/<image>, or of `source`/<class>/<image> as part `train`.

    Classes are the sorted folder names of `train`. Training samples are shuffled once, so that every shard
    has a mixture of classes; other parts are in the order of their keys. No `splits` means all of them.
    """
    splits_there = _find_splits(source)
    if unknown := [split for split in splits if split not in splits_there]:
        raise UserError(f"{source}: no split {', '.join(unknown)}, found {', '.join(splits_there)}")
    wanted = {split: path for split, path in splits_there.items() if not splits or split in splits}
    if flat is not None and all(_class_folders(path) for path in wanted.values()):
        raise UserError(
            f"ground truth {flat.ground_truth}: every split of {source} has class folders: remove it"
        )
    classes = [
        child.name for child in _class_folders(splits_there.get("train") or next(iter(splits_there.values())))
    ]
    short = Resize(size=resize, mode="short") if resize is not None else None
    return Shards(
        kind="folder",
        classes=classes,
        parts={
            split: _part(split, path, classes, flat, short, seed, source) for split, path in wanted.items()
        },
        settings={"resize": resize, "seed": seed},
    )


def _part(
    split: str,
    path: Path,
    classes: list[str],
    flat: FlatLabels | None,
    resize: Resize | None,
    seed: int,
    source: Path,
) -> list[Sample]:
    """Return the samples of a split in the order of the shards; paths of images start at `source`."""
    labelled = _by_class_folder(path) if _class_folders(path) else _by_ground_truth(path, flat)
    numbers = {name: number for number, name in enumerate(classes)}
    if unknown := sorted({name for _, _, name in labelled} - numbers.keys()):
        raise UserError(
            f"{path}: {len(unknown)} classes are not among the {len(classes)} of the training folder, "
            f"e.g. {unknown[0]!r}"
        )
    samples = [
        Sample(
            key=key,
            image=ImageFile(path=file, resize=resize),
            label=numbers[name],
            source=file.removeprefix(f"{source}/"),
        )
        for key, file, name in sorted(labelled)
    ]
    if split != "train":
        return samples
    # RandomState, because its stream is fixed: any version of numpy gives the same shards.
    return [samples[row] for row in np.random.RandomState(seed).permutation(len(samples))]


def _find_splits(source: Path) -> dict[str, Path]:
    """Return the folder of each split; `source` itself if no split in it has class folders."""
    existing_folder(source, "a folder of images")
    splits = {split: source / split for split in SPLITS if (source / split).is_dir()}
    # A class may be called "train": a split is recognised by its class folders.
    if not any(_class_folders(path) for path in splits.values()):
        splits = {"train": source}
    if not _class_folders(splits.get("train", source)):
        raise UserError(f"{splits['train']}: no class folders, expected <class>/<image> in it")
    return splits


def _class_folders(path: Path) -> list[Path]:
    return sorted(child for child in path.iterdir() if child.is_dir() and not child.name.startswith("."))


def _image_files(path: Path) -> list[Path]:
    """Return all images below a folder. A walk: a call for each of a million files would take minutes."""
    return [
        Path(folder, name)
        for folder, _, names in os.walk(path, followlinks=True)
        for name in names
        if Path(name).suffix.lower() in SUFFIXES
    ]


def _by_class_folder(path: Path) -> list[tuple[str, str, str]]:
    """Return (key, file, class) of every image; keys start with the class if file names are not unique."""
    found = []
    for child in _class_folders(path):
        files = _image_files(child)
        if not files:
            raise UserError(f"{child}: no images (.jpg, .png, ...) in this class folder. Fill or remove it.")
        found += [(key_of(file.relative_to(child)), str(file), child.name) for file in files]
    if max(Counter(key for key, _, _ in found).values()) > 1:
        found = [(f"{name.replace('.', '_')}_{key}", file, name) for key, file, name in found]
    return found


def _by_ground_truth(path: Path, flat: FlatLabels | None) -> list[tuple[str, str, str]]:
    files = sorted(_image_files(path))
    if not files:
        raise UserError(f"{path}: no images and no class folders")
    if flat is None:
        raise UserError(
            f"{path}: {len(files)} images without class folders. Give their ground truth file: "
            f"ILSVRC2012_validation_ground_truth.txt, LOC_val_solution.csv, or lines of `image class`. "
            f"{OTHER_SPLITS}"
        )
    truth = read_ground_truth(
        existing(flat.ground_truth, "the ground truth of images in a flat folder"), flat.synsets
    )
    keys = [key_of(Path(file.name)) for file in files]
    if isinstance(truth, list):
        if len(truth) != len(files):
            raise UserError(
                f"{flat.ground_truth}: {len(truth)} lines for the {len(files)} images of {path}. "
                f"{OTHER_SPLITS}"
            )
        truth = dict(zip(keys, truth, strict=True))
    if missing := [key for key in keys if key not in truth]:
        raise UserError(
            f"{flat.ground_truth}: {len(missing)} images of {path} have no line, e.g. {missing[0]}. "
            f"{OTHER_SPLITS}"
        )
    return [(key, str(file), truth[key]) for key, file in zip(keys, files, strict=True)]


# Labels of images that are all in one folder, as ImageNet's validation images are


def read_ground_truth(file: Path, synsets: Path | None) -> list[str] | dict[str, str]:
    """Return class names in the order of the sorted images, or by key if the lines name their images.

    A line is a class or `image class` (spaces or commas; more columns are ignored). A class is a name, or
    the number of a line of `synsets`, counted from 1 as in ImageNet's devkit, from 0 if a 0 occurs. The
    devkit's numbers are not in the order of the sorted names, so numbers without `synsets` are refused.
    """
    with parse_errors(file, "a text file", "Give the ground truth as text, a class on every line."):
        lines = [line.strip() for line in file.read_text().splitlines()]
    rows = [re.split(r"[,\s]+", line) for line in lines if line]
    if rows and rows[0][0] == "ImageId":  # the header of Kaggle's table
        rows = rows[1:]
    if not rows:
        raise BadFile(f"{file}: empty, expected a class on every line")
    column = min(1, len(rows[0]) - 1)
    for number, row in enumerate(rows, 1):
        if len(row) <= column:
            raise BadFile(f"{file}: row {number} is {row[0]!r}, expected `image class` as in the first row")
    names = _names([row[column] for row in rows], file, synsets)
    if column == 0:
        return names
    return {key_of(Path(row[0])): name for row, name in zip(rows, names, strict=True)}


def read_synsets(file: Path) -> list[str]:
    """Return class names by number: the first word of every line, or the leaves of the devkit's meta.mat."""
    if not file.is_file():
        raise FileNotFoundError(f"{file}: not there, expected {HINT}")
    if file.suffix != ".mat":
        with parse_errors(file, "a text file", f"Expected {HINT}."):
            return [line.split()[0] for line in file.read_text().splitlines() if line.strip()]
    try:
        from scipy.io import loadmat  # type: ignore[import-untyped]
    except ImportError:
        raise BadFile(f"{file}: needs scipy to be read: pip install scipy") from None
    with parse_errors(file, "the devkit's meta.mat", f"Expected {HINT}."):
        rows = loadmat(file, squeeze_me=True)["synsets"]
        # Inner nodes of the hierarchy follow the 1,000 leaves.
        leaves = [(int(row["ILSVRC2012_ID"]), str(row["WNID"])) for row in rows if not row["num_children"]]
    return [name for _, name in sorted(leaves)]


def _names(classes: list[str], file: Path, synsets: Path | None) -> list[str]:
    if not all(name.isascii() and name.isdigit() for name in classes):
        if synsets is not None:
            raise BadFile(f"{file}: the classes are names, so a list of synsets has no effect: remove it")
        return classes
    if synsets is None:
        raise BadFile(
            f"{file}: classes are numbers, and their order is not that of the sorted class folders. "
            f"Give the list that the numbers refer to: {HINT}."
        )
    if longest := [name for name in classes if len(name) > LONGEST_NUMBER]:
        raise BadFile(f"{file}: class {longest[0][:LONGEST_NUMBER]}... has {len(longest[0])} digits")
    names, numbers = read_synsets(synsets), [int(name) for name in classes]
    first = 0 if 0 in numbers else 1
    if max(numbers) - first >= len(names):
        raise BadFile(f"{file}: has class {max(numbers)}, but {synsets} names only {len(names)} classes")
    return [names[number - first] for number in numbers]
