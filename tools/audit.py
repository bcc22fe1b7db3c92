"""`bigscl audit`: list the labels of a run's training images that are likely wrong or missing."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import typer
from numpy.typing import NDArray

from bigscl.common.command_line import AsJson
from bigscl.common.user_error import UserError
from bigscl.store import HeatmapStore
from bigscl.tools.choosing import next_epoch
from bigscl.tools.opening import Data, DataFlags, StorageFlags, Store, locate, open_store, run_folder
from bigscl.tools.regions import strongest_boxes
from bigscl.tools.samples import class_name, name_of
from bigscl.tools.tables import table_writer
from bigscl.tools.text import counted, table, tell

if TYPE_CHECKING:
    from bigscl.evaluation.audit import Warmth

Kind = Literal["wrong", "missing"]
PRINTED = 10
BOX_SHARE = 0.5
COLUMNS = {
    "kind": str,
    "id": int,
    "shard": str,
    "key": str,
    "class": int,
    "name": str,
    "suspicion": float,
    "mean": float,
    "spread": float,
    "last": float,
    "x": float,
    "y": float,
    "x0": float,
    "y0": float,
    "x1": float,
    "y1": float,
}


def command(
    store: Store,
    count: Annotated[
        int, typer.Option(min=0, help="Number of labels of each kind to list, the most suspicious first.")
    ] = 1000,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the list: .csv, .jsonl or .parquet.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the output if it exists.")] = False,
    *,
    source: DataFlags,
    storage: StorageFlags,
    as_json: AsJson = False,
) -> None:
    """List labels that are likely wrong, whose class never warmed, and missing ones, whose class stayed hot.

    A score is the mean over the epochs of what the memory held at their ends. The suspicion that a label is
    missing is its score; that it is wrong, 1 - its score. x and y are the hottest cell, x0 to y1 the box
    around it. Where the shards have all labels, the area under the
    ROC curve says how well the ranking finds mistakes, among the classes that were kept.

    Example: bigscl audit runs/mine -o suspicious.csv
    """
    if output is not None and output.exists() and not overwrite:
        raise UserError(f"{output}: already exists. Choose another name, or add --overwrite.")
    folder = _run_of(store)
    opened = open_store(store, None, storage)
    data = source.need("audit", store, opened.spec.fingerprint)
    opened = open_store(store, opened.snapshot.id, storage, data)
    epochs = _epochs(folder, opened, data)
    from bigscl.evaluation.audit import suspicion, warmth

    found = warmth(list(epochs.values()), data.annotations, data.index.ids())
    values = suspicion(found)
    rankings = {kind: _ranking(kind, found, values, data) for kind in _kinds()}
    lists = {
        kind: _list(opened, data, kind, found, values, ranked[:count]) for kind, ranked in rankings.items()
    }
    curves = {
        kind: _curve(kind, found.take(ranked), values[ranked], data) for kind, ranked in rankings.items()
    }
    if output is not None:
        with table_writer(output, COLUMNS) as write:
            for columns in lists.values():
                write(columns)
    facts: dict[str, Any] = {
        "epochs": list(epochs),
        "num_images": opened.spec.num_samples,
        "auc": curves,
        **{kind: _rows(columns) for kind, columns in lists.items()},
    }
    tell(facts, _text(facts, data, output), as_json)


def _kinds() -> tuple[Kind, ...]:
    return ("wrong", "missing")


def _run_of(store: str) -> Path:
    """Return the folder of the run, which has the scores of its epochs."""
    folder = run_folder(store)
    if folder is None:
        raise UserError(
            f"{locate(store)}: in no folder of a run, which an audit needs. Give the run's folder."
        )
    return folder


def _epochs(folder: Path, store: HeatmapStore, data: Data) -> dict[int, NDArray[Any]]:
    from bigscl.memory.score_history import read_score_log

    epochs = read_score_log(folder, data.annotations, next_epoch(store))
    if not epochs:
        raise UserError(
            f"{folder}: has no scores of finished epochs in {folder / 'scores'}. Runs keep them with "
            f"log.score_classes above 0 and a store on disk; earlier revisions did not."
        )
    return epochs


def _ranking(kind: Kind, found: "Warmth", values: NDArray[np.float64], data: Data) -> NDArray[np.int64]:
    """Return the places of the pairs of a kind, the most suspicious first; ties by id and class."""
    if kind == "wrong":
        places = np.flatnonzero(found.named)
    else:
        places = np.flatnonzero(~found.named)
        if data.labels == "observed":
            places = places[~_known_absent(data, found.ids[places], found.classes[places])]
    return places[np.argsort(-values[places], kind="stable")]


def _known_absent(data: Data, ids: NDArray[np.int64], classes: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return which pairs are known negatives."""
    rows, absent = data.index.negatives.entries(np.arange(len(data.index.keys)))
    known = rows * data.index.num_classes + absent.astype(np.int64)
    return np.isin(ids * data.index.num_classes + classes, known)


def _curve(kind: Kind, found: "Warmth", values: NDArray[np.float64], data: Data) -> float | None:
    """Return the area under the ROC curve of the ranking; None if the truth is unknown or all the same."""
    from bigscl.evaluation.audit import area_under_curve

    if data.index.labels is None:
        return None
    rows, labels = data.index.labels.entries(np.arange(len(data.index.keys)))
    known = rows * data.index.num_classes + labels.astype(np.int64)
    present = np.isin(found.ids * data.index.num_classes + found.classes, known)
    area = area_under_curve(values, present if kind == "missing" else ~present)
    return None if np.isnan(area) else round(area, 4)


def _list(
    store: HeatmapStore,
    data: Data,
    kind: Kind,
    found: "Warmth",
    values: NDArray[np.float64],
    places: NDArray[np.int64],
) -> dict[str, NDArray[Any]]:
    """Return the columns of the list of some pairs."""
    chosen = found.take(places)
    shards = chosen.ids // data.index.rows_per_shard
    columns: dict[str, NDArray[Any]] = {
        "kind": _texts([kind] * len(places)),
        "id": chosen.ids,
        "shard": _texts([data.index.shard_names[shard] for shard in shards]),
        "key": _texts([data.index.key(int(sample)) for sample in chosen.ids]),
        "class": chosen.classes,
        "name": _texts([data.index.class_names[number] for number in chosen.classes]),
        "suspicion": values[places].round(4),
        **{name: getattr(chosen, name).round(4) for name in ("mean", "spread", "last")},
    }
    where = _where(store, chosen.ids, chosen.classes).round(4)
    return columns | dict(zip(("x", "y", "x0", "y0", "x1", "y1"), where.T, strict=True))


def _where(store: HeatmapStore, ids: NDArray[np.int64], classes: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return `[n,6]`: the centre of the hottest cell, and the box around it; NaN where there is no heat."""
    where = np.full((len(ids), 6), np.nan)
    if not len(ids) or store.group.layout == "scores":
        return where
    images, places = np.unique(ids, return_inverse=True)
    heatmaps = store.read_evidence(images).heatmaps_of(places, classes).astype(np.float32)
    side = heatmaps.shape[-1]
    y, x = np.divmod(heatmaps.reshape(len(ids), -1).argmax(axis=1), side)
    where[:, 2:] = strongest_boxes(heatmaps, BOX_SHARE)
    warm = ~np.isnan(where[:, 2])
    where[warm, 0], where[warm, 1] = (x[warm] + 0.5) / side, (y[warm] + 0.5) / side
    return where


def _texts(values: Sequence[str]) -> NDArray[Any]:
    return np.array(values, dtype=object)


def _rows(columns: dict[str, NDArray[Any]]) -> list[dict[str, Any]]:
    names = [name for name in columns if name != "kind"]
    return [
        {name: None if value != value else value for name, value in zip(names, row, strict=True)}
        for row in zip(*(columns[name].tolist() for name in names), strict=True)
    ]


def _text(facts: dict[str, Any], data: Data, output: Path | None) -> str:
    epochs = facts["epochs"]
    lines = [
        f"{counted(facts['num_images'], 'image')}, {counted(len(epochs), 'epoch')} "
        f"({epochs[0] + 1} to {epochs[-1] + 1})"
    ]
    titles = {"wrong": "labels likely wrong", "missing": "labels likely missing"}
    for kind, title in titles.items():
        area = facts["auc"][kind]
        known = "" if area is None else f"; area under the ROC curve {area:.3f}"
        lines.append(f"{title}, the most suspicious first{known}:")
        rows = [
            [
                f"{row['suspicion']:.2f}",
                name_of(row["id"], data.index),
                class_name(row["class"], data.index),
                f"{row['mean']:.3f} ± {row['spread']:.3f}",
                "–" if row["x"] is None else f"{row['x']:.2f}, {row['y']:.2f}",
            ]
            for row in facts[kind][:PRINTED]
        ]
        lines.append(table(("suspicion", "image", "label", "score", "hottest at"), rows))
    if output is not None:
        lines.append(f"{output}: {len(facts['wrong']) + len(facts['missing']):,} labels")
    return "\n".join(lines)
