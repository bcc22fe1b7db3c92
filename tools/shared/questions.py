"""Pairs of image and class for a person: questions ranked after each answer, and doubtful labels."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from bigscl.common.text import printable
from bigscl.common.user_error import UserError
from bigscl.data.answers import FILE, read_answers
from bigscl.data.index import Index
from bigscl.data.labels.training_labels import match_answers
from bigscl.evaluation.review import (
    By,
    Pairs,
    ScoreHistory,
    Shortlist,
    area_under_curve,
    first_values,
    next_questions,
    pairs_of,
    score_history,
    suspicion,
)
from bigscl.memory.score_history import read_score_log
from bigscl.store import Array, HeatmapStore, Ragged, Rows
from bigscl.tools.shared.find_samples import answer_key, class_name, name_of, next_epoch
from bigscl.tools.shared.label_table import BOX, LABEL, objects, strongest_boxes
from bigscl.tools.shared.open_store import Data
from bigscl.tools.shared.shard_passes import SnapshotThresholds, expected_at, pass_over
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


class Questions:
    """Questions about a snapshot of a run's memory, in an order that follows the answers."""

    def __init__(
        self,
        store: HeatmapStore,
        data: Data,
        answers: Sequence[Path],
        *,
        most: int,
        by: By = "queue",
        only: int | None = None,
        seed: int = 0,
    ) -> None:
        """Collect up to `most` questions of each class, or of class `only`.

        If the store has heatmaps of some classes only, these are asked about, in all orders but the random
        one. Pairs that the files of `answers` answer are not asked again. RAM grows with the classes times
        `most`, not with the images.
        """
        if data.labels != "given":
            raise UserError(
                "this run was trained with all labels (data.labels: full): nothing is to be asked"
            )
        self._index, self._by = data.labelled, by
        self._said = self._read(answers)
        shortlist, told = Shortlist(min(most, store.spec.num_samples)), [Pairs.none()]
        said, expected = np.array(list(self._said), np.int64), expected_at(store)
        for shard, rows in pass_over(
            "collecting questions", range(store.spec.num_shards), store.load_shard, [store]
        ):
            pairs = _pairs_of_shard(store, data.labelled, expected, shard, rows, only_kept=by != "random")
            if only is not None:
                pairs = pairs.take(pairs.classes == only)
            values = first_values(pairs, by, seed)
            is_told = np.isin(self._keys(pairs), said)
            told.append(pairs.take(is_told))
            shortlist.add(pairs.take(~is_told), values[~is_told])
        self._pairs, self._values = shortlist.pairs, shortlist.values
        self._open = np.ones(len(self._pairs), bool)
        self._told = Pairs.concatenate(told)

    def _read(self, answers: Sequence[Path]) -> dict[int, bool]:
        """Return the answers so far by pair; if several files answer, the first counts."""
        said: dict[int, bool] = {}
        for path in reversed(answers):
            known = match_answers(self._index, read_answers(path), path)
            keys = known.rows * self._index.num_classes + known.classes
            said |= {
                key: bool(says)
                for key, says in zip(keys.tolist(), known.says.tolist(), strict=True)
                if says >= 0
            }
        return said

    def _keys(self, pairs: Pairs) -> NDArray[np.int64]:
        return pairs.ids * self._index.num_classes + pairs.classes

    def __len__(self) -> int:
        return int(self._open.sum())

    def next(self, count: int) -> list[Question]:
        """Return the next questions, the most valuable first."""
        pairs, first = self._pairs.take(self._open), self._values[self._open]
        yes = np.array([self._said[key] for key in self._keys(self._told).tolist()], bool)
        order, likely = next_questions(pairs, self._told, yes, most=count, by=self._by, first=first)
        return [self._question(pairs, row, float(likely[row])) for row in order.tolist()]

    def _question(self, pairs: Pairs, row: int, chance: float) -> Question:
        sample, number = int(pairs.ids[row]), int(pairs.classes[row])
        return Question(
            sample=sample,
            key=answer_key(sample, self._index),
            path=self._index.source(sample) or "",
            number=number,
            class_name=self._index.class_names[number],
            labelled=bool(pairs.labelled[row]),
            score=round(float(pairs.scores[row]), 4),
            chance=round(chance, 4),
        )

    def add_answer(self, question: Question, yes: bool | None) -> None:
        """Take the answer to a question into account; None: it was skipped, and is not asked again."""
        row = self._row_of(question)
        self._open[row] = False
        if yes is not None:
            self._said[int(self._keys(self._pairs)[row])] = yes
            self._told = Pairs.concatenate([self._told, self._pairs.take(np.array([row]))])

    def withdraw_answer(self, question: Question) -> None:
        """Let a question be asked again, whose answer was withdrawn."""
        row = self._row_of(question)
        self._open[row] = True
        key = int(self._keys(self._pairs)[row])
        if self._said.pop(key, None) is not None:
            self._told = self._told.take(self._keys(self._told) != key)

    def _row_of(self, question: Question) -> int:
        is_it = (self._pairs.ids == question.sample) & (self._pairs.classes == question.number)
        return int(np.flatnonzero(is_it)[0])


def answers_files(run: Path | None, data: Data, given: Path | None) -> list[Path]:
    """Return the file that answers go to (given, data.answers, or the run's), and others trained with."""
    if given is None and data.answers is None and run is None:
        raise UserError(
            "--answers: missing. This store is in no folder of a run: say where answers are kept."
        )
    chosen = given or data.answers or (run or Path()) / FILE
    return list(dict.fromkeys([chosen, *([data.answers] if data.answers is not None else [])]))


def _pairs_of_shard(
    store: HeatmapStore,
    index: Index,
    expected: SnapshotThresholds,
    shard: int,
    rows: Rows,
    *,
    only_kept: bool,
) -> Pairs:
    """Return the pairs of a shard; with `only_kept` those of classes that are labelled or have a heatmap."""
    ids = store.spec.sample_ids(shard)
    rows = rows.take(slice(0, len(ids)))
    known = index.labels_of(ids)
    if only_kept and rows.classes is not None:
        # Others have lower scores: a thousand classes would be a hundred times the work for nothing.
        others = known == -1
        np.put_along_axis(others, rows.classes.astype(np.int64), False, 1)
        known[others] = 0
    selected = expected.expected(rows.ranked_by(), ids)
    scores = store.scores_without_initial_value(rows, ids)
    return pairs_of(ids, scores, _peaks(store, ids, rows, known), known, selected)


def _peaks(store: HeatmapStore, ids: NDArray[np.int64], rows: Rows, known: NDArray[np.int8]) -> Array | None:
    """Return [n,L]: the hottest cell of each class, without its initial value; None without heatmaps."""
    if rows.heatmaps is None:
        return None
    peaks = np.zeros(rows.scores.shape, np.float32)
    # Bits of halves in 0 to 1 have the order of their values, and are compared faster.
    bits = rows.heatmaps.view(np.uint16).reshape(*rows.heatmaps.shape[:2], -1).max(axis=2)
    np.put_along_axis(
        peaks, rows.kept_classes().astype(np.int64), bits.view(np.float16).astype(np.float32), 1
    )
    labelled, classes = np.nonzero(known == 1)
    if len(labelled):
        heatmaps = store.heatmaps_without_initial_value(rows, ids, labelled, classes)
        peaks[labelled, classes] = heatmaps.reshape(len(labelled), -1).max(axis=1)
    return peaks


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
