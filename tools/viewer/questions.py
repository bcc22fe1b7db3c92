"""The questions of a run on the page: the queue over the index, and answers that go into the run's file."""

import getpass
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bigscl.data.answers import FILE, Answer, Answers, append_answers, now, read_answers
from bigscl.data.index import Index
from bigscl.evaluation.asking import Pairs, chances, first_values, rank
from bigscl.store import Array
from bigscl.tools.halves import to_float32
from bigscl.tools.viewer.listing import rows_with
from bigscl.tools.viewer.open_run import OpenRun
from bigscl.tools.viewer.score_index import ABSENT, ANNOTATED, ScoreIndex
from bigscl.user_error import UserError

SHORTLIST = 300_000
"""Pairs that can come up, at most: as many of each class."""
MAX_NAME = 100
Pair = tuple[int, int]
"""Row and class."""


class Questions:
    """The queue of one run. Answers of others, here or elsewhere, are read as they come."""

    # `_lock` guards all fields.

    def __init__(self, run: OpenRun) -> None:
        self._run = run
        self._lock = threading.Lock()
        self._skipped: set[Pair] = set()
        self._shortlist: tuple[Path, Array] | None = None
        self._read: tuple[tuple[int, int], Answers] = ((0, 0), Answers(standing={}))
        self._rows: dict[str, int | None] = {}

    @property
    def file(self) -> Path:
        """Where answers are kept."""
        if self._run.folder is None:
            raise UserError("answers: are kept in the folder of a run, and this store is in none")
        return self._run.folder / FILE

    def next(self, count: int) -> tuple[Array, dict[str, Any]]:
        """Return the next pairs to ask about, the most valuable first, and what was said so far."""
        with self._lock:
            index, answers = self._run.index, self._answers()
            if index is None:
                return np.empty(0), {"progress": self._run.progress}
            listed = self._listed(index)
            said = self._said(answers)
            return listed[self._order(listed, said)[:count]], self._told(answers)

    def answer(self, row: int, number: int, yes: bool | None, who: str) -> None:
        """Keep what a person says of a pair; None withdraws it. On disk when this returns."""
        if not who.strip() or len(who) > MAX_NAME:
            raise UserError(f"who: {len(who)} letters, expected a name of 1 to {MAX_NAME}")
        index = self._run.data.index
        with self._lock:
            given = Answer(
                key=self._name_of(row),
                class_name=index.class_names[number],
                yes=yes,
                who=who.strip(),
                when=now(),
                snapshot=str(self._run.index.snapshot if self._run.index else ""),
            )
            append_answers(self.file, [given])

    def skip(self, row: int, number: int, again: bool) -> None:
        """Do not ask about a pair while this server runs, or do so `again`."""
        with self._lock:
            (self._skipped.discard if again else self._skipped.add)((row, number))

    # The queue

    def _listed(self, index: ScoreIndex) -> Array:
        """Return the pairs that can come up: of each class the most valuable before any answer."""
        if self._shortlist is None or self._shortlist[0] != index.folder:
            num_classes = len(index.offsets) - 1
            most = max(50, SHORTLIST // num_classes)
            parts = [_valuable(index.of_class(number), most) for number in range(num_classes)]
            self._shortlist = index.folder, np.concatenate(parts)
        return self._shortlist[1]

    def _order(self, listed: Array, said: dict[Pair, bool | None]) -> NDArray[np.int64]:
        """Return the places of the pairs that were not asked about, the most valuable first."""
        width = self._run.store.spec.num_classes
        keys = listed["row"].astype(np.int64) * width + listed["class"]
        answered = {row * width + number: yes for (row, number), yes in said.items() if yes is not None}
        known = np.isin(keys, list(answered))
        done = known | np.isin(keys, [row * width + number for row, number in {*said, *self._skipped}])
        yes = np.array([answered[int(key)] for key in keys[known]], bool)
        places = np.flatnonzero(~done)
        open_, told = _as_pairs(listed[places]), _as_pairs(listed[known])
        asked = np.array([row for row, _ in said], np.int64)
        return places[rank(chances(open_, told, yes), open_.ids, asked)]

    # Answers

    def _answers(self) -> Answers:
        if self._run.folder is None or not self.file.exists():
            return Answers(standing={})
        found = self.file.stat()
        state = found.st_mtime_ns, found.st_size
        if state != self._read[0]:
            self._read = state, read_answers(self.file)
        return self._read[1]

    def _said(self, answers: Answers) -> dict[Pair, bool | None]:
        """Return what stands for each pair that was asked about; None for what was withdrawn."""
        index = self._run.data.index
        numbers = {name: number for number, name in enumerate(index.class_names)}
        said: dict[Pair, bool | None] = {}
        for key, name in answers.asked:
            row, number = self._row_of(key), numbers.get(name)
            if row is not None and number is not None and (key, name) in answers.standing:
                said[row, number] = answers.standing[key, name].yes
        return said

    def _told(self, answers: Answers) -> dict[str, Any]:
        given = [one.yes for one in answers.standing.values()]
        return {
            "yes": sum(one is True for one in given),
            "no": sum(one is False for one in given),
            "conflicts": len(answers.conflicts),
            "skipped": len(self._skipped),
            "who": _user(),
        }

    def _row_of(self, name: str) -> int | None:
        """Return the row of a key, or of shard/key; None if there is none, or several."""
        if name not in self._rows:
            rows = _rows_of(name, self._run.data.index)
            self._rows[name] = rows[0] if len(rows) == 1 else None
        return self._rows[name]

    def _name_of(self, row: int) -> str:
        """Return the key of a row, with its shard if other shards have the same key."""
        index = self._run.data.index
        key = index.key(row)
        name = (
            key
            if _rows_of(key, index) == [row]
            else f"{index.shard_names[row // index.rows_per_shard]}/{key}"
        )
        self._rows[name] = row
        return name


def _valuable(pairs: Array, most: int) -> Array:
    """Return the most valuable pairs of a class, unnamed and named apart."""
    pairs = pairs[pairs["flags"] & ABSENT == 0]
    parts = []
    for named in (False, True):
        own = pairs[(pairs["flags"] & ANNOTATED != 0) == named]
        parts.append(own[np.argsort(-first_values(_as_pairs(own), "queue"), kind="stable")[:most]])
    return np.concatenate(parts)


def _as_pairs(pairs: Array) -> Pairs:
    scores = to_float32(pairs["score"])
    return Pairs(
        ids=pairs["row"].astype(np.int64),
        classes=pairs["class"].astype(np.int64),
        scores=scores,
        warmth=((scores + pairs["peak"] / np.float32(255)) / 2).astype(np.float32),
        named=pairs["flags"] & ANNOTATED != 0,
    )


def _rows_of(name: str, index: Index) -> list[int]:
    """Return the rows with this key, or the one with this shard and key."""
    rows = _exactly(name, rows_with(name, index), index)
    shard, _, key = name.rpartition("/")
    if not rows and shard:
        rows = [
            row
            for row in _exactly(key, rows_with(key, index), index)
            if index.shard_names[row // index.rows_per_shard] == shard
        ]
    return rows


def _exactly(key: str, rows: Iterable[int], index: Index) -> list[int]:
    return [int(row) for row in rows if index.key(int(row)) == key]


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return ""
