"""Questions of a run for people, ranked again after each answer; files with them for other tools.

CSV has an empty column `yes`, to be filled with yes or no. Label Studio gets a task for each question, with
the image and two choices; it exports the answers as JSON. In COCO's JSON each question is an annotation with
`attributes: {"yes": null}`. Questions without an answer are not imported.
"""

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from bigscl.common.files import atomic_write, parse_errors
from bigscl.common.text import printable
from bigscl.common.user_error import UserError
from bigscl.data.answers import FILE, Answer, moment, read_answers
from bigscl.data.index import Index
from bigscl.data.labels.training_labels import match_answers
from bigscl.evaluation.review import By, Pairs, Shortlist, first_values, next_questions, pairs_of
from bigscl.store import Array, HeatmapStore, Rows
from bigscl.tools.shared.expected import SnapshotThresholds, expected_at
from bigscl.tools.shared.find_samples import answer_key
from bigscl.tools.shared.label_formats import ANSWER, Label, LabelledImage, label_writer
from bigscl.tools.shared.open_store import Data
from bigscl.tools.shared.shard_passes import pass_over


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Does this image show this class?"""

    sample: int
    key: str
    """As answers name the image: its key, or `shard/key` if several shards have it."""
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
        if data.labels != "observed":
            raise UserError(
                "this run was trained with all labels (data.labels: labels): nothing is to be asked"
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
                key: bool(one)
                for key, one in zip(keys.tolist(), known.says.tolist(), strict=True)
                if one >= 0
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
    """Return the file that answers go to, and then others whose answers the run was trained with.

    Answers go to the given file, that of the run's config (data.answers), or `answers.jsonl` in its folder.
    """
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
    return pairs_of(ids, rows.scores, _peaks(store, ids, rows, known), known, selected)


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


# Other tools

Format = Literal["label-studio", "coco", "csv"]
COLUMNS = ("key", "class", "yes", "question", "score", "snapshot")
WORDS = {
    **dict.fromkeys(("yes", "y", "true", "1"), True),
    **dict.fromkeys(("no", "n", "false", "0"), False),
}
REMEDY = "Give a file that `bigscl review export` wrote, with answers."


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Person and time of answers that do not name them."""

    who: str
    when: str


def write_questions(
    form: Format,
    output: Path,
    questions: Sequence[Question],
    class_names: Sequence[str],
    *,
    snapshot: str,
    images: str = "{key}",
) -> None:
    """Write questions for another tool; `images` with {key} says where that tool finds an image."""
    if form == "csv":
        _write_csv(output, questions, snapshot)
        return
    prefix, _, end = images.partition("{key}")
    info = {"snapshot": snapshot}
    with label_writer(
        form, output, class_names, made_by="questions of bigscl", images=prefix, info=info, questions=True
    ) as write:
        for each in questions:
            file = each.key + end.replace("{key}", each.key) if "{key}" in images else ""
            label = Label(number=each.number, score=each.score, question=str(each))
            write(LabelledImage(id=each.sample, file=file, labels=[label], facts={"key": each.key, **info}))


def _write_csv(output: Path, questions: Sequence[Question], snapshot: str) -> None:
    if output.suffix != ".csv":
        raise UserError(f"{output}: questions for csv are written as .csv")
    with atomic_write(output) as partial, partial.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for one in questions:
            writer.writerow([one.key, one.class_name, "", str(one), one.score, snapshot])


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


def _from_csv(path: Path, source: Source) -> Iterator[Answer]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file, strict=True)
        missing = [name for name in COLUMNS[:3] if name not in (reader.fieldnames or ())]
        if missing:
            raise UserError(f"no column {missing[0]!r} in {reader.fieldnames}")
        for row in reader:
            where = f"line {reader.line_num}"
            if None in row or None in row.values():
                raise UserError(f"{where} has another number of columns than the first line")
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
    """Yield the answer, or nothing if there is none."""
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
