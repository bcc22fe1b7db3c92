"""Single-label image folders: one folder per class, as in ImageNet."""

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bigscl.common.user_error import UserError
from bigscl.datasets.ground_truth import read_ground_truth
from bigscl.datasets.image_files import SUFFIXES, ImageFile, Resize, key_of
from bigscl.datasets.multilabel import existing, existing_folder
from bigscl.datasets.writing import Sample, Shards

SPLITS = ("train", "val", "test")
# ImageNet's test images have no public labels.
OTHER_SPLITS = "To leave a split out, name the others: --split train --split val."


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatLabels:
    """The files with the labels of a split without class folders; see `read_ground_truth`."""

    ground_truth: Path
    synsets: Path | None


def folder(
    source: Path,
    *,
    splits: list[str],
    flat: FlatLabels | None,
    resize: int | None,
    seed: int,
    samples_per_shard: int,
) -> Shards:
    """Return the shards of `source`/<split>/<class>/<image>, or of `source`/<class>/<image> as part `train`.

    Classes are the sorted folder names of `train`. Training samples are shuffled once, so that every shard
    has a mixture of classes; other parts are in the order of their keys. No `splits` means all of them.
    """
    found = _find_splits(source)
    if unknown := [split for split in splits if split not in found]:
        raise UserError(f"{source}: no split {', '.join(unknown)}, found {', '.join(found)}")
    wanted = {split: path for split, path in found.items() if not splits or split in splits}
    if flat is not None and all(_class_folders(path) for path in wanted.values()):
        raise UserError(
            f"ground truth {flat.ground_truth}: every split of {source} has class folders: remove it"
        )
    classes = [child.name for child in _class_folders(found.get("train") or next(iter(found.values())))]
    short = Resize(size=resize, mode="short") if resize is not None else None
    settings: dict[str, Any] = {"resize": resize, "seed": seed}
    return Shards(
        kind="folder",
        classes=classes,
        parts={split: _part(split, path, classes, flat, short, seed) for split, path in wanted.items()},
        settings=settings,
        samples_per_shard=samples_per_shard,
    )


def _part(
    split: str, path: Path, classes: list[str], flat: FlatLabels | None, resize: Resize | None, seed: int
) -> list[Sample]:
    """Return the samples of a split in the order of the shards."""
    labelled = _by_class_folder(path) if _class_folders(path) else _by_ground_truth(path, flat)
    numbers = {name: number for number, name in enumerate(classes)}
    if unknown := sorted({name for _, _, name in labelled} - numbers.keys()):
        raise UserError(
            f"{path}: {len(unknown)} classes are not among the {len(classes)} of the training folder, "
            f"e.g. {unknown[0]!r}"
        )
    samples = [
        Sample(key=key, image=ImageFile(path=file, resize=resize), label=numbers[name])
        for key, file, name in sorted(labelled)
    ]
    if split != "train":
        return samples
    # RandomState, because its stream is fixed: any version of numpy gives the same shards.
    return [samples[row] for row in np.random.RandomState(seed).permutation(len(samples))]


def _find_splits(source: Path) -> dict[str, Path]:
    """Return the folder of each split; `source` itself if no split in it has class folders."""
    existing_folder(source, "a folder of images")
    found = {split: source / split for split in SPLITS if (source / split).is_dir()}
    # A class may be called "train": a split is recognised by its class folders.
    if not any(_class_folders(path) for path in found.values()):
        found = {"train": source}
    if not _class_folders(found.get("train", source)):
        raise UserError(f"{found['train']}: no class folders, expected <class>/<image> in it")
    return found


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
    """Return (key, file, class) of every image of a flat folder."""
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
