"""Images of an own training loop, which are files rather than members of shards: row n is sample n."""

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bigscl.common.files import READERS, read_class_names
from bigscl.common.user_error import UserError
from bigscl.data.index import Index, with_fingerprint
from bigscl.datasets.table import labelled_paths
from bigscl.datasets.writer import SUFFIXES
from bigscl.store import Annotations, Ragged, StoreSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFiles:
    """Images with their labels, in the order of the rows of a store."""

    folder: str
    paths: Sequence[str]
    """Relative to the folder."""
    labels: Sequence[Collection[int]]
    names: Sequence[str] | None
    """Of the classes; None if nobody named them."""

    def annotations(self, spec: StoreSpec) -> Annotations:
        """Return the annotations that the loop gave to its memory, if it saw the same labels."""
        return Annotations.of(self.labels, spec.num_classes, rows_per_shard=spec.rows_per_shard)

    def index(self, spec: StoreSpec, annotations: Annotations) -> Index:
        """Return the images as an index, whose `shards` are the chunks of the store."""
        names = self.names or [str(number) for number in range(spec.num_classes)]
        if len(names) != spec.num_classes:
            raise UserError(f"found {len(names)} names of classes, the store has {spec.num_classes} classes")
        rows = annotations.num_rows
        ids, nothing = np.arange(len(self.paths)), np.zeros(rows, np.int64)
        keys = Ragged.of_bytes([os.fsencode(path) for path in self.paths]).spread(ids, rows)
        return with_fingerprint(
            Index(
                urls=("",) * len(annotations.shard_sizes),
                shard_bytes=np.zeros(len(annotations.shard_sizes), np.int64),
                shard_sizes=annotations.shard_sizes,
                class_names=tuple(names),
                keys=keys,
                sources=keys,
                image_offsets=nothing,
                image_bytes=nothing,
                given=annotations.given,
                negatives=Ragged.from_lengths(nothing, np.empty(0, np.uint32)),
                full=None,
                folder=self.folder,
                fingerprint="",
            )
        )


def image_files(images: Path, names: Path | None = None) -> ImageFiles:
    """Return the images of a folder with a subfolder for each class, or of a table of paths and labels."""
    known = None if names is None else read_class_names(names)
    return _of_table(images, known) if images.suffix in READERS else _of_folder(images, known)


def listed_images(
    paths: Sequence[str | os.PathLike[str]], labels: Sequence[Collection[int]], names: Sequence[str] | None
) -> ImageFiles:
    if len(paths) != len(labels) or not len(paths):
        raise UserError(
            f"images: {len(paths)} paths and the labels of {len(labels)}, expected as many, at least 1"
        )
    files = [os.path.abspath(path) for path in paths]
    folder = os.path.commonpath([os.path.dirname(file) for file in files])
    relative = [os.path.relpath(file, folder) for file in files]
    return ImageFiles(folder=folder, paths=relative, labels=labels, names=names)


def _of_folder(folder: Path, names: list[str] | None) -> ImageFiles:
    """Return the images in the order of torchvision's ImageFolder."""
    if not folder.is_dir():
        raise UserError(
            f"--images {folder}: no such folder. Give a folder with a subfolder for each class, or a table "
            f"of paths and labels ({', '.join(READERS)})."
        )
    classes = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())
    paths, labels = list[str](), list[list[int]]()
    for number, name in enumerate(classes):
        for parent, _, files in sorted(os.walk(folder / name, followlinks=True)):
            own = [
                os.path.join(parent, file) for file in sorted(files) if file.lower().endswith(tuple(SUFFIXES))
            ]
            paths += [os.path.relpath(path, folder) for path in own]
            labels += [[number]] * len(own)
    if not paths:
        raise UserError(f"--images {folder}: no images in subfolders, expected <class>/<image> in it")
    return ImageFiles(folder=str(folder), paths=paths, labels=labels, names=names or classes)


def _of_table(table: Path, names: list[str] | None) -> ImageFiles:
    images, classes = labelled_paths(table, names)
    return ImageFiles(
        folder=str(table.parent),
        paths=[path for path, _ in images],
        labels=[labels for _, labels in images],
        names=None if all(name.isdecimal() for name in classes) else classes,
    )
