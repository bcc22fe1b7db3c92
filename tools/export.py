"""`bigscl export`: write found labels, scores and heatmaps to files that other programs read."""

from collections.abc import Sequence
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
from bigscl.tools.passes import pass_over, scores_by_shard
from bigscl.tools.regions import strongest_boxes
from bigscl.tools.samples import find_samples
from bigscl.tools.tables import Batch, table_writer
from bigscl.tools.text import size, tell

What = Literal["labels", "scores", "heatmaps"]
Which = Literal["mined", "expected", "all"]
# Side of a heatmap cell in an exported PNG.
CELL_PIXELS = 16
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
            help="labels: .csv, .jsonl or .parquet, one line per sample and class; scores: .npy, one row "
            "per sample; heatmaps of chosen samples: .npz, or a folder of PNGs."
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
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the output if it exists.")] = False,
    snapshot: AtSnapshot = None,
    *,
    source: DataFlags,
    storage: StorageFlags,
    as_json: AsJson = False,
) -> None:
    """Write labels (with score and the box of the strongest region), scores or heatmaps to a file.

    Example: bigscl export runs/quickstart labels -o mined.csv
    """
    if sample and what != "heatmaps":
        raise ValueError(f"--sample: has no effect on {what}, only on heatmaps")
    if output.exists() and not overwrite:
        raise ValueError(f"{output}: already exists. Choose another name, or add --overwrite.")
    opened = open_store(store, snapshot, storage)
    fingerprint = opened.spec.fingerprint
    expected: Expected | None = None
    if what == "scores":
        data = source.find(store, fingerprint)
        rows = _scores(open_store(store, opened.snapshot.id, storage, data), output)
    else:
        needed = source.need(what, store, fingerprint)
        opened = open_store(store, opened.snapshot.id, storage, needed)
        if what == "labels":
            expected = expected_at(opened)
            rows = _labels(opened, needed, output, which, expected)
        else:
            rows = _heatmaps(opened, needed, output, sample or [])
    at = opened.snapshot.id
    facts: dict[str, Any] = {"output": str(output), "what": what, "snapshot": at, "rows": rows}
    told = f"{output}: {what} at snapshot {at}, {rows:,} rows, {size(_bytes(output))}"
    if expected is not None:
        facts["selection"] = expected.to_json()
        told += f"\n  {expected.note}" if expected.recomputed else ""
    tell(facts, told, as_json)


def _bytes(path: Path) -> int:
    return sum(one.stat().st_size for one in (path.iterdir() if path.is_dir() else [path]))


# Labels


def _labels(store: HeatmapStore, data: Data, output: Path, which: Which, expected: Expected) -> int:
    if not expected.any and which != "all":
        raise ValueError(
            f"{store.backend.url}: {expected.note}. "
            f"Export a later snapshot, or use --which all for the annotated positives."
        )
    work = partial(_labels_of_shard, store, data, data.index.shard_names, expected, which)
    rows = 0
    with table_writer(output, COLUMNS) as write:
        for _, labels in pass_over("exporting", range(store.spec.num_shards), work, [store]):
            write(labels)
            rows += len(labels["id"])
    return rows


def _labels_of_shard(
    store: HeatmapStore, data: Data, names: Sequence[str], expected: Expected, which: Which, shard: int
) -> Batch:
    ids = store.spec.sample_ids(shard)
    rows = store.load_shard(shard)
    scores = rows.scores[: len(ids)]
    annotated, chosen = data.annotated(ids), expected.of(scores, ids)
    wanted = {"mined": chosen & ~annotated, "expected": chosen, "all": chosen | annotated}[which]
    places, classes = np.divmod(np.flatnonzero(wanted), wanted.shape[1])
    columns = {
        "id": ids[places],
        "shard": _texts([names[shard]])[np.zeros(len(places), int)],
        "key": _texts([data.index.key(sample) for sample in ids[places].tolist()]),
        "class": classes,
        "name": _texts(data.index.class_names)[classes],
        "score": scores[places, classes].astype(np.float64).round(4),
        "annotated": annotated[places, classes],
        "expected": chosen[places, classes],
    }
    boxes = _boxes(rows, places, classes).round(4)
    return columns | dict(zip(("x0", "y0", "x1", "y1"), boxes.T, strict=True))


def _texts(values: Sequence[str]) -> NDArray[Any]:
    return np.array(values, dtype=object)


def _boxes(rows: Rows, places: NDArray[np.int64], classes: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return `[n,4]`: the box of the strongest region of each (row, class); NaN where there is none."""
    if rows.heatmaps is None:
        return np.full((len(places), 4), np.nan)
    return strongest_boxes(rows.heatmaps_of(places, classes))


# Scores


def _scores(store: HeatmapStore, output: Path) -> int:
    """Write the scores of all samples as float16 `[samples, classes]`, in the order of their ids."""
    if output.suffix != ".npy":
        raise ValueError(f"{output}: scores are written as .npy")
    shape = (store.spec.num_samples, store.spec.num_classes)
    head = {"descr": "<f2", "fortran_order": False, "shape": shape}
    # Written in sequence: the pages of a memory map would stay in RAM until they are on disk.
    with atomic_write(output) as unfinished, unfinished.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, head)
        for _, scores in scores_by_shard("exporting", store):
            file.write(np.ascontiguousarray(scores, "<f2").data)
    return store.spec.num_samples


# Heatmaps


def _heatmaps(store: HeatmapStore, data: Data, output: Path, wanted: list[str]) -> int:
    """Write the heatmaps of some samples; as PNGs, one file per class, 0 is black and 1 white."""
    if not wanted:
        raise ValueError("heatmaps: which samples? Name them with --sample KEY or --sample ID.")
    if output.suffix not in ("", ".npz"):
        raise ValueError(f"{output}: heatmaps are written as .npz, or as PNGs in a folder")
    ids = find_samples(wanted, store.spec, data.index)
    if store.group.layout == "scores":
        raise ValueError(
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
        np.savez_compressed(file, allow_pickle=False, **arrays)


def _pngs(store: HeatmapStore, data: Data, ids: NDArray[np.int64], output: Path) -> None:
    from PIL import Image

    output.mkdir(parents=True, exist_ok=True)
    rows = store.read(ids)
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
