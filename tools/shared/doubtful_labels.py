"""Labels of a run that are likely wrong or missing, by the scores of its epochs, with their places."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from bigscl.common.user_error import UserError
from bigscl.evaluation.review import ScoreHistory, area_under_curve, score_history, suspicion
from bigscl.memory.score_history import read_score_log
from bigscl.store import HeatmapStore
from bigscl.tools.shared.find_samples import class_name, name_of, next_epoch
from bigscl.tools.shared.found_labels import strongest_boxes
from bigscl.tools.shared.open_store import Data
from bigscl.tools.shared.terminal import plural, table

Kind = Literal["wrong", "missing"]
KINDS: dict[Kind, str] = {"wrong": "labels likely wrong", "missing": "labels likely missing"}
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


def find_doubtful_labels(
    run: Path, store: HeatmapStore, data: Data, count: int
) -> tuple[dict[str, Any], dict[Kind, dict[str, NDArray[Any]]]]:
    """Return what `bigscl review list` prints, and the columns of up to `count` labels of each kind."""
    epochs = _epochs(run, store, data)
    history = score_history(list(epochs.values()), data.annotations, data.index.ids())
    values = suspicion(history)
    rankings = {kind: _ranking(kind, history, values, data) for kind in KINDS}
    lists = {
        kind: _columns(store, data, kind, history, values, ranked[:count])
        for kind, ranked in rankings.items()
    }
    facts: dict[str, Any] = {
        "epochs": list(epochs),
        "num_images": store.spec.num_samples,
        "auc": {
            kind: _curve(kind, history.take(ranked), values[ranked], data)
            for kind, ranked in rankings.items()
        },
        **{kind: _rows(columns) for kind, columns in lists.items()},
    }
    return facts, lists


def _epochs(folder: Path, store: HeatmapStore, data: Data) -> dict[int, NDArray[Any]]:
    epochs = read_score_log(folder, data.annotations, next_epoch(store))
    if not epochs:
        raise UserError(
            f"{folder}: has no scores of finished epochs in {folder / 'scores'}. Runs keep them with "
            f"log.score_classes above 0 and a store on disk."
        )
    return epochs


def _ranking(kind: Kind, history: ScoreHistory, values: NDArray[np.float64], data: Data) -> NDArray[np.int64]:
    """Return the rows of a kind in the history, the most suspicious first; ties by id and class."""
    rows = np.flatnonzero(history.labelled == (kind == "wrong"))
    if kind == "missing" and data.labels == "observed":
        rows = rows[~_known_absent(data, history.ids[rows], history.classes[rows])]
    return rows[np.argsort(-values[rows], kind="stable")]


def _known_absent(data: Data, ids: NDArray[np.int64], classes: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return which pairs are known negatives."""
    rows, absent = data.index.negatives.entries(np.arange(len(data.index.keys)))
    known = rows * data.index.num_classes + absent.astype(np.int64)
    return np.isin(ids * data.index.num_classes + classes, known)


def _curve(kind: Kind, history: ScoreHistory, values: NDArray[np.float64], data: Data) -> float | None:
    """Return the area under the ROC curve of the ranking; None if the truth is unknown or all the same."""
    if data.index.labels is None:
        return None
    rows, labels = data.index.labels.entries(np.arange(len(data.index.keys)))
    known = rows * data.index.num_classes + labels.astype(np.int64)
    present = np.isin(history.ids * data.index.num_classes + history.classes, known)
    area = area_under_curve(values, present if kind == "missing" else ~present)
    return None if np.isnan(area) else round(area, 4)


def _columns(
    store: HeatmapStore,
    data: Data,
    kind: Kind,
    history: ScoreHistory,
    values: NDArray[np.float64],
    rows: NDArray[np.int64],
) -> dict[str, NDArray[Any]]:
    """Return the columns of the list of some pairs."""
    chosen = history.take(rows)
    shards = chosen.ids // data.index.rows_per_shard
    columns: dict[str, NDArray[Any]] = {
        "kind": _texts([kind] * len(rows)),
        "id": chosen.ids,
        "shard": _texts([data.index.shard_names[shard] for shard in shards]),
        "key": _texts([data.index.key(int(sample)) for sample in chosen.ids]),
        "class": chosen.classes,
        "name": _texts([data.index.class_names[number] for number in chosen.classes]),
        "suspicion": values[rows].round(4),
        **{name: getattr(chosen, name).round(4) for name in ("mean", "spread", "last")},
    }
    where = _where(store, chosen.ids, chosen.classes).round(4)
    return columns | dict(zip(("x", "y", "x0", "y0", "x1", "y1"), where.T, strict=True))


def _where(store: HeatmapStore, ids: NDArray[np.int64], classes: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return `[n,6]`: the centre of the hottest cell, and the box around it; NaN where there is no heat."""
    where = np.full((len(ids), 6), np.nan)
    if not len(ids) or store.group.layout == "scores":
        return where
    images, image = np.unique(ids, return_inverse=True)
    heatmaps = store.read_without_initial_value(images).heatmaps_of(image, classes).astype(np.float32)
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


def doubtful_labels_text(facts: dict[str, Any], data: Data, output: Path | None) -> str:
    epochs = facts["epochs"]
    lines = [
        f"{plural(facts['num_images'], 'image')}, {plural(len(epochs), 'epoch')} "
        f"({epochs[0] + 1} to {epochs[-1] + 1})"
    ]
    for kind, title in KINDS.items():
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
