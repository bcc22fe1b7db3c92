"""Pairs of image and class for a person: questions, here and in other tools, and doubtful labels."""

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from bigscl.common.files import atomic_write, parse_errors, read_table
from bigscl.common.text import printable
from bigscl.common.user_error import UserError
from bigscl.data.answers import FILE, Answer, moment
from bigscl.evaluation.review import ScoreHistory, area_under_curve, score_history, suspicion
from bigscl.memory.score_history import read_score_log
from bigscl.store import HeatmapStore, Ragged
from bigscl.tools.shared.find_samples import class_name, name_of, next_epoch
from bigscl.tools.shared.label_formats import ANSWER, Label, LabelledImage, label_writer
from bigscl.tools.shared.label_table import BOX, LABEL, label_columns, objects, strongest_boxes
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
    columns: dict[str, NDArray[Any]] = {
        "kind": objects([kind] * len(values)),
        **label_columns(data.index, data.index.shard_names, chosen.ids, chosen.classes),
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


# Questions for other tools, and their answers
#
# Questions as CSV have an empty column `yes`, to be filled with yes or no. Label Studio gets a task for each
# question, with the image and two choices; it exports the answers as JSON. In COCO's JSON each question is an
# annotation with `attributes: {"yes": null}`. Questions without an answer are not imported.

QuestionFormat = Literal["label-studio", "coco", "csv"]
QUESTION_COLUMNS = ("key", "class", "yes", "question", "score", "snapshot", "path")
WORDS = {**dict.fromkeys(("yes", "y", "true", "1"), True), **dict.fromkeys(("no", "n", "false", "0"), False)}
REMEDY = "Give a file that `bigscl review export` wrote, with answers."
EXPECTED_COLUMNS = "columns key, class and yes, as `bigscl review export` writes them"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Person and time of answers that do not name them."""

    who: str
    when: str


def write_questions(
    form: QuestionFormat,
    output: Path,
    questions: Sequence[Question],
    class_names: Sequence[str],
    *,
    snapshot: str,
    images: str = "",
) -> None:
    """Write questions for another tool; `images` is put before their paths, or has {key} for their keys."""
    if form == "csv":
        _write_csv(output, questions, snapshot)
        return
    prefix, _, end = images.partition("{key}")
    info = {"snapshot": snapshot}
    with label_writer(
        form, output, class_names, made_by="questions of bigscl", images=prefix, info=info, questions=True
    ) as write:
        for each in questions:
            by_key = each.key + end.replace("{key}", each.key)
            file = by_key if "{key}" in images else each.path or each.key
            label = Label(number=each.number, score=each.score, question=str(each))
            write(LabelledImage(id=each.sample, file=file, labels=[label], facts={"key": each.key, **info}))


def _write_csv(output: Path, questions: Sequence[Question], snapshot: str) -> None:
    if output.suffix != ".csv":
        raise UserError(f"{output}: questions for csv are written as .csv")
    with atomic_write(output) as partial, partial.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(QUESTION_COLUMNS)
        for question in questions:
            facts = [str(question), question.score, snapshot, question.path]
            writer.writerow([question.key, question.class_name, "", *facts])


def read_tool_answers(path: Path, source: Source) -> list[Answer]:
    """Return the answers in a file of any of the formats; BadFile says what is wrong with it."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file of answers")
    if path.suffix == ".csv":
        with parse_errors(path, "a table of answers", REMEDY):
            return list(_from_csv(path, source))
    with parse_errors(path, "answers in JSON", REMEDY):
        content = json.loads(path.read_text(encoding="utf-8"))
        read = _from_label_studio if isinstance(content, list) else _from_coco
        return list(read(content, source))


def _check_columns(found: list[str]) -> None:
    if missing := [name for name in QUESTION_COLUMNS[:3] if name not in found]:
        raise UserError(f"no column {missing[0]!r} in {found}")


def _from_csv(path: Path, source: Source) -> Iterator[Answer]:
    for number, row in enumerate(read_table(path, _check_columns, EXPECTED_COLUMNS), 2):
        where = f"row {number}"
        yield from _answer(row["key"], row["class"], row["yes"], where, source, row.get("snapshot", ""))


def _from_label_studio(tasks: list[Any], source: Source) -> Iterator[Answer]:
    for number, task in enumerate(tasks):
        where = f"task {number}"
        data = task["data"]
        for annotation in task.get("annotations") or ():
            if annotation.get("was_cancelled"):
                continue
            when = annotation.get("created_at") or source.when
            given = Source(who=_person(annotation, source.who), when=when)
            for result in annotation["result"]:
                if result.get("from_name") == ANSWER:
                    for choice in result["value"]["choices"]:
                        yield from _answer(
                            data["key"], data["class"], choice, where, given, data.get("snapshot", "")
                        )


def _person(annotation: Mapping[str, Any], default: str) -> str:
    person = annotation.get("completed_by")
    if isinstance(person, dict):
        person = person.get("email") or person.get("id")
    return default if person is None else str(person)


def _from_coco(content: Mapping[str, Any], source: Source) -> Iterator[Answer]:
    keys = {image["id"]: image["key"] for image in content["images"]}
    classes = {category["id"]: category["name"] for category in content["categories"]}
    snapshot = str(content.get("info", {}).get("snapshot", ""))
    for annotation in content["annotations"]:
        yes = annotation.get("attributes", {}).get("yes")
        where = f"annotation {annotation['id']}"
        key, name = keys[annotation["image_id"]], classes[annotation["category_id"]]
        yield from _answer(key, name, yes, where, source, snapshot)


def _answer(key: Any, name: Any, yes: Any, where: str, source: Source, snapshot: Any) -> Iterator[Answer]:
    word = "" if yes is None else str(yes).strip().lower()
    if not word:
        return
    if word not in WORDS:
        raise UserError(f"{where}: found {printable(word[:40])!r}, expected yes or no")
    if not isinstance(key, str) or not isinstance(name, str):
        raise UserError(
            f"{where}: key {printable(str(key)[:40])!r} or class {printable(str(name)[:40])!r} is no text"
        )
    moment(source.when)
    yield Answer(key, name, WORDS[word], source.who, source.when, str(snapshot))
