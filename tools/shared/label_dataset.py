"""A dataset of labels and boxes as Parquet, with a card that says how they were made."""

from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from bigscl.common.files import load_pyarrow, write_text
from bigscl.common.text import printable
from bigscl.config import ConfigError, load_config
from bigscl.memory.snapshot_state import SnapshotState
from bigscl.tools.shared.label_formats import check_folder, with_folder
from bigscl.tools.shared.label_table import COLUMNS, Batch, Fit, FoundLabels, objects, table_writer

LABELS, BOXES, CARD = "labels.parquet", "boxes.parquet", "README.md"
LABEL_COLUMNS = {"key": str, "path": str, "positives": list, "negatives": list}
RULES = {
    "mined": "labels that are not annotated, but expected",
    "expected": "expected labels; annotated ones that are not expected are left out",
    "all": "annotated labels, and labels that are not annotated, but expected",
}


Counts = NDArray[np.int64]
"""[4,L]: labels of each class: annotated, mined, mined in images with full labels, right ones of these."""


def write_relabelled(found: FoundLabels, fit: Fit, run: Path | None, folder: Path, images: str = "") -> int:
    """Write the labels of images, one row per label with its box, and the card; return the number of labels.

    `images` is put before the path of each image.

    The labels are a file that `data.labels_file` of a config reads.
    """
    check_folder(folder, "a dataset", (LABELS, BOXES, CARD))
    load_pyarrow(folder, "another --format")
    counts = np.zeros((4, found.store.spec.num_classes), np.int64)
    num_images = 0
    with (
        table_writer(folder / LABELS, LABEL_COLUMNS) as write_labels,
        table_writer(folder / BOXES, COLUMNS) as write_boxes,
    ):
        for shard, labels in found.passed_over(partial(found.of_shard, share=fit.share)):
            rows = _images(found, shard, labels, images)
            write_labels(rows)
            write_boxes({**labels, "path": objects([with_folder(images, path) for path in labels["path"]])})
            num_images += len(rows["key"])
            counts += _count(found, labels)
    write_text(folder / CARD, _card(found, fit, run, counts, num_images, folder.name))
    return int(counts[:2].sum())


def _images(found: FoundLabels, shard: int, labels: Batch, images: str) -> Batch:
    """Return the labels by image; of `all` also images without labels."""
    index = found.data.index
    every = found.store.spec.sample_ids(shard)
    ids = every if found.which == "all" else np.unique(labels["id"])
    ends = np.searchsorted(labels["id"], ids, side="right")
    starts = np.searchsorted(labels["id"], ids, side="left")
    positives = [labels["class"][start:end].tolist() for start, end in zip(starts, ends, strict=True)]
    known = index.labels_of(ids, "given") == 0
    return {
        "key": objects([index.name(sample) for sample in ids.tolist()]),
        "path": objects([with_folder(images, index.source(sample) or "") for sample in ids.tolist()]),
        "positives": objects(positives),
        "negatives": objects([np.flatnonzero(row).tolist() for row in known]),
    }


def _count(found: FoundLabels, labels: Batch) -> Counts:
    index, width = found.data.index, found.store.spec.num_classes
    classes, annotated = labels["class"], labels["annotated"]
    ids, places = np.unique(labels["id"], return_inverse=True)
    checked, right = np.zeros((2, len(classes)), bool)
    if index.full is not None:
        truth = index.labels_of(ids, "full")[places, classes]
        checked, right = ~annotated & (truth >= 0), ~annotated & (truth == 1)
    masks = (annotated, ~annotated, checked, right)
    return np.stack([np.bincount(classes[mask], minlength=width) for mask in masks])


# The card


def _card(found: FoundLabels, fit: Fit, run: Path | None, counts: Counts, num_images: int, title: str) -> str:
    files = {LABELS.split(".")[0]: LABELS, BOXES.split(".")[0]: BOXES}
    front = {
        "license": "unknown",
        "task_categories": ["image-classification", "object-detection"],
        "tags": ["multi-label", "machine-generated", "spatial-consistency-loss"],
        "configs": [
            {"config_name": name, "data_files": file, **({"default": True} if file == LABELS else {})}
            for name, file in files.items()
        ],
        # So that `datasets.load_dataset` gives names of classes.
        "dataset_info": [{"config_name": LABELS.split(".")[0], "features": _features(found)}],
    }
    parts = [
        f"---\n{yaml.safe_dump(front, sort_keys=False)}---",
        f"# {printable(title)}",
        f"Labels of {num_images:,} images of {counts.shape[1]:,} classes: {counts[0].sum():,} that "
        f"are annotated in the dataset, and {counts[1].sum():,} that the memory of a training run found. "
        f"Nobody has checked the found ones. The images are not here: `path` is that of the image in the "
        f"original dataset (if known), `key` the name of the tar and the key of the sample in it.",
        "## Files",
        f"- `{LABELS}`: a row per image: `key`, `path`, `positives`, `negatives` (classes known to be "
        f"absent), as numbers of classes. bigscl trains on it with `data.labels_file`.",
        f"- `{BOXES}`: a row per label: `class`, `name`, `score` (moving average of the prediction, 0 to 1), "
        f"`annotated`, `expected`, and the box `x0`, `y0`, `x1`, `y1` as fractions of the upright image; no "
        f"box where the memory kept no heatmap.",
        "## How they were made",
        "\n".join(f"- {line}" for line in _steps(found, fit, run, counts)),
        "## Classes",
        _classes(found, counts),
        "## Settings of the run",
        _settings(run),
    ]
    return "\n\n".join(parts) + "\n"


def _features(found: FoundLabels) -> list[dict[str, Any]]:
    """Return the columns of the labels as a dataset card names them."""
    names = {str(number): name for number, name in enumerate(found.data.index.class_names)}
    classes = {"class_label": {"names": names}}
    texts = [{"name": name, "dtype": "string"} for name in ("key", "path")]
    return [*texts, *({"name": name, "sequence": classes} for name in ("positives", "negatives"))]


def _steps(found: FoundLabels, fit: Fit, run: Path | None, counts: Counts) -> list[str]:
    snapshot = found.store.snapshot
    source = "a store" if run is None else f"run `{printable(run.name)}`"
    state = SnapshotState.of(snapshot, found.store.spec.num_classes)
    total, trust = state.selection.num_expected, state.trust
    number = "" if total is None else f", {sum(total) / found.store.spec.num_samples:.3f} per image"
    return [
        f"By bigscl {version('bigscl')}, from the memory of {source}: snapshot {snapshot.id}, epoch "
        f"{snapshot.epoch + 1}, data {found.store.spec.fingerprint[:12]}.",
        f"Labels: {RULES[found.which]}. Classes known to be absent are never labels.",
        f"Expected: of each class a number of images, those of the highest rank in the memory, ties by the "
        f"lowest id{number} ({found.expected.note}).",
        f"The {fit}. A box is around the connected cells at the peak of the heatmap.",
        _precision(counts),
        *(["Estimate from labels that were hidden from training: " + str(trust)] if trust else []),
    ]


def _precision(counts: Counts) -> str:
    checked, right = counts[2:].sum(1).tolist()
    if not checked:
        return "Precision of the found labels: not known, since there are no full labels to compare with."
    return (
        f"Precision of the found labels: {100 * right / checked:.1f}%, {right:,} of the {checked:,} whose "
        f"images have full labels."
    )


def _classes(found: FoundLabels, counts: Counts) -> str:
    from bigscl.evaluation.report_files import markdown_table, percent

    annotated, found_labels, checked, right = counts
    with np.errstate(invalid="ignore"):
        precision = right / checked
    rows = [
        [_plain(name), str(number), f"{named:,}", f"{mined:,}", percent(float(share))]
        for number, (name, named, mined, share) in enumerate(
            zip(found.data.index.class_names, annotated, found_labels, precision, strict=True)
        )
    ]
    return markdown_table(["name", "class", "annotated", "found", "precision %"], rows)


def _plain(name: str) -> str:
    """Return a class name that Markdown shows as it is, in a row of a table."""
    escaped = name.replace("&", "&amp;").replace("<", "&lt;")
    return "".join(f"\\{letter}" if letter in "\\`*_[]" else letter for letter in escaped)


def _settings(run: Path | None) -> str:
    from bigscl.tools.shared.publication import method, published_settings

    unknown = "Not known: the store has no run with a usable config.yaml."
    if run is None:
        return unknown
    try:
        config = load_config(run / "config.yaml")
    except (ConfigError, OSError):
        return unknown
    settings = yaml.safe_dump(published_settings(config), sort_keys=False)
    return f"Trained with {method(config)}, K {config.selection.K}.\n\n```yaml\n{settings}```"
