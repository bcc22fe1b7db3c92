"""`bigscl export`: write found labels, scores and heatmaps to files that other programs read."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import typer
from numpy.typing import NDArray

from bigscl.command_line import AsJson
from bigscl.files import atomic_write
from bigscl.plots.samples import heatmap_of
from bigscl.store import HeatmapStore, Rows
from bigscl.tools.expected import Expected, expected_at
from bigscl.tools.opening import AtSnapshot, Data, DataFlags, StorageFlags, Store, open_store
from bigscl.tools.passes import pass_over
from bigscl.tools.regions import best_share, overlaps, strongest_boxes
from bigscl.tools.samples import find_samples
from bigscl.tools.score_files import write_scores
from bigscl.tools.tables import Batch, table_writer
from bigscl.tools.text import size, tell
from bigscl.user_error import UserError

What = Literal["labels", "scores", "heatmaps", "samples"]
Which = Literal["mined", "expected", "all"]
# Side of a heatmap cell in an exported PNG.
CELL_PIXELS = 16
DEFAULT_SHARE = 0.5
# Shards, and samples of each of them, that are looked at for boxes.
SHARDS_WITH_BOXES = 16
LOOKED_AT = 50
COLUMNS = {
    "id": int,
    "shard": str,
    "key": str,
    "class": int,
    "name": str,
    "score": float,
    "annotated": bool,
    "expected": bool,
    "x0": float,
    "y0": float,
    "x1": float,
    "y1": float,
}


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
    which: Annotated[
        Which,
        typer.Option(
            help="Labels to write. mined: expected positives that are not annotated; expected: all expected "
            "positives; all: these and all annotated positives, a relabelled dataset."
        ),
    ] = "mined",
    sample: Annotated[
        list[str] | None,
        typer.Option(help="Sample whose heatmaps are written, by key or id; may be repeated."),
    ] = None,
    box_share: Annotated[
        float | None,
        typer.Option(
            min=0.01,
            max=1.0,
            help="Cells of the box of a label have at least this share of the peak. Default: the share that "
            "fits best where the shards have boxes, else 0.5.",
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the output if it exists.")] = False,
    snapshot: AtSnapshot = None,
    *,
    source: DataFlags,
    storage: StorageFlags,
    as_json: AsJson = False,
) -> None:
    """Write labels (with score and the box of the strongest region), scores or heatmaps to a file.

    Where the shards have boxes, half of the labels with boxes choose the size of the regions, and the other
    half says how well they fit.

    Example: bigscl export runs/quickstart labels -o mined.csv
    """
    if sample and what != "heatmaps":
        raise UserError(f"--sample: has no effect on {what}, only on heatmaps")
    if box_share is not None and what != "labels":
        raise UserError(f"--box-share: has no effect on {what}, only on labels")
    if output.exists() and not overwrite:
        raise UserError(f"{output}: already exists. Choose another name, or add --overwrite.")
    opened = open_store(store, snapshot, storage)
    fingerprint = opened.spec.fingerprint
    expected: Expected | None = None
    fit: Fit | None = None
    if what == "scores":
        data = source.find(store, fingerprint)
        if data is None and output.suffix != ".npy":
            data = source.need("scores with keys", store, fingerprint)
        rows = write_scores(open_store(store, opened.snapshot.id, storage, data), data, output)
    else:
        needed = source.need(what, store, fingerprint)
        opened = open_store(store, opened.snapshot.id, storage, needed)
        if what == "samples":
            rows = _samples(needed, output)
        elif what == "labels":
            expected = expected_at(opened)
            fit = _fit(opened, needed, which, expected, box_share)
            rows = _labels(opened, needed, output, which, expected, fit.share)
        else:
            rows = _heatmaps(opened, needed, output, sample or [])
    at = opened.snapshot.id
    facts: dict[str, Any] = {"output": str(output), "what": what, "snapshot": at, "rows": rows}
    told = f"{output}: {what} at snapshot {at}, {rows:,} rows, {size(_bytes(output))}"
    if expected is not None:
        facts["selection"] = expected.to_json()
        told += f"\n  {expected.note}" if expected.recomputed else ""
    if fit is not None:
        facts["region"] = asdict(fit)
        told += f"\n  {fit}"
    tell(facts, told, as_json)


def _bytes(path: Path) -> int:
    return sum(one.stat().st_size for one in (path.iterdir() if path.is_dir() else [path]))


# Labels


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """How large the boxes of labels are, and how well they fit where the shards have boxes."""

    share: float
    """The cells of a box have at least this share of the peak."""
    median_iou: float | None = None
    """Intersection over union of labels that did not choose the share; None without boxes."""
    num_labels: int = 0
    """The number of these labels."""

    def __str__(self) -> str:
        if self.median_iou is None:
            return (
                f"boxes: cells of at least {self.share:g} of the peak; the shards have no boxes to check them"
            )
        return (
            f"boxes: cells of at least {self.share:g} of the peak; median IoU {self.median_iou:.2f} with the "
            f"boxes of {self.num_labels:,} labels"
        )


def _fit(store: HeatmapStore, data: Data, which: Which, expected: Expected, given: float | None) -> Fit:
    """Choose the share of the peak by labels of even ids that have boxes, and measure it on odd ids."""
    maps, boxes, is_even = _labels_with_boxes(store, data, which, expected)
    halves = [[n for n, even in enumerate(is_even) if even == wanted] for wanted in (True, False)]
    if not all(halves):
        return Fit(share=DEFAULT_SHARE if given is None else given)
    stacked = np.stack(maps)
    chosen, checked = ((stacked[half], [boxes[n] for n in half]) for half in halves)
    share = best_share(*chosen) if given is None else given
    found = overlaps(strongest_boxes(checked[0], share), checked[1])
    return Fit(share=share, median_iou=float(np.median(found)), num_labels=len(found))


def _labels_with_boxes(
    store: HeatmapStore, data: Data, which: Which, expected: Expected
) -> tuple[list[NDArray[Any]], list[list[list[float]]], list[bool]]:
    """Return heatmaps of labels, their true boxes, and whether their ids are even; of some of the shards."""
    from bigscl.data.reader import read_metadata

    found: tuple[list[Any], list[Any], list[bool]] = ([], [], [])
    written = [shard for shard, slot in enumerate(store.snapshot.slots) if slot >= 0]
    for shard in written[:: max(1, len(written) // SHARDS_WITH_BOXES)]:
        ids = store.spec.sample_ids(shard)
        if not any(fields.get("boxes") for fields in read_metadata(data.index, ids[:LOOKED_AT]).values()):
            continue
        rows = store.load_shard(shard)
        places, classes, *_ = _wanted(rows, ids, data, expected, which)
        kept = rows.kept_classes()
        metadata = read_metadata(data.index, np.unique(ids[places]))
        for place, number in zip(places.tolist(), classes.tolist(), strict=True):
            boxes = [box[1:] for box in metadata[int(ids[place])].get("boxes", ()) if box[0] == number]
            if boxes and number in kept[place]:
                found[0].append(store.evidence_of(rows, ids, np.array([place]), np.array([number]))[0])
                found[1].append(boxes)
                found[2].append(bool(ids[place] % 2 == 0))
    return found


def _wanted(
    rows: Rows, ids: NDArray[np.int64], data: Data, expected: Expected, which: Which
) -> tuple[NDArray[Any], ...]:
    """Return places in the shard, classes, annotated, expected of the labels to write."""
    annotated, chosen = data.annotated(ids), expected.of(rows.ranked_by()[: len(ids)], ids)
    wanted = {"mined": chosen & ~annotated, "expected": chosen, "all": chosen | annotated}[which]
    places, classes = np.divmod(np.flatnonzero(wanted), wanted.shape[1])
    return places, classes, annotated[places, classes], chosen[places, classes]


def _labels(
    store: HeatmapStore, data: Data, output: Path, which: Which, expected: Expected, share: float
) -> int:
    if not expected.any and which != "all":
        raise UserError(
            f"{store.backend.url}: {expected.note}. "
            f"Export a later snapshot, or use --which all for the annotated positives."
        )
    work = partial(_labels_of_shard, store, data, data.index.shard_names, expected, which, share)
    rows = 0
    with table_writer(output, COLUMNS) as write:
        for _, labels in pass_over("exporting", range(store.spec.num_shards), work, [store]):
            write(labels)
            rows += len(labels["id"])
    return rows


def _labels_of_shard(
    store: HeatmapStore,
    data: Data,
    names: Sequence[str],
    expected: Expected,
    which: Which,
    share: float,
    shard: int,
) -> Batch:
    ids = store.spec.sample_ids(shard)
    rows = store.load_shard(shard)
    places, classes, annotated, chosen = _wanted(rows, ids, data, expected, which)
    columns = {
        "id": ids[places],
        "shard": _texts([names[shard]])[np.zeros(len(places), int)],
        "key": _texts([data.index.key(sample) for sample in ids[places].tolist()]),
        "class": classes,
        "name": _texts(data.index.class_names)[classes],
        "score": rows.scores[places, classes].astype(np.float64).round(4),
        "annotated": annotated,
        "expected": chosen,
    }
    boxes = np.full((len(places), 4), np.nan)
    if rows.heatmaps is not None:
        boxes = strongest_boxes(store.evidence_of(rows, ids, places, classes), share).round(4)
    return columns | dict(zip(("x0", "y0", "x1", "y1"), boxes.T, strict=True))


def _texts(values: Sequence[str]) -> NDArray[Any]:
    return np.array(values, dtype=object)


# Samples


def _samples(data: Data, output: Path) -> int:
    """Write the list of samples that a run keeps in its folder, for a store that has none."""
    from bigscl.data.sample_list import write_sample_list

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
        _npz(store, data, ids, output)
    else:
        _pngs(store, data, ids, output)
    return len(ids)


def _npz(store: HeatmapStore, data: Data, ids: NDArray[np.int64], output: Path) -> None:
    rows = store.read(ids)
    arrays: dict[str, Any] = dict(rows.arrays())
    arrays["classes"] = rows.kept_classes()
    arrays["ids"] = ids
    arrays["keys"] = np.array([data.index.key(int(one)) for one in ids])
    arrays["class_names"] = np.array(data.index.class_names)
    with atomic_write(output) as unfinished, unfinished.open("wb") as file:
        np.savez_compressed(file, **arrays)


def _pngs(store: HeatmapStore, data: Data, ids: NDArray[np.int64], output: Path) -> None:
    from PIL import Image

    output.mkdir(parents=True, exist_ok=True)
    rows = store.read_evidence(ids)
    for place, sample in enumerate(ids.tolist()):
        one = rows.take(slice(place, place + 1))
        key = data.index.key(sample).replace("/", "_")
        for number, name in enumerate(data.index.class_names):
            if (heatmap := heatmap_of(one, number)) is not None:
                grey = Image.fromarray((heatmap.astype(np.float32) * 255).round().astype(np.uint8))
                large = grey.resize(
                    (grey.width * CELL_PIXELS, grey.height * CELL_PIXELS), Image.Resampling.NEAREST
                )
                large.save(output / f"{key}_{number}_{_plain(name)}.png")


def _plain(name: str) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in name)
