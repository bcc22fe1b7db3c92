"""Tables of the labels of a snapshot: scores, and boxes around the strongest regions of heatmaps."""

import csv
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from bigscl.common.files import atomic_write, load_pyarrow
from bigscl.common.user_error import UserError
from bigscl.data.index import Index
from bigscl.data.read_samples import read_metadata
from bigscl.store import Array, HeatmapStore, Rows
from bigscl.tools.shared.open_store import Data
from bigscl.tools.shared.shard_passes import SnapshotThresholds, expected_at, pass_over

Columns = Mapping[str, type]
"""Names and types of the columns: int, float, str or bool; in Parquet also list, of integers."""
Batch = Mapping[str, NDArray[Any]]
"""Columns of equal length, strings as objects; NaN means no value."""
Write = Callable[[Batch], None]


Result = TypeVar("Result")
Which = Literal["mined", "expected", "all"]
DEFAULT_SHARE = 0.5
# Shards, and samples of each of them, that are looked at for boxes.
SHARDS_WITH_BOXES = 16
LOOKED_AT = 50
LABEL = {"id": int, "shard": str, "key": str, "path": str, "class": int, "name": str}
BOX = {"x0": float, "y0": float, "x1": float, "y1": float}
COLUMNS = {**LABEL, "score": float, "annotated": bool, "expected": bool, **BOX}


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
        fits = "the shards have no boxes to check them"
        if self.median_iou is not None:
            fits = f"median IoU {self.median_iou:.2f} with the boxes of {self.num_labels:,} labels"
        return f"boxes: cells of at least {self.share:g} of the peak; {fits}"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FoundLabels:
    """The labels of a snapshot, read shard by shard."""

    store: HeatmapStore
    data: Data
    which: Which
    expected: SnapshotThresholds
    shard_names: tuple[str, ...]
    """Kept, since an index computes them from all addresses."""

    def passed_over(self, work: Callable[[int], Result]) -> Iterator[tuple[int, Result]]:
        """Yield `work(shard)` of each shard in order, as `pass_over`."""
        return pass_over("reading labels", range(self.store.spec.num_shards), work, [self.store])

    def of_shard(self, shard: int, share: float) -> Batch:
        """Return the labels of a shard in the order of ids and classes; `share` gives the size of boxes."""
        ids, rows = self.store.spec.sample_ids(shard), self.store.load_shard(shard)
        places, classes, annotated, chosen = self._wanted(rows, ids)
        seen = self.store.scores_without_initial_value(rows, ids)
        columns = {
            **label_columns(self.data.index, self.shard_names, ids[places], classes),
            "score": seen[places, classes].astype(np.float64).round(4),
            "annotated": annotated,
            "expected": chosen,
        }
        boxes = np.full((len(places), 4), np.nan)
        if rows.heatmaps is not None:
            heatmaps = self.store.heatmaps_without_initial_value(rows, ids, places, classes)
            boxes = strongest_boxes(heatmaps, share).round(4)
        return columns | dict(zip(("x0", "y0", "x1", "y1"), boxes.T, strict=True))

    def fit(self, given: float | None) -> Fit:
        """Choose the share of the peak by labels of even ids that have boxes, and measure it on odd ids."""
        maps, boxes, is_even = self._with_boxes()
        halves = [[n for n, even in enumerate(is_even) if even == wanted] for wanted in (True, False)]
        if not all(halves):
            return Fit(share=DEFAULT_SHARE if given is None else given)
        stacked = np.stack(maps)
        chosen, checked = ((stacked[half], [boxes[n] for n in half]) for half in halves)
        share = best_share(*chosen) if given is None else given
        ious = overlaps(strongest_boxes(checked[0], share), checked[1])
        return Fit(share=share, median_iou=float(np.median(ious)), num_labels=len(ious))

    def _with_boxes(self) -> tuple[list[NDArray[Any]], list[list[list[float]]], list[bool]]:
        """Return heatmaps of labels, their true boxes, whether their ids are even; of some of the shards."""
        store, index = self.store, self.data.index
        found: tuple[list[Any], list[Any], list[bool]] = ([], [], [])
        written = [shard for shard, slot in enumerate(store.snapshot.slots) if slot >= 0]
        for shard in written[:: max(1, len(written) // SHARDS_WITH_BOXES)]:
            ids = store.spec.sample_ids(shard)
            if not any(fields.get("boxes") for fields in read_metadata(index, ids[:LOOKED_AT]).values()):
                continue
            rows = store.load_shard(shard)
            places, classes, *_ = self._wanted(rows, ids)
            kept = rows.kept_classes()
            metadata = read_metadata(index, np.unique(ids[places]))
            for row, number in zip(places.tolist(), classes.tolist(), strict=True):
                boxes = [box[1:] for box in metadata[int(ids[row])].get("boxes", ()) if box[0] == number]
                if boxes and number in kept[row]:
                    at = np.array([row]), np.array([number])
                    found[0].append(store.heatmaps_without_initial_value(rows, ids, *at)[0])
                    found[1].append(boxes)
                    found[2].append(bool(ids[row] % 2 == 0))
        return found

    def _wanted(self, rows: Rows, ids: NDArray[np.int64]) -> tuple[NDArray[Any], ...]:
        """Return places in the shard, classes, annotated, expected of the labels to write."""
        known = self.data.index.labels_of(ids, self.data.labels)
        annotated, chosen = known == 1, self.expected.expected(rows.ranked_by()[: len(ids)], ids)
        if self.data.labels == "given":
            chosen &= known != 0  # however high it ranks, it is known to be absent
        wanted = {"mined": chosen & ~annotated, "expected": chosen, "all": chosen | annotated}[self.which]
        places, classes = np.divmod(np.flatnonzero(wanted), wanted.shape[1])
        return places, classes, annotated[places, classes], chosen[places, classes]


def find_labels(store: HeatmapStore, data: Data, which: Which) -> FoundLabels:
    """Return the labels of a snapshot; raise UserError if it has none of them."""
    expected = expected_at(store)
    if not expected.any and which != "all":
        raise UserError(
            f"{store.backend.url}: {expected.note}. "
            f"Export a later snapshot, or use --which all for the annotated positives."
        )
    names = data.index.shard_names
    return FoundLabels(store=store, data=data, which=which, expected=expected, shard_names=names)


def label_columns(
    index: Index, shard_names: Sequence[str], ids: NDArray[np.int64], classes: NDArray[np.int64]
) -> dict[str, NDArray[Any]]:
    """Return the columns of LABEL for pairs of image and class."""
    samples = ids.tolist()
    return {
        "id": ids,
        "shard": objects(shard_names)[ids // index.rows_per_shard],
        "key": objects([index.key(sample) for sample in samples]),
        "path": objects([index.source(sample) or "" for sample in samples]),
        "class": classes,
        "name": objects(index.class_names)[classes],
    }


def objects(values: Sequence[Any]) -> NDArray[Any]:
    """Return an array of objects, even of lists of equal length."""
    array = np.empty(len(values), object)
    array[:] = values
    return array


# Boxes


def strongest_boxes(heatmaps: Array, share: float = 0.5) -> NDArray[np.float64]:
    """Return `[n,4]` (x0, y0, x1, y1) in 0..1: the box around the connected cells at the peak of each map.

    Cells are connected if they share an edge and have at least `share` of the peak. The box of a map of zeros
    is NaN.
    """
    # Maps last: then every shift by a cell is over long contiguous rows, six times faster than maps first.
    values = np.ascontiguousarray(heatmaps.transpose(1, 2, 0), dtype=np.float32)
    side, _, num_maps = values.shape
    flat = values.reshape(side * side, num_maps)
    peaks = flat.max(axis=0)
    region = np.zeros(flat.shape, bool)
    region[flat.argmax(axis=0), np.arange(num_maps)] = True
    region = _grown(region.reshape(values.shape), values >= share * peaks)
    columns, rows = np.asarray(region.any(axis=0)), np.asarray(region.any(axis=1))
    edges = [_first(columns), _first(rows), side - _first(columns[::-1]), side - _first(rows[::-1])]
    boxes: NDArray[np.float64] = np.stack(edges, axis=1) / side
    boxes[peaks <= 0] = np.nan
    return boxes


def _grown(region: NDArray[np.bool_], hot: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return all hot cells that are connected to the region, for all maps `[W,W,n]` at once."""
    while True:
        wider = region.copy()
        wider[1:] |= region[:-1]
        wider[:-1] |= region[1:]
        wider[:, 1:] |= region[:, :-1]
        wider[:, :-1] |= region[:, 1:]
        wider &= hot
        if np.array_equal(wider, region):
            return region
        region = wider


def _first(mask: NDArray[np.bool_]) -> NDArray[np.int64]:
    return np.asarray(mask.argmax(axis=0))


SHARES = tuple(round(0.1 + 0.05 * step, 2) for step in range(17))
"""Shares of the peak that are tried: 0.1 to 0.9."""


def overlaps(found: NDArray[np.float64], boxes: Sequence[Sequence[Sequence[float]]]) -> NDArray[np.float64]:
    """Return for each box found its IoU with the best of the true boxes of its map; 0 for NaN."""
    pairs = zip(found, boxes, strict=True)
    values = [max((_overlap(one, box) for box in true), default=0.0) for one, true in pairs]
    return np.array(values, np.float64)


def _overlap(one: Sequence[float] | NDArray[np.float64], other: Sequence[float]) -> float:
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    if not (width > 0 and height > 0):  # also if one of them is NaN
        return 0.0
    areas = [(box[2] - box[0]) * (box[3] - box[1]) for box in (one, other)]
    return float(width * height / (sum(areas) - width * height))


def best_share(heatmaps: Array, boxes: Sequence[Sequence[Sequence[float]]]) -> float:
    """Return the share of the peak at which the strongest boxes fit the true ones best, in the mean."""
    means = [overlaps(strongest_boxes(heatmaps, share), boxes).mean() for share in SHARES]
    return SHARES[int(np.argmax(means))]


# Files

# Readers of Parquet work by row group: a group per shard would make thousands of small ones.
ROWS_PER_GROUP = 2**17


@contextmanager
def table_writer(path: Path, columns: Columns) -> Iterator[Write]:
    """Yield `write(batch)`, to call for each batch; the suffix of the path gives the format."""
    writers = {".csv": _csv, ".jsonl": _jsonl, ".parquet": _parquet}
    if path.suffix not in writers:
        raise UserError(f"{path}: tables are written as {', '.join(writers)}")
    with atomic_write(path) as partial, writers[path.suffix](partial, columns) as write:
        yield write


@contextmanager
def _csv(path: Path, columns: Columns) -> Iterator[Write]:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        yield lambda batch: writer.writerows(zip(*(_values(batch[name]) for name in columns), strict=True))


def _values(column: NDArray[Any]) -> list[Any]:
    """Return plain values, with None for NaN."""
    if column.dtype.kind != "f":
        return list(column.tolist())
    values = column.astype(object)
    values[np.isnan(column)] = None
    return list(values)


@contextmanager
def _jsonl(path: Path, columns: Columns) -> Iterator[Write]:
    line = "{" + ", ".join(f"{json.dumps(name)}: %s" for name in columns) + "}\n"
    with path.open("w") as file:
        yield lambda batch: file.writelines(
            map(line.__mod__, zip(*(_as_json(batch[name]) for name in columns), strict=True))
        )


def _as_json(column: NDArray[Any]) -> list[str]:
    """Return each value as JSON. Most columns repeat a few values, so each is encoded once."""
    distinct, places = np.unique(column, return_inverse=True)
    encoded = np.array([json.dumps(value) for value in _values(distinct)], dtype=object)
    return list(encoded[places])


@contextmanager
def _parquet(path: Path, columns: Columns) -> Iterator[Write]:
    pyarrow, parquet = load_pyarrow(".parquet", ".csv or .jsonl")
    types = {int: pyarrow.int64(), float: pyarrow.float64(), str: pyarrow.string(), bool: pyarrow.bool_()}
    types[list] = pyarrow.list_(types[int])
    schema = pyarrow.schema([(name, types[kind]) for name, kind in columns.items()])
    waiting: list[Any] = []

    def write_group() -> None:
        writer.write_table(pyarrow.concat_tables(waiting), row_group_size=ROWS_PER_GROUP)
        waiting.clear()

    def write(batch: Batch) -> None:
        arrays = [pyarrow.array(batch[name], types[kind], from_pandas=True) for name, kind in columns.items()]
        waiting.append(pyarrow.table(arrays, schema=schema))
        if sum(len(table) for table in waiting) >= ROWS_PER_GROUP:
            write_group()

    with parquet.ParquetWriter(path, schema) as writer:
        yield write
        if waiting:
            write_group()
