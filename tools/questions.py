"""The questions of a run for people: collected from its memory in one pass, then ranked after each answer."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bigscl.common.user_error import UserError
from bigscl.data.answered import match_answers
from bigscl.data.answers import FILE, read_answers
from bigscl.data.index import Index
from bigscl.evaluation.asking import (
    FOLLOWING,
    By,
    Pairs,
    Shortlist,
    chances,
    first_values,
    following_values,
    pairs_of,
    rank,
)
from bigscl.store import Array, HeatmapStore, Rows
from bigscl.tools.expected import Expected, expected_at
from bigscl.tools.opening import Data
from bigscl.tools.passes import pass_over
from bigscl.tools.samples import answer_key


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Does this image show this class?"""

    sample: int
    key: str
    """As answers name the image: its key, or `shard/key` if several shards have it."""
    number: int
    class_name: str
    named: bool
    """Whether a label names the class: then the question is whether it is wrong."""
    score: float
    chance: float
    """How likely the answer corrects the labels."""


class Questions:
    """What to ask about a snapshot of a run's memory, in an order that follows the answers."""

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

        Of a store with heatmaps of some classes only, these are asked about, in all orders but the random
        one. What stands in the files of `answers` is not asked again. RAM grows with the classes times
        `most`, not with the images.
        """
        if data.labels != "observed":
            raise UserError(
                "this run was trained with all labels (data.labels: labels): nothing is to be asked"
            )
        self._index, self._by = data.labelled, by
        self._said = self._read(answers)
        shortlist, told = Shortlist(min(most, store.spec.num_samples)), []
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
        """Return what was said before; of several files the first counts."""
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
        places = np.flatnonzero(self._open)
        pairs = self._pairs.take(places)
        yes = np.array([self._said[key] for key in self._keys(self._told).tolist()], bool)
        likely = chances(pairs, self._told, yes)
        if self._by in FOLLOWING:
            order = rank(following_values(pairs, self._by, likely), pairs, self._told, most=count)
        else:
            order = np.argsort(-self._values[places], kind="stable")[:count]
        return [self._question(pairs, place, float(likely[place])) for place in order.tolist()]

    def _question(self, pairs: Pairs, place: int, chance: float) -> Question:
        sample, number = int(pairs.ids[place]), int(pairs.classes[place])
        return Question(
            sample=sample,
            key=answer_key(sample, self._index),
            number=number,
            class_name=self._index.class_names[number],
            named=bool(pairs.named[place]),
            score=round(float(pairs.scores[place]), 4),
            chance=round(chance, 4),
        )

    def hear(self, question: Question, yes: bool | None) -> None:
        """Take the answer to a question into account; None: it was skipped, and is not asked again."""
        place = self._place(question)
        self._open[place] = False
        if yes is not None:
            self._said[int(self._keys(self._pairs)[place])] = yes
            self._told = Pairs.concatenate([self._told, self._pairs.take(np.array([place]))])

    def forget(self, question: Question) -> None:
        """Let a question be asked again, whose answer was withdrawn."""
        place = self._place(question)
        self._open[place] = True
        key = int(self._keys(self._pairs)[place])
        if self._said.pop(key, None) is not None:
            self._told = self._told.take(self._keys(self._told) != key)

    def _place(self, question: Question) -> int:
        is_it = (self._pairs.ids == question.sample) & (self._pairs.classes == question.number)
        return int(np.flatnonzero(is_it)[0])


def answers_files(run: Path | None, data: Data, given: Path | None) -> list[Path]:
    """Return the file that answers go to, and then others whose answers the run already knows.

    It is the one that is given, that of the run's config (data.answers), or `answers.jsonl` in its folder.
    """
    if given is None and data.answers is None and run is None:
        raise UserError(
            "--answers: missing. This store is in no folder of a run: say where answers are kept."
        )
    chosen = given or data.answers or (run or Path()) / FILE
    return list(dict.fromkeys([chosen, *([data.answers] if data.answers is not None else [])]))


def _pairs_of_shard(
    store: HeatmapStore, index: Index, expected: Expected, shard: int, rows: Rows, *, only_kept: bool
) -> Pairs:
    """Return the pairs of a shard; with `only_kept` those of classes that are named or have a heatmap."""
    ids = store.spec.sample_ids(shard)
    rows = rows.take(slice(0, len(ids)))
    known = index.labels_of(ids)
    if only_kept and rows.classes is not None:
        # Others have lower scores: a thousand classes would be a hundred times the work for nothing.
        others = known == -1
        np.put_along_axis(others, rows.classes.astype(np.int64), False, 1)
        known[others] = 0
    selected = expected.of(rows.ranked_by(), ids)
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
    places, classes = np.nonzero(known == 1)
    if len(places):
        seen = store.evidence_of(rows, ids, places, classes)
        peaks[places, classes] = seen.reshape(len(places), -1).max(axis=1)
    return peaks
