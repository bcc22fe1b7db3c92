"""`bigscl export`: the labels that were found, scores, and heatmaps, in files that other programs read."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import typer
from numpy.typing import NDArray

from bigscl.pictures import heatmap_of
from store import HeatmapStore
from tools.expected import expected_positives
from tools.opening import (
    Anonymous,
    AsJson,
    AtSnapshot,
    Data,
    Endpoint,
    IndexFile,
    Region,
    Shards,
    Store,
    find_data,
    has_selection,
    need_data,
    open_store,
    options,
)
from tools.progress import progress
from tools.regions import strongest_boxes
from tools.samples import find_samples
from tools.tables import Record, table_writer, written_whole
from tools.text import size, tell

What = Literal["labels", "scores", "heatmaps"]
Which = Literal["mined", "expected", "all"]
# A cell of a heatmap in an exported PNG is so many pixels wide.
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
            help="labels: .csv, .jsonl or .parquet, a line per sample and class; scores: .npy, a row per "
            "sample; heatmaps of chosen samples: .npz, or a folder of PNGs."
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The file, or the folder for PNGs.")],
    which: Annotated[
        Which,
        typer.Option(
            help="Labels: expected positives that are not annotated; all expected positives; or those and "
            "all annotated ones, a relabelled dataset."
        ),
    ] = "mined",
    sample: Annotated[
        list[str] | None, typer.Option(help="Heatmaps of this sample, by key or id; may be repeated.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the output if it exists.")] = False,
    snapshot: AtSnapshot = None,
    shards: Shards = None,
    index: IndexFile = None,
    endpoint: Endpoint = None,
    region: Region = None,
    anonymous: Anonymous = False,
    as_json: AsJson = False,
) -> None:
    """Write labels (with score and the box of the strongest region), scores or heatmaps to a file.

    Example: bigscl export runs/quickstart labels -o mined.csv
    """
    if sample and what != "heatmaps":
        raise ValueError(f"--sample: has no effect on {what}; it chooses heatmaps")
    if output.exists() and not overwrite:
        raise ValueError(f"{output}: exists already. Choose another name, or add --overwrite.")
    reach = options(endpoint, region, anonymous)
    opened = open_store(store, snapshot, reach)
    fingerprint = opened.spec.fingerprint
    if what == "scores":
        data = find_data(store, fingerprint, shards, index)
        rows = _scores(open_store(store, opened.snapshot.id, reach, data), output)
    else:
        needed = need_data(what, store, fingerprint, shards, index)
        opened = open_store(store, opened.snapshot.id, reach, needed)
        if what == "labels":
            rows = _labels(opened, needed, output, which)
        else:
            rows = _heatmaps(opened, needed, output, sample or [])
    facts = {"output": str(output), "what": what, "snapshot": opened.snapshot.id, "rows": rows}
    told = f"{output}: {what} at snapshot {opened.snapshot.id}, {rows:,} rows, {size(_bytes(output))}"
    tell(facts, told, as_json)


def _bytes(path: Path) -> int:
    return sum(one.stat().st_size for one in (path.iterdir() if path.is_dir() else [path]))


# Labels


def _labels(store: HeatmapStore, data: Data, output: Path, which: Which) -> int:
    if not has_selection(store.snapshot) and which != "all":
        raise ValueError(
            f"{store.backend.url}: no expected positives were chosen by snapshot {store.snapshot.id}, "
            f"epoch {store.snapshot.epoch}. Export a later one, or --which all for the annotated ones."
        )
    rows = 0
    with (
        table_writer(output, COLUMNS) as write,
        progress("exporting", store.spec.num_shards, "shards") as advance,
    ):
        for shard in range(store.spec.num_shards):
            records = list(_labels_of_shard(store, data, shard, which))
            write(records)
            rows += len(records)
            advance(1, f"{rows:,} labels")
    return rows


def _labels_of_shard(store: HeatmapStore, data: Data, shard: int, which: Which) -> Iterator[Record]:
    ids = store.spec.sample_ids(shard)
    rows = store.load_shard(shard)
    scores = rows.scores[: len(ids)]
    annotated = data.annotated(ids)
    expected = expected_positives(store.snapshot, scores, ids)
    wanted = {"mined": expected & ~annotated, "expected": expected, "all": expected | annotated}[which]
    places, classes = np.nonzero(wanted)
    found, boxes = _boxes(rows.heatmaps, rows.classes, places, classes)
    name = data.index.shard_names[shard]
    for n, (place, number) in enumerate(zip(places.tolist(), classes.tolist(), strict=True)):
        x0, y0, x1, y1 = boxes[n].round(4).tolist() if found[n] else (None,) * 4
        sample, score = int(ids[place]), round(float(scores[place, number]), 4)
        told = bool(annotated[place, number]), bool(expected[place, number])
        yield (
            *(sample, name, data.index.key(sample), number, data.index.class_names[number], score),
            *(*told, x0, y0, x1, y1),
        )


def _boxes(
    heatmaps: NDArray[Any] | None,
    kept: NDArray[Any] | None,
    places: NDArray[np.int64],
    classes: NDArray[np.int64],
) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
    """(whether there is one, the box of the strongest region) of each (row, class)."""
    boxes = np.full((len(places), 4), np.nan)
    if heatmaps is None or not len(places):
        return np.zeros(len(places), bool), boxes
    columns, there = classes, np.ones(len(places), bool)
    if kept is not None:
        equal = kept[places] == classes[:, None]
        columns, there = equal.argmax(axis=1), equal.any(axis=1)
    boxes[there] = strongest_boxes(heatmaps[places[there], columns[there]])
    return ~np.isnan(boxes[:, 0]), boxes


# Scores


def _scores(store: HeatmapStore, output: Path) -> int:
    """Scores of all samples, float16 `[samples, classes]`, in the order of their ids."""
    if output.suffix != ".npy":
        raise ValueError(f"{output}: scores are written as .npy")
    shape = (store.spec.num_samples, store.spec.num_classes)
    with written_whole(output) as partial, progress("exporting", store.spec.num_shards, "shards") as advance:
        array = np.lib.format.open_memmap(partial, mode="w+", dtype=np.float16, shape=shape)
        first = 0
        for ids, scores in store.scores_by_shard(range(store.spec.num_shards)):
            array[first : first + len(ids)] = scores
            first += len(ids)
            advance(1, f"{first:,} samples")
        array.flush()
    return first


# Heatmaps


def _heatmaps(store: HeatmapStore, data: Data, output: Path, wanted: list[str]) -> int:
    """Heatmaps of some samples; as PNGs each class has a file, 0 is black and 1 white."""
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
    if rows.classes is None:
        arrays["classes"] = np.broadcast_to(np.arange(store.spec.num_classes), rows.scores.shape)
    arrays["ids"] = ids
    arrays["keys"] = np.array([data.index.key(int(one)) for one in ids])
    arrays["class_names"] = np.array(data.index.class_names)
    with written_whole(output) as partial, partial.open("wb") as file:
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
