"""Pairs of image and class for a person: a question, the files of answers, and doubtful labels."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from bigscl.common.text import printable
from bigscl.common.user_error import UserError
from bigscl.data.answers import FILE
from bigscl.evaluation.review import ScoreHistory, area_under_curve, score_history, suspicion
from bigscl.memory.score_history import read_score_log
from bigscl.store import HeatmapStore, Ragged
from bigscl.tools.shared.find_samples import class_name, name_of, next_epoch
from bigscl.tools.shared.label_table import BOX, LABEL, objects, strongest_boxes
from bigscl.tools.shared.open_store import Data
from bigscl.tools.shared.terminal import few_visits_note, plural, table


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Does this image show this class?"""

    sample: int
    key: str
    """As answers name the image: its key, or `shard/key` if several shards have it."""
    path: str
    """Of the image in the dataset that the shards were made from; empty if they do not say."""
    number: int
    class_name: str
    labelled: bool
    """Whether the class is a label of the image: then the question is whether that is wrong."""
    score: float
    chance: float
    """How likely the answer corrects the labels."""

    def __str__(self) -> str:
        said = "The label says yes. " if self.labelled else ""
        return f"{said}Does this image show: {printable(self.class_name)}?"


def answers_files(run: Path | None, data: Data, given: Path | None) -> list[Path]:
    """Return the file that answers go to (given, data.answers, or the run's), and others trained with."""
    if given is None and data.answers is None and run is None:
        raise UserError(
            "--answers: missing. This store is in no folder of a run: say where answers are kept."
        )
    chosen = given or data.answers or (run or Path()) / FILE
    return list(dict.fromkeys([chosen, *([data.answers] if data.answers is not None else [])]))


# Doubtful labels

Kind = Literal["wrong", "missing"]
KINDS: dict[Kind, str] = {"wrong": "labels likely wrong", "missing": "labels likely missing"}
PRINTED = 10
BOX_SHARE = 0.5
FIGURES = dict.fromkeys(("suspicion", "mean", "spread", "last", "x", "y"), float)
LIST_COLUMNS = {"kind": str, **LABEL, **FIGURES, **BOX}


def find_doubtful_labels(
    run: Path, store: HeatmapStore, data: Data, count: int
) -> tuple[dict[str, Any], dict[Kind, dict[str, NDArray[Any]]]]:
    """Return what `bigscl review list` prints, and the columns of up to `count` labels of each kind."""
    epochs = read_score_log(run, data.annotations, next_epoch(store))
    if not epochs:
        raise UserError(
            f"{run}: has no scores of finished epochs in {run / 'scores'}. Runs keep them with "
            f"log.score_classes above 0 and a store on disk."
        )
    # The weight of the initial value in the scores at the end of each epoch: one visit in each.
    start, visits = store.initial_values, np.minimum(np.array(list(epochs)) + 1, 255)
    left = [0.0] * len(epochs) if start is None else start.remaining(visits).astype(float).tolist()
    history = score_history(list(epochs.values()), data.annotations, data.index.ids(), left)
    values = suspicion(history)
    rankings = {kind: _ranking(kind, history, values, data) for kind in KINDS}
    shown = {kind: (history.take(rows[:count]), values[rows[:count]]) for kind, rows in rankings.items()}
    lists = {kind: _columns(store, data, kind, *chosen) for kind, chosen in shown.items()}
    facts: dict[str, Any] = {
        "epochs": list(epochs),
        "num_images": store.spec.num_samples,
        "initial_share": round(left[-1], 4),
        "auc": {
            kind: _curve(kind, history.take(ranked), values[ranked], data)
            for kind, ranked in rankings.items()
        },
        **{kind: _rows(columns) for kind, columns in lists.items()},
    }
    return facts, lists


def _ranking(kind: Kind, history: ScoreHistory, values: NDArray[np.float64], data: Data) -> NDArray[np.int64]:
    """Return the rows of a kind in the history, the most suspicious first; ties by id and class."""
    rows = np.flatnonzero(history.labelled == (kind == "wrong"))
    if kind == "missing" and data.labels == "given":
        rows = rows[~_are_among(data, data.index.negatives, history.take(rows))]
    return rows[np.argsort(-values[rows], kind="stable")]


def _are_among(data: Data, labels: Ragged, history: ScoreHistory) -> NDArray[np.bool_]:
    """Return which pairs of image and class are among these labels of all rows."""
    rows, classes = labels.entries(np.arange(len(data.index.keys)))
    known = rows * data.index.num_classes + classes.astype(np.int64)
    return np.isin(history.ids * data.index.num_classes + history.classes, known)


def _curve(kind: Kind, history: ScoreHistory, values: NDArray[np.float64], data: Data) -> float | None:
    """Return the area under the ROC curve of the ranking; None if the truth is unknown or all the same."""
    if data.index.full is None:
        return None
    present = _are_among(data, data.index.full, history)
    area = area_under_curve(values, present if kind == "missing" else ~present)
    return None if np.isnan(area) else round(area, 4)


def _columns(
    store: HeatmapStore, data: Data, kind: Kind, chosen: ScoreHistory, values: NDArray[np.float64]
) -> dict[str, NDArray[Any]]:
    shards = chosen.ids // data.index.rows_per_shard
    columns: dict[str, NDArray[Any]] = {
        "kind": objects([kind] * len(values)),
        "id": chosen.ids,
        "shard": objects([data.index.shard_names[shard] for shard in shards]),
        "key": objects([data.index.key(int(sample)) for sample in chosen.ids]),
        "path": objects([data.index.source(int(sample)) or "" for sample in chosen.ids]),
        "class": chosen.classes,
        "name": objects([data.index.class_names[number] for number in chosen.classes]),
        "suspicion": values.round(4),
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
    lines += few_visits_note(facts["initial_share"])
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
