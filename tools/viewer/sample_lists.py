"""Lists of samples, filtered and sorted: a page of tiles, or all of them as a table."""

import base64
import csv
import io
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bigscl.common.files import BadFile
from bigscl.common.text import printable
from bigscl.common.user_error import UserError
from bigscl.store import Array
from bigscl.tools.shared.shard_passes import to_float32
from bigscl.tools.viewer.open_run import OpenRun
from bigscl.tools.viewer.question_queue import AnswersOf, QuestionQueue
from bigscl.tools.viewer.request import Parameters, Reply, as_json
from bigscl.tools.viewer.score_index import (
    ABSENT,
    ANNOTATED,
    EXPECTED,
    KNOWN,
    PRESENT,
    Order,
    Query,
    ScoreIndex,
    listed,
    to_bytes,
)

FLAGS = {"annotated": ANNOTATED, "expected": EXPECTED, "present": PRESENT, "absent": ABSENT, "known": KNOWN}
ORDERS: dict[str, Order] = {
    name: name for name in ("surprise", "change", "heat", "against", "score", "row")
} | {"": "surprise"}
MAX_PAGE = 200
MAX_GIVEN = 4
"""Given labels of a tile that are listed."""
LISTINGS = 4
PART = 500
COLUMNS = [
    "id",
    "shard",
    "key",
    "path",
    "class",
    "name",
    "score",
    "hottest",
    "change",
    "annotated",
    "expected",
    "present",
    "given",
    "answer",
]


class SampleLists:
    """The lists that a page asks for. Those of the last queries are kept for their next pages."""

    def __init__(
        self, runs: list[OpenRun], same: Sequence[Sequence[bool]], questions: Sequence[QuestionQueue]
    ) -> None:
        self._runs, self._same, self._questions = runs, same, questions
        self._listings: OrderedDict[Any, Array] = OrderedDict()
        self._lock = threading.Lock()

    def page(self, run: OpenRun, parameters: Parameters) -> Reply:
        index = run.index
        if index is None:
            return as_json(
                {"total": 0, "items": [], "progress": run.progress, "failure": printable(run.failure)}
            )
        pairs = self.listed(run, index, query_of(run, parameters), self._other(run, parameters))
        if pairs is None:
            return as_json({"total": 0, "items": [], "pending": True, "failure": printable(run.failure)})
        start = parameters.integer("offset", 0, 2**40, 0)
        shown = pairs[start : start + parameters.integer("count", 1, MAX_PAGE, 24)]
        return as_json({"total": len(pairs), "items": self.items(run, shown), "indexed": index.snapshot})

    def table(self, run: OpenRun, parameters: Parameters) -> Reply:
        """Return all samples of a list as CSV, in parts: they may be millions."""
        index, query, other = run.index, query_of(run, parameters), self._other(run, parameters)
        if index is None:
            raise UserError("the index of scores is being built: try again when the samples are there")
        if self.listed(run, index, query, other) is None:
            raise UserError("the runs are being compared: try again when the samples are there")
        headers = {"Content-Disposition": 'attachment; filename="samples.csv"'}
        parts = self._parts(run, index, query, other)
        return Reply(type="text/csv; charset=utf-8", headers=headers, parts=parts)

    def _parts(self, run: OpenRun, index: ScoreIndex, query: Query, other: OpenRun | None) -> Iterator[bytes]:
        answers, shard_names = self._answers_of(run), run.data.index.shard_names
        rows: list[list[Any]] = [COLUMNS]
        start = 0
        while rows:
            text = io.StringIO()
            csv.writer(text).writerows(rows)
            yield text.getvalue().encode(errors="backslashreplace")
            # Looked up again for each part: a client that takes its time keeps no list in memory.
            pairs = self.listed(run, index, query, other)
            if pairs is None:
                raise UserError("the runs are being compared again")
            rows = self._rows(run, pairs[start : start + PART], shard_names, answers)
            start += PART

    def _rows(
        self, run: OpenRun, pairs: Array, shard_names: Sequence[str], answers: AnswersOf
    ) -> list[list[Any]]:
        samples, given = run.data.index, self._given(run, pairs)
        names = samples.class_names
        return [
            [
                row,
                shard_names[row // samples.rows_per_shard],
                samples.key(row),
                samples.source(row),
                number,
                names[number],
                *(round(value, 4) for value in (score, peak, change)),
                *(bool(flags & FLAGS[name]) for name in ("annotated", "expected")),
                bool(flags & PRESENT) if flags & KNOWN else None,
                "; ".join(names[label] for label in labels),
                None if answer is None else "yes" if answer.yes else "no",
            ]
            for row, number, score, peak, change, flags, labels, answer in zip(
                *(pairs[name].tolist() for name in ("row", "class")),
                *(to_float32(pairs["score"]).tolist(), (pairs["peak"] / 255).tolist()),
                *(to_float32(pairs["change"]).tolist(), pairs["flags"].tolist()),
                *(given, answers(pairs)),
                strict=True,
            )
        ]

    def _other(self, run: OpenRun, parameters: Parameters) -> OpenRun | None:
        number = parameters.optional_integer("against", 0, len(self._runs) - 1)
        if number is None or self._runs[number] is run:
            return None
        if not self._same[self._runs.index(run)][number]:
            raise UserError("against: these runs have other samples or classes, so they cannot be compared")
        return self._runs[number]

    def listed(self, run: OpenRun, index: ScoreIndex, query: Query, other: OpenRun | None) -> Array | None:
        """Return all pairs of a query; None while two runs are being compared."""
        against = run.against(other) if query.order == "against" and other is not None else None
        if query.order == "against" and other is not None and against is None:
            return None
        key = (index.folder, query, None if against is None else against.index.folder)
        with self._lock:
            if key in self._listings:
                self._listings.move_to_end(key)
                return self._listings[key]
        pairs = listed(index, query, run.data.index, against)
        with self._lock:
            self._listings[key] = pairs
            while len(self._listings) > LISTINGS:
                self._listings.popitem(last=False)
        return pairs

    def items(self, run: OpenRun, pairs: Array) -> list[dict[str, Any]]:
        """Return what the page shows of pairs: each with its heatmap, given labels, and answer."""
        if not len(pairs):
            return []
        ids = pairs["row"].astype(np.int64)
        rows = run.read(lambda store: store.peek(ids))
        maps = (
            None if rows.heatmaps is None else to_bytes(rows.heatmaps_of(np.arange(len(ids)), pairs["class"]))
        )
        given = self._given(run, pairs)
        try:
            answers = self._answers_of(run)(pairs)
        except BadFile:
            # The next person who answers is told: samples are shown all the same.
            answers = [None] * len(pairs)
        return [
            {
                "row": int(pair["row"]),
                "key": printable(run.data.index.key(int(pair["row"]))),
                "class": int(pair["class"]),
                "score": float(pair["score"].view(np.float16)),
                "change": float(pair["change"].view(np.float16)),
                "peak": int(pair["peak"]) / 255,
                **{name: bool(pair["flags"] & flag) for name, flag in FLAGS.items()},
                "given": given[number][:MAX_GIVEN],
                "more_given": max(0, len(given[number]) - MAX_GIVEN),
                "answer": None if answer is None else answer.yes,
                "who": None if answer is None else printable(answer.who),
                "heat": None if maps is None else heat_text(maps[number]),
            }
            for number, (pair, answer) in enumerate(zip(pairs, answers, strict=True))
        ]

    def _given(self, run: OpenRun, pairs: Array) -> list[list[int]]:
        """Return the given labels of each sample, with those that people have confirmed."""
        annotated = run.data.annotated(pairs["row"].astype(np.int64))
        return [np.flatnonzero(row).tolist() for row in annotated]

    def _answers_of(self, run: OpenRun) -> AnswersOf:
        return self._questions[self._runs.index(run)].answers_now()


def query_of(run: OpenRun, parameters: Parameters) -> Query:
    return Query(
        order=parameters.choice("sort", ORDERS),
        number=parameters.optional_integer("class", 0, run.store.spec.num_classes - 1),
        annotated=parameters.answer("annotated"),
        expected=parameters.answer("expected"),
        present=parameters.answer("present"),
        low=parameters.share("low", 0),
        high=parameters.share("high", 1),
        key=parameters.text("key"),
        reverse=bool(parameters.answer("reverse")),
    )


def heat_text(values: NDArray[np.uint8]) -> str:
    """Return heatmaps as text: the page turns it into bytes again."""
    return base64.b64encode(values.tobytes()).decode()
