"""Write found labels, scores or heatmaps to files."""

import json
import logging
import math
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import typer
from numpy.typing import NDArray
from PIL import Image

from bigscl.common.command_line import AsJson
from bigscl.common.files import atomic_write, load_pyarrow
from bigscl.common.text import first_few
from bigscl.common.url_secrets import with_image_names
from bigscl.common.user_error import UserError
from bigscl.data.index import write_sample_list
from bigscl.data.read_samples import read_image_heads
from bigscl.data.tar import SUFFIXES
from bigscl.evaluation.sample_plots import heatmap_of
from bigscl.store import HeatmapStore
from bigscl.tools.shared.find_samples import find_samples, initial_share
from bigscl.tools.shared.label_dataset import write_relabelled
from bigscl.tools.shared.label_formats import Label, LabelledImage, label_writer
from bigscl.tools.shared.label_table import COLUMNS, Fit, FoundLabels, Which, find_labels, table_writer
from bigscl.tools.shared.open_store import (
    AtSnapshot,
    Data,
    DataFlags,
    StorageFlags,
    Store,
    open_store,
    run_folder,
    trust_at,
)
from bigscl.tools.shared.shard_passes import scores_by_shard
from bigscl.tools.shared.terminal import few_visits_note, print_result, size

logger = logging.getLogger(__name__)

What = Literal["labels", "scores", "heatmaps", "samples"]
Form = Literal["table", "coco", "label-studio", "fiftyone", "multilabel-imagenet", "dataset"]
# Side of a heatmap cell in an exported PNG.
CELL_PIXELS = 16
LABEL_COLUMNS = ("id", "class", "score", "annotated", "expected", "x0", "y0", "x1", "y1")


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelFlags:
    """Which labels are written, and in which format."""

    which: Annotated[
        Which,
        typer.Option(
            help="Labels to write. mined: expected positives that are not annotated; expected: all expected "
            "positives; all: these and all annotated positives, a relabelled dataset."
        ),
    ] = "mined"
    box_share: Annotated[
        float | None,
        typer.Option(
            min=0.01,
            max=1.0,
            help="Cells of the box of a label have at least this share of the peak. Default: the share that "
            "fits best where the shards have boxes, else 0.5.",
        ),
    ] = None
    form: Annotated[
        Form,
        typer.Option(
            "--format",
            help="Of labels. table: by the name of the output; coco: .json, with scores and boxes in pixels; "
            "label-studio: a folder with predictions and the labelling interface; fiftyone: a folder with "
            "labels.json and boxes.json; multilabel-imagenet: .txt, a line for each image, with "
            "--which all; dataset: a folder with labels and boxes as Parquet, and a card that "
            "says how they were made.",
        ),
    ] = "table"
    image_prefix: Annotated[
        str | None,
        typer.Option(
            metavar="PREFIX",
            help="What coco, label-studio and dataset put before the path of an image in your dataset "
            "(SHARD/FILE, if the shards do not say): a folder, s3://bucket/, /data/local-files/?d=...",
        ),
    ] = None

    def check(self, what: What) -> None:
        """Refuse options that would have no effect."""
        if self.box_share is not None and what != "labels":
            raise UserError(f"--box-share: has no effect on {what}, only on labels")
        if self.form != "table" and what != "labels":
            raise UserError(f"--format: has no effect on {what}, only on labels")
        if self.form == "multilabel-imagenet" and self.which != "all":
            raise UserError(
                f"--which {self.which}: format {self.form} has all labels of every image. Add --which all."
            )
        if self.image_prefix is not None and self.form not in ("coco", "label-studio", "dataset"):
            raise UserError(
                f"--image-prefix: has no effect on format {self.form}, only on coco, label-studio, dataset"
            )


def command(
    store: Store,
    what: Annotated[
        What,
        typer.Argument(
            help="labels: .csv, .jsonl or .parquet, one line per sample and class; scores: .npz or .parquet, "
            "one row per sample with its id and key, or .npy without them; heatmaps of chosen samples: .npz, "
            "or a folder of PNGs; samples: .json, which row of the store is which image."
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Output file, or folder for PNGs.")],
    *,
    flags: LabelFlags,
    sample: Annotated[
        list[str] | None,
        typer.Option(help="Sample whose heatmaps are written, by key or id; may be repeated."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the output if it exists.")] = False,
    snapshot: AtSnapshot = None,
    source: DataFlags,
    storage: StorageFlags,
    as_json: AsJson = False,
) -> None:
    """Write labels (with score and the box of the strongest region), scores or heatmaps to a file.

    bigscl export runs/quickstart labels --which all --format coco -o relabelled.json

    Where the shards have boxes, half of the labels with boxes choose the size of the regions, and the other
    half says how well they fit.

    Example: bigscl export runs/quickstart labels -o mined.csv
    """
    if sample and what != "heatmaps":
        raise UserError(f"--sample: has no effect on {what}, only on heatmaps")
    flags.check(what)
    # An interrupted export leaves an empty folder.
    is_empty_folder = output.is_dir() and not any(output.iterdir())
    if output.exists() and not overwrite and not is_empty_folder:
        raise UserError(f"{output}: already exists. Choose another name, or add --overwrite.")
    opened = open_store(store, snapshot, storage)
    facts: dict[str, Any] = {}
    lines: list[str] = []
    if what == "scores":
        data = source.find(store, opened.spec)
        if data is None and output.suffix != ".npy":
            data = source.need("scores with keys", store, opened.spec)
        rows = write_scores(open_store(store, opened.snapshot.id, storage, data), data, output)
    else:
        opened, needed = source.open(what, store, opened.snapshot.id, storage)
        if what == "samples":
            rows = _samples(needed, output)
        elif what == "labels":
            labels = find_labels(opened, needed, flags.which)
            fit = labels.fit(flags.box_share)
            images = with_image_names(flags.image_prefix or "")
            rows = _labels(labels, fit, flags.form, output, run_folder(store), images)
            facts, lines = _about_labels(labels, fit)
        else:
            rows = _heatmaps(opened, needed, output, sample or [])
    at = opened.snapshot.id
    told = f"{output}: {what} at snapshot {at}, {rows:,} rows, {size(_bytes(output))}"
    facts = {"output": str(output), "what": what, "snapshot": at, "rows": rows, **facts}
    print_result(facts, "\n".join([told, *lines]), as_json)


def _about_labels(labels: FoundLabels, fit: Fit) -> tuple[dict[str, Any], list[str]]:
    """Return facts, and lines, about how far the labels are to be trusted."""
    share, trust = initial_share(labels.store), trust_at(labels.store)
    facts: dict[str, Any] = {
        "selection": labels.expected.facts(),
        "initial_share": round(share, 4),
        **({} if trust is None else {"trust": trust.to_json()}),
        "region": asdict(fit),
    }
    lines = [f"  {labels.expected.note}"] if labels.expected.recomputed else []
    lines += few_visits_note(share)
    lines += [] if trust is None else [f"  {line}" for line in (str(trust), *trust.of_groups())]
    return facts, [*lines, f"  {fit}"]


def _bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in (path.iterdir() if path.is_dir() else [path]))


# Labels


def _labels(found: FoundLabels, fit: Fit, form: Form, output: Path, run: Path | None, images: str) -> int:
    if form == "table":
        return _table(found, fit, output)
    if form == "dataset":
        return write_relabelled(found, fit, run, output, images)
    of = "a store" if run is None else run.name
    made_by = f"bigscl {version('bigscl')}, {of}, snapshot {found.store.snapshot.id}, {found.which} labels"
    names, rows, unreadable = found.data.index.class_names, 0, list[int]()
    with label_writer(form, output, names, made_by=made_by, images=images) as write:
        for _, (labelled, broken) in found.passed_over(partial(_labelled_images, found, fit.share)):
            for image in labelled:
                write(image)
                rows += len(image.labels)
            unreadable += broken
    if unreadable:
        first = first_few(map(found.data.index.name, unreadable), len(unreadable), most=3)
        logger.warning("left out %d images that cannot be read: %s", len(unreadable), first)
    return rows


def _table(found: FoundLabels, fit: Fit, output: Path) -> int:
    rows = 0
    with table_writer(output, COLUMNS) as write:
        for _, labels in found.passed_over(partial(found.of_shard, share=fit.share)):
            write(labels)
            rows += len(labels["id"])
    return rows


def _labelled_images(found: FoundLabels, share: float, shard: int) -> tuple[list[LabelledImage], list[int]]:
    """Return the images of a shard with labels (of `all` also those without), and ids of unreadable ones."""
    columns = found.of_shard(shard, share)
    every = found.store.spec.sample_ids(shard)
    labels: dict[int, list[Label]] = {int(sample): [] for sample in (every if found.which == "all" else ())}
    for sample, *values in zip(*(columns[name].tolist() for name in LABEL_COLUMNS), strict=True):
        number, score, annotated, expected, *box = values
        facts = {"annotated": annotated, "expected": expected}
        known = None if math.isnan(box[0]) else (box[0], box[1], box[2], box[3])
        labels.setdefault(sample, []).append(Label(number=number, score=score, box=known, facts=facts))
    index, name = found.data.index, found.shard_names[shard]
    heads = read_image_heads(index, np.array(list(labels), np.int64))
    folder = next((name.removesuffix(end) for end in SUFFIXES if name.endswith(end)), name)
    images = [
        LabelledImage(
            id=sample,
            file=index.source(sample) or f"{folder}/{heads[sample].name}",
            width=heads[sample].width,
            height=heads[sample].height,
            labels=labels[sample],
            facts={"shard": name, "key": index.key(sample)},
        )
        for sample in labels
        if sample in heads
    ]
    return images, [sample for sample in labels if sample not in heads]


# Samples


def _samples(data: Data, output: Path) -> int:
    """Write the list of samples that a run keeps in its folder, for a store that has none."""
    if output.suffix != ".json":
        raise UserError(f"{output}: the list of samples is written as .json")
    write_sample_list(data.index, output)
    return data.index.num_samples


# Heatmaps


def _heatmaps(store: HeatmapStore, data: Data, output: Path, wanted: list[str]) -> int:
    """Write the heatmaps of some samples; as PNGs, one file per class, 0 is black and 1 white."""
    if not wanted:
        raise UserError("heatmaps: which samples? Name them with --sample KEY or --sample ID.")
    if output.suffix not in ("", ".npz"):
        raise UserError(f"{output}: heatmaps are written as .npz, or as PNGs in a folder")
    ids = find_samples(wanted, store.spec, data.index)
    if store.group.layout == "scores":
        raise UserError(
            f"{store.backend.url}: keeps no heatmaps at snapshot {store.snapshot.id}, only scores"
        )
    if output.suffix == ".npz":
        _heatmaps_npz(store, data, ids, output)
    else:
        _pngs(store, data, ids, output)
    return len(ids)


def _heatmaps_npz(store: HeatmapStore, data: Data, ids: NDArray[np.int64], output: Path) -> None:
    rows = store.read(ids)
    arrays: dict[str, Any] = dict(rows)
    arrays["classes"] = rows.kept_classes()
    arrays["ids"] = ids
    arrays["keys"] = np.array([data.index.key(int(sample)) for sample in ids])
    arrays["class_names"] = np.array(data.index.class_names)
    with atomic_write(output) as unfinished, unfinished.open("wb") as file:
        np.savez_compressed(file, **arrays)


def _pngs(store: HeatmapStore, data: Data, ids: NDArray[np.int64], output: Path) -> None:
    output.mkdir(parents=True, exist_ok=True)
    rows = store.read_without_initial_value(ids)
    for row, sample in enumerate(ids.tolist()):
        own = rows.take(slice(row, row + 1))
        key = data.index.key(sample).replace("/", "_")
        for number, name in enumerate(data.index.class_names):
            if (heatmap := heatmap_of(own, number)) is not None:
                grey = Image.fromarray((heatmap.astype(np.float32) * 255).round().astype(np.uint8))
                large = grey.resize(
                    (grey.width * CELL_PIXELS, grey.height * CELL_PIXELS), Image.Resampling.NEAREST
                )
                large.save(output / f"{key}_{number}_{_plain(name)}.png")


def _plain(name: str) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in name)


# Scores

Write = Callable[[NDArray[np.int64], NDArray[np.float16]], None]
"""Called with the ids and the scores of each shard, in the order of the ids."""


def write_scores(store: HeatmapStore, data: Data | None, output: Path) -> int:
    """Write the scores of all samples in the order of their ids; return the number of samples.

    .npz has `scores` float16 [samples, classes], `ids`, `keys` and `class_names`; .parquet the columns id,
    shard, key and scores; .npy the scores alone.
    """
    writers = {".npz": _npz, ".parquet": _parquet, ".npy": _npy}
    if output.suffix not in writers:
        raise UserError(f"{output}: scores are written as {', '.join(writers)}")
    with atomic_write(output) as partial, writers[output.suffix](partial, store, data) as write:
        for ids, scores in scores_by_shard("exporting", store):
            write(ids, scores)
    return store.spec.num_samples


def _header(file: Any, dtype: str, shape: tuple[int, ...]) -> None:
    head = {"descr": dtype, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, head)


@contextmanager
def _npy(path: Path, store: HeatmapStore, data: Data | None) -> Iterator[Write]:
    # Written in sequence: the pages of a memory map would stay in RAM until they are on disk.
    with path.open("wb") as file:
        _header(file, "<f2", (store.spec.num_samples, store.spec.num_classes))
        yield lambda ids, scores: _write(file, np.ascontiguousarray(scores, "<f2"))


def _write(file: Any, values: NDArray[Any]) -> None:
    file.write(values.tobytes())


@contextmanager
def _npz(path: Path, store: HeatmapStore, data: Data | None) -> Iterator[Write]:
    assert data is not None
    index, num_samples = data.index, store.spec.num_samples
    with zipfile.ZipFile(path, "w", allowZip64=True) as archive:
        with archive.open("scores.npy", "w", force_zip64=True) as file:
            _header(file, "<f2", (num_samples, store.spec.num_classes))
            yield lambda ids, scores: _write(file, np.ascontiguousarray(scores, "<f2"))
        with archive.open("ids.npy", "w", force_zip64=True) as file:
            _header(file, "<i8", (num_samples,))
            _write(file, index.ids().astype("<i8"))
        _write_keys(archive, data, store)
        with archive.open("class_names.npy", "w") as file:
            np.lib.format.write_array(file, np.array(index.class_names), allow_pickle=False)


def _write_keys(archive: zipfile.ZipFile, data: Data, store: HeatmapStore) -> None:
    """Write the keys shard by shard: a million of them as Python strings would take hundreds of megabytes."""
    # Bytes that are not UTF-8 are escaped, four letters each.
    raw = np.asarray(data.index.keys.values)
    longest = int(data.index.keys.lengths.max()) * (4 if len(raw) and raw.max() > 127 else 1)
    with archive.open("keys.npy", "w", force_zip64=True) as file:
        _header(file, f"<U{max(1, longest)}", (store.spec.num_samples,))
        for shard in range(store.spec.num_shards):
            keys = [data.index.key(int(sample)) for sample in store.spec.sample_ids(shard)]
            _write(file, np.array(keys, f"<U{max(1, longest)}"))


@contextmanager
def _parquet(path: Path, store: HeatmapStore, data: Data | None) -> Iterator[Write]:
    assert data is not None
    pyarrow, parquet = load_pyarrow(".parquet", ".npz")
    index, width = data.index, store.spec.num_classes
    names = index.shard_names  # once: it is computed from all addresses
    vector = pyarrow.list_(pyarrow.float32(), width)
    text = pyarrow.string()
    columns = [("id", pyarrow.int64()), ("shard", text), ("key", text), ("scores", vector)]
    # A name may contain any letter, so JSON.
    schema = pyarrow.schema(columns, metadata={"class_names": json.dumps(index.class_names)})

    def write(ids: NDArray[np.int64], scores: NDArray[np.float16]) -> None:
        values = pyarrow.array(scores.astype(np.float32).reshape(-1))
        arrays = [
            pyarrow.array(ids),
            pyarrow.array([names[int(sample) // index.rows_per_shard] for sample in ids]),
            pyarrow.array([index.key(int(sample)) for sample in ids]),
            pyarrow.FixedSizeListArray.from_arrays(values, width),
        ]
        writer.write_table(pyarrow.table(arrays, schema=schema))

    with parquet.ParquetWriter(path, schema) as writer:
        yield write
