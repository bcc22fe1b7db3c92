"""Questions of a run, for the page and for `bigscl review`: pairs of its index of scores."""

import getpass
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bigscl.common.user_error import UserError
from bigscl.data.answers import Answer, Answers, AnswersFile, now
from bigscl.evaluation.review import By, Pairs, best_without_answers, next_questions
from bigscl.store import Array
from bigscl.tools.shared.find_samples import answer_key, rows_named
from bigscl.tools.shared.questions import Question, answers_files
from bigscl.tools.shared.shard_passes import to_float32
from bigscl.tools.viewer.open_run import OpenRun
from bigscl.tools.viewer.score_index import EXPECTED, PAIR, ScoreIndex, find_rows

SHORTLIST = 100_000
"""Pairs that can come up, at most: as many of each class."""
MAX_NAME = 100
Pair = tuple[int, int]
"""Row and class."""
AnswersOf = Callable[[Array], list[Answer | None]]
"""From pairs of the index to the answer about each."""


class QuestionQueue:
    """The queue of one run. Answers of others, here or elsewhere, are read as they come."""

    # `_lock` guards all fields.

    def __init__(
        self,
        run: OpenRun,
        *,
        answers: Path | None = None,
        most: int = 0,
        by: By = "queue",
        only: int | None = None,
    ) -> None:
        """Answers go to a file of the run, or to `answers`; at least `most` pairs of a class can come up.

        With `only`, all are of this class.
        """
        self._run, self._answers, self._by = run, answers, by
        self._classes = range(run.store.spec.num_classes) if only is None else (only,)
        self._most = max(50, most, SHORTLIST // len(self._classes))
        self._lock = threading.Lock()
        self._skipped: set[Pair] = set()
        self._shortlist: tuple[Path, Array, Pairs] | None = None
        self._read: dict[Path, AnswersFile] = {}
        self._rows: dict[str, int | None] = {}

    def next(self, count: int) -> tuple[Array, dict[str, Any]]:
        """Return the next pairs to ask about, the most valuable first, and the numbers of answers so far."""
        with self._lock:
            index = self._run.index
            if index is None:
                return np.empty(0, PAIR), {"progress": self._run.progress}
            files = [file.read() for file in self._files()]
            return self._chosen(index, self._said(files), count)[0], self._told(files[0])

    def questions(self, count: int) -> list[Question]:
        """Return the same as questions; the index of scores must be there."""
        with self._lock:
            assert self._run.index is not None
            said = self._said([file.read() for file in self._files()])
            listed, likely = self._chosen(self._run.index, said, count)
        pairs, index = self._as_pairs(listed), self._run.data.labelled
        rows, classes = pairs.ids.tolist(), pairs.classes.tolist()
        return [
            Question(
                sample=row,
                key=answer_key(row, index),
                path=index.source(row) or "",
                number=number,
                class_name=index.class_names[number],
                labelled=labelled,
                score=round(score, 4),
                chance=round(chance, 4),
            )
            for row, number, labelled, score, chance in zip(
                rows, classes, pairs.labelled.tolist(), pairs.scores.tolist(), likely.tolist(), strict=True
            )
        ]

    def paths(self) -> list[Path]:
        """Return the file that answers go to, and others that say what was answered."""
        with self._lock:
            return [file.path for file in self._files()]

    def answer(self, own: Sequence[tuple[int, int, bool | None]], who: str) -> None:
        """Save a person's answers about (row, class), all in one write; None withdraws one.

        They are on disk when this returns.
        """
        if not who.strip() or len(who) > MAX_NAME:
            raise UserError(f"who: {len(who)} letters, expected a name of 1 to {MAX_NAME}")
        labels, shown = self._run.data.labelled, self._run.index
        with self._lock:
            keys = {row: answer_key(row, labels) for row, _, _ in own}
            given = [
                Answer(
                    key=keys[row],
                    class_name=labels.class_names[number],
                    yes=yes,
                    who=who.strip(),
                    when=now(),
                    snapshot="" if shown is None else str(shown.snapshot),
                )
                for row, number, yes in own
            ]
            self._files()[0].append(given)
            self._rows |= {key: row for row, key in keys.items()}

    def answers_now(self) -> AnswersOf:
        """Return a function that gives the answer about each pair that counts now; None without answer."""
        has_no_file = self._run.folder is None and self._run.data.answers is None
        if has_no_file or self._run.data.labels != "given":
            return lambda pairs: [None] * len(pairs)
        with self._lock:
            files = [file.read().standing for file in self._files()]
        return lambda pairs: [self._answer_about(pair, files) for pair in pairs]

    def _answer_about(self, pair: Any, files: Sequence[Mapping[tuple[str, str], Answer]]) -> Answer | None:
        """Return the answer of the first file that has one, under any name of the sample."""
        row, labels = int(pair["row"]), self._run.data.labelled
        class_name = labels.class_names[int(pair["class"])]
        for standing in files:
            for name in (labels.key(row), labels.name(row)):
                answer = standing.get((name, class_name))
                if answer is not None and self._row_of(name) == row:
                    return answer
        return None

    def skip(self, row: int, number: int, again: bool) -> None:
        """Do not ask about a pair while this server runs, or do so `again`."""
        with self._lock:
            (self._skipped.discard if again else self._skipped.add)((row, number))

    # The queue

    def _chosen(
        self, index: ScoreIndex, said: dict[Pair, bool], count: int
    ) -> tuple[Array, NDArray[np.float64]]:
        """Return the next pairs, and how likely their answers correct the labels."""
        listed, pairs = self._listed(index)
        closed = np.array([*said, *self._skipped], np.int64).reshape(-1, 2)
        open_ = np.flatnonzero(~np.isin(self._numbers(pairs.ids, pairs.classes), self._numbers(*closed.T)))
        told = _find(index, said)
        # The sorted numbers of what was said: there may be hundreds of thousands.
        order = np.argsort(numbers := self._numbers(*np.array([*said], np.int64).reshape(-1, 2).T))
        found_at = np.searchsorted(numbers, self._numbers(told["row"], told["class"]), sorter=order)
        yes = np.array([*said.values()], bool)[order[found_at]]
        left = pairs.take(open_)
        order, likely = next_questions(left, self._as_pairs(told), yes, most=count, by=self._by)
        return listed[open_[order]], likely[order]

    def _numbers(self, rows: Array, classes: Array) -> NDArray[np.int64]:
        return rows.astype(np.int64) * self._run.store.spec.num_classes + classes

    def _listed(self, index: ScoreIndex) -> tuple[Array, Pairs]:
        """Return the pairs that can come up: the most valuable of each class before any answer."""
        if self._shortlist is None or self._shortlist[0] != index.folder:
            labels = self._run.data.labelled
            rows, absent = labels.negatives.entries(np.arange(len(labels.keys)))
            known = self._numbers(rows, absent)
            parts = [self._valuable(index.of_class(number), known) for number in self._classes]
            listed = np.concatenate(parts)
            self._shortlist = index.folder, listed, self._as_pairs(listed)
        return self._shortlist[1:]

    def _valuable(self, pairs: Array, known: NDArray[np.int64]) -> Array:
        """Return the most valuable pairs of a class before any answer, unlabelled and labelled apart."""
        if len(known):
            pairs = pairs[~np.isin(self._numbers(pairs["row"], pairs["class"]), known)]
        own = self._as_pairs(pairs)
        if self._run.store.group.layout == "topk":
            # Unlabelled ones without a heatmap have lower scores.
            kept = own.labelled | (pairs["peak"] > 0)
            pairs, own = pairs[kept], own.take(kept)
        return np.asarray(pairs[best_without_answers(own, self._by, self._most)])

    def _as_pairs(self, pairs: Array) -> Pairs:
        scores, index = to_float32(pairs["score"]), self._run.index
        peaks = pairs["peak"] / np.float32(255) if index is None or index.heatmaps else scores
        rows, classes = pairs["row"].astype(np.int64), pairs["class"].astype(np.int64)
        return Pairs(
            ids=rows,
            classes=classes,
            scores=scores,
            confidence=((scores + peaks) / 2).astype(np.float32),
            # The labels before anybody answered.
            labelled=self._run.data.annotations.is_given(rows, classes),
            expected=pairs["flags"] & EXPECTED != 0,
        )

    # Answers

    def _files(self) -> list[AnswersFile]:
        if self._run.data.labels != "given":
            raise UserError(
                "this run was trained with all labels (data.labels: full): nothing is to be asked"
            )
        paths = answers_files(self._run.folder, self._run.data, self._answers)
        return [self._read.setdefault(path, AnswersFile(path)) for path in paths]

    def _said(self, files: list[Answers]) -> dict[Pair, bool]:
        """Return the answer that counts for each pair; if several files answer, the first."""
        numbers = {name: number for number, name in enumerate(self._run.data.labelled.class_names)}
        said: dict[Pair, bool] = {}
        for answers in reversed(files):
            for (key, name), answer in answers.standing.items():
                row, number = self._row_of(key), numbers.get(name)
                if row is not None and number is not None:
                    said[row, number] = bool(answer.yes)
        return said

    def _told(self, answers: Answers) -> dict[str, Any]:
        given = [answer.yes for answer in answers.standing.values()]
        return {
            "yes": given.count(True),
            "no": given.count(False),
            "conflicts": len(answers.conflicts),
            "skipped": len(self._skipped),
        }

    def _row_of(self, name: str) -> int | None:
        """Return the row of a key, or of shard/key; None if there is none, or several."""
        if name not in self._rows:
            rows = rows_named(name, self._run.data.labelled)
            self._rows[name] = rows[0] if len(rows) == 1 else None
        return self._rows[name]


def _find(index: ScoreIndex, said: dict[Pair, bool]) -> Array:
    """Return the pairs of the index that were answered, as far as it has them."""
    pairs = np.array(list(said), np.int64).reshape(-1, 2)
    parts = [np.empty(0, PAIR)]
    for number in np.unique(pairs[:, 1]):
        own = index.of_class(int(number))
        if len(own):
            parts.append(own[find_rows(own, pairs[pairs[:, 1] == number, 0])[0]])
    return np.concatenate(parts)


def user_name() -> str:
    """Return the name of the user on this machine, as which answers are given unless people say theirs."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return ""
