"""A run, or the store of an own loop, in Python: tables are DataFrames of pandas, pictures show inline."""

import io
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bigscl.common.user_error import UserError
from bigscl.data.read_samples import read_image_heads
from bigscl.evaluation.sample_plots import DPI, SampleImages, figure_of, heatmap_of, over_image, side_by_side
from bigscl.tools.shared.find_samples import find_class, find_samples
from bigscl.tools.shared.image_files import ImageFiles, listed_images
from bigscl.tools.shared.label_table import find_labels
from bigscl.tools.shared.open_store import DataFlags, StorageFlags, run_folder, trust_at, with_snapshot
from bigscl.tools.shared.shard_passes import expected_at, to_float32
from bigscl.tools.viewer.open_run import OpenRun, Places
from bigscl.tools.viewer.score_index import ABSENT, ANNOTATED, EXPECTED, PRESENT, Order, Query, listed

ORDERS: dict[str, Order] = {"surprise": "surprise", "change": "change", "heat": "heat", "score": "score"}
FLAGS = {"given": ANNOTATED, "expected": EXPECTED, "present": PRESENT, "absent": ABSENT}
BOX = ("x0", "y0", "x1", "y1")
Names = Sequence[str] | str | os.PathLike[str]


def open_run(
    run: str | os.PathLike[str],
    *,
    shards: str | Sequence[str] | None = None,
    index: str | os.PathLike[str] | None = None,
    images: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
    labels: Sequence[Collection[int]] | None = None,
    names: Names | None = None,
) -> "Run":
    """Open the folder of a run, or a store; `run@7` is its snapshot 7.

    The store of an own loop needs its `images`: a folder or a table, as `--images` of the commands takes
    them, or the path of every image, with the `labels` that the loop gave to `bigscl.Annotations.of`. `names`
    of the classes are a list, or a file with one on each line.
    """
    return Run(os.fspath(run), _source(shards, index, images, labels, names))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Listed(DataFlags):
    """Images that are given one by one."""

    listed: ImageFiles

    def files(self) -> ImageFiles:
        return self.listed


def _source(
    shards: str | Sequence[str] | None,
    index: str | os.PathLike[str] | None,
    images: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None,
    labels: Sequence[Collection[int]] | None,
    names: Names | None,
) -> DataFlags:
    if images is not None and not isinstance(images, str | os.PathLike):
        if labels is None or isinstance(names, str | os.PathLike):
            raise UserError("images: a list of paths needs labels, the classes of each; and names as a list")
        return _Listed(listed=listed_images(images, labels, names))
    if labels is not None:
        raise UserError("labels: are for a list of images; a folder or a table of images has its own")
    if names is not None and not isinstance(names, str | os.PathLike):
        raise UserError("names: a list is for a list of images. Give a file with one name on each line.")
    return DataFlags(
        shards=[shards] if isinstance(shards, str) else None if shards is None else list(shards),
        index=None if index is None else Path(index),
        images=None if images is None else Path(images),
        names=None if names is None else Path(names),
    )


class Run:
    """A run, or a store with its images, which is only read. While a training writes it, each call sees its
    newest snapshot.
    """

    def __init__(self, place: str, source: DataFlags) -> None:
        """Open it, unless nothing but metrics is there: a run without a store on disk has those."""
        self._place, self._source = place, source
        self.folder = run_folder(with_snapshot(place)[0])
        """Of the run; None if the store is in none."""
        if not Path(place, "config.yaml").is_file():
            self._opened  # noqa: B018 - a wrong path is an error now

    def __repr__(self) -> str:
        return f"bigscl.open_run({self._place!r})"

    @property
    def _opened(self) -> OpenRun:
        self._open_run.reopen()
        return self._open_run

    @cached_property
    def _open_run(self) -> OpenRun:
        return OpenRun(self._place, Places(source=self._source, storage=StorageFlags()))

    @property
    def class_names(self) -> tuple[str, ...]:
        return self._opened.data.index.class_names

    def metrics(self) -> Any:
        """Return a DataFrame with a row for each epoch, and columns such as `train/loss` and `val/map`."""
        from bigscl.evaluation.run_plots import read_curves

        if self.folder is None or not (self.folder / "metrics.jsonl").is_file():
            raise UserError(
                f"{self._place}: no metrics.jsonl here. Runs of `bigscl train` have it in their folder."
            )
        pandas, curves = _pandas(), read_curves(self.folder)
        columns = {name: pandas.Series(curve, dtype=float) for name, curve in curves.items()}
        return pandas.DataFrame(columns).rename_axis("epoch").sort_index()

    def labels(self) -> Any:
        """Return a DataFrame with a row for each given or expected label.

        `trust` is the share of found labels of such classes that are right, estimated from hidden labels
        (`data.canaries`), NaN if unknown; `box` is around the hottest region, as fractions of the image.
        """
        pandas, run = _pandas(), self._opened
        store, data = run.store, run.data
        found = find_labels(store, data, "all")
        share = found.fit(None).share
        parts = [labels for _, labels in found.passed_over(partial(found.of_shard, share=share))]
        columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        boxes = zip(*(columns[name].tolist() for name in BOX), strict=True)
        frame = {
            "path": [
                path or data.index.name(n) for path, n in zip(columns["path"], columns["id"], strict=True)
            ],
            "class": columns["name"],
            "score": columns["score"],
            "given": columns["annotated"],
            "expected": columns["expected"],
            "trust": np.where(columns["annotated"], np.nan, _trust(run)[columns["class"]]),
            "box": [None if np.isnan(box[0]) else box for box in boxes],
        }
        return pandas.DataFrame(frame, index=pandas.Index(columns["key"], name="key"))

    def samples(self, by: str = "surprise", *, name: str | None = None, count: int = 100) -> Any:
        """Return a DataFrame of samples and their classes as the page lists them, of class `name` if given.

        `by` surprise, change, heat or score. The first call reads the whole store, once for each snapshot.
        """
        pandas, run = _pandas(), self._opened
        if by not in ORDERS:
            raise UserError(f"by: found {by!r}, expected one of {', '.join(ORDERS)}")
        run.update(now=True)
        assert run.index is not None
        index = run.data.index
        number = None if name is None else find_class(name, index)
        pairs = listed(run.index, Query(order=ORDERS[by], number=number), index, None)[:count]
        rows = pairs["row"].tolist()
        frame = {
            "path": [index.source(row) or index.name(row) for row in rows],
            "class": [index.class_names[each] for each in pairs["class"].tolist()],
            "score": to_float32(pairs["score"]),
            "change": to_float32(pairs["change"]),
            "peak": pairs["peak"] / np.float32(255),
            **{flag: pairs["flags"] & bit != 0 for flag, bit in FLAGS.items()},
        }
        return pandas.DataFrame(frame, index=pandas.Index([index.key(row) for row in rows], name="key"))

    def heatmap(self, key: str | int, name: str | int) -> NDArray[np.float32]:
        """Return the heatmap of a class in a sample, `[height,width]` of its image, 0 to 1."""
        run = self._opened
        store, index = run.store, run.data.index
        ids = find_samples([str(key)], store.spec, index)
        number = find_class(str(name), index)
        rows = store.read_without_initial_value(ids)
        heatmap = None if rows.heatmaps is None else heatmap_of(rows, number)
        if heatmap is None:
            kept = [] if rows.heatmaps is None else rows.kept_classes()[0].tolist()
            names = ", ".join(index.class_names[each] for each in kept) or "none"
            raise UserError(f"{index.name(int(ids[0]))}: no heatmap of {name!r}, kept: {names}")
        head = read_image_heads(index, ids).get(int(ids[0]))
        if head is None:
            raise UserError(f"{index.name(int(ids[0]))}: the image cannot be read")
        return over_image(heatmap, head.width, head.height)

    def show(self, key: str | int, *, heatmaps: int = 6) -> "Picture":
        """Return a picture of a sample with its strongest heatmaps, which a notebook shows."""
        run = self._opened
        store, data = run.store, run.data
        ids = find_samples([str(key)], store.spec, data.index)
        selected = None
        if data.index.full is None:
            selected = expected_at(store).expected(store.read(ids).ranked_by(), ids)
        images = SampleImages(data.index, ids, data.annotated(ids), selected)
        return Picture(figure_of(side_by_side([store], images, ids, heatmaps)))


def _trust(run: OpenRun) -> NDArray[np.float64]:
    """Return the share of the found labels of such classes that are right, [L]."""
    index, trust = run.data.index, trust_at(run.store)
    counts = np.bincount(index.given.values, minlength=index.num_classes)
    return np.full(len(counts), np.nan) if trust is None else trust.by_class(counts)


class Picture:
    """A picture that notebooks show inline, whichever backend matplotlib has."""

    def __init__(self, figure: Any) -> None:
        self.figure = figure
        """Of matplotlib."""

    def _repr_png_(self) -> bytes:
        file = io.BytesIO()
        self.figure.savefig(file, format="png", dpi=DPI)
        return file.getvalue()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as a file; the suffix gives the format."""
        self.figure.savefig(path, dpi=DPI)


def _pandas() -> Any:
    try:
        return import_module("pandas")
    except ImportError:
        raise UserError(
            "tables of open_run: need the package pandas: pip install 'bigscl[notebook]'"
        ) from None
