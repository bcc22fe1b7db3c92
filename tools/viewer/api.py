"""Requests of the page: each address has a function that answers it from the runs."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any
from urllib.parse import urlencode

import numpy as np
from numpy.typing import NDArray

from bigscl.common.files import free_bytes
from bigscl.common.text import printable
from bigscl.common.user_error import UserError
from bigscl.data.open_tar import Unreadable
from bigscl.memory.score_history import read_score_log
from bigscl.store import HeatmapStore, Rows, StoreError, bytes_by_array, read_holder
from bigscl.tools.shared.find_samples import next_epoch
from bigscl.tools.shared.open_store import checkpoints_by_snapshot, is_alive, snapshot_facts, trust_at
from bigscl.tools.shared.shard_passes import to_float32
from bigscl.tools.viewer import pictures
from bigscl.tools.viewer.open_run import OpenRun, curves_of
from bigscl.tools.viewer.question_queue import QuestionQueue, user_name
from bigscl.tools.viewer.request import Parameters, Reply, as_json
from bigscl.tools.viewer.sample_lists import MAX_PAGE, SampleLists, heat_text
from bigscl.tools.viewer.score_index import to_bytes

MAX_CLASSES = 40
"""Classes of a sample that are listed; those with a heatmap always."""
VIEWS = 5
PARTNERS = 12
BUSY = 4
"""Requests that read rows or decode images at a time: the others wait."""
IMAGE_HEADERS = {"Cache-Control": "private, max-age=86400, immutable"}


class Api:
    """The runs of a page, and the answers to its requests."""

    def __init__(self, runs: list[OpenRun]) -> None:
        self.runs = runs
        self._sizes: dict[str, tuple[int, dict[str, int]]] = {}
        self._busy = threading.BoundedSemaphore(BUSY)
        self._questions = [QuestionQueue(run) for run in runs]
        self._same = [[mine.same_samples(its) for its in runs] for mine in runs]
        self._lists = SampleLists(runs, self._same, self._questions)
        self.get: dict[str, Callable[[Parameters], Reply]] = {
            "/api/runs": self._runs,
            "/api/state": self._state,
            "/api/samples": self._samples,
            "/api/samples.csv": self._table,
            "/api/sample": self._sample,
            "/api/history": self._history,
            "/api/thumbnail": self._thumbnail,
            "/api/image": self._image,
            "/api/classes": self._classes,
            "/api/class": self._class,
            "/api/curves": self._curves,
            "/api/store": self._store,
            "/api/questions": self._questions_of,
        }
        """The functions by address."""
        self.post: dict[str, Callable[[dict[str, Any]], None]] = {
            "/api/answers": self._take_answers,
            "/api/skip": self._skip,
        }
        """Those that write something."""

    def answer(self, path: str, query: str) -> Reply:
        return self._guarded(lambda: self.get[path](Parameters(query)))

    def write(self, path: str, value: Any) -> Reply:

        def kept() -> Reply:
            if not isinstance(value, dict):
                raise UserError(f"found {type(value).__name__}, expected an object")
            self.post[path](value)
            return as_json({})

        return self._guarded(kept)

    def _guarded(self, work: Callable[[], Reply]) -> Reply:
        try:
            with self._busy:
                return work()
        except UserError as error:
            return as_json({"error": printable(str(error))}, 400)
        except (Unreadable, StoreError, OSError) as error:
            return as_json({"error": printable(str(error))}, 503)

    def _run(self, parameters: Parameters, name: str = "run") -> OpenRun:
        return self.runs[parameters.integer(name, 0, len(self.runs) - 1, 0)]

    def _row(self, parameters: Parameters, run: OpenRun) -> int:
        row = parameters.integer("row", 0, run.store.spec.num_rows - 1)
        run.store.check_ids(np.array([row]))
        return row

    # Runs

    def _runs(self, _: Parameters) -> Reply:
        return as_json([self._run_facts(number, run) for number, run in enumerate(self.runs)])

    def _run_facts(self, number: int, run: OpenRun) -> dict[str, Any]:
        spec = run.store.spec
        return {
            "name": run.name,
            "data": run.data.index.fingerprint[:12],
            "samples": spec.num_samples,
            "classes": [printable(name) for name in run.data.index.class_names],
            "side": spec.heatmap_size,
            "tracked": spec.history_samples,
            "full_labels": run.data.index.full is not None,
            "user": user_name(),
            "same_samples": [
                other for other, same in enumerate(self._same[number]) if same and other != number
            ],
            **run.state(),
        }

    def _state(self, parameters: Parameters) -> Reply:
        return as_json(self._run(parameters).state())

    # Samples

    def _samples(self, parameters: Parameters) -> Reply:
        return self._lists.page(self._run(parameters), parameters)

    def _table(self, parameters: Parameters) -> Reply:
        reply = self._lists.table(self._run(parameters), parameters)
        assert reply.parts is not None
        return replace(reply, parts=self._one_at_a_time(reply.parts))

    def _one_at_a_time(self, parts: Iterator[bytes]) -> Iterator[bytes]:
        """Yield the parts of a long reply; each is made as a request of its own."""
        while True:
            with self._busy:
                part = next(parts, None)
            if part is None:
                return
            yield part

    def _sample(self, parameters: Parameters) -> Reply:
        run = self._run(parameters)
        row = self._row(parameters, run)
        ids, index = np.array([row]), run.data.index
        at = parameters.optional_integer("at", 0, 2**40)
        store, rows = run.read(lambda store: (store, store.peek(ids)), at)
        facts: dict[str, Any] = {
            "row": row,
            "key": printable(index.key(row)),
            "path": printable(index.source(row) or ""),
            "shard": printable(index.shard_names[row // index.rows_per_shard]),
            "visited": int(rows["last_epoch"][0]),
            "snapshot": store.snapshot.id,
            "epoch": store.snapshot.epoch,
            "snapshots": [snapshot.id for snapshot in store.snapshots()],
            "tracked": row in store.spec.history_samples,
            "classes": _classes_of(run, store, rows, ids),
            "maps": _maps(rows),
            "boxes": pictures.boxes_of(index, row),
            "views": [],
        }
        try:
            facts["size"] = pictures.upright_size(index, row)
        except Unreadable as error:
            return as_json({**facts, "unreadable": printable(str(error))})
        if run.config is not None:
            facts["views"] = pictures.views_of(run.config, row, facts["size"], facts["visited"], VIEWS)
        return as_json(facts)

    def _history(self, parameters: Parameters) -> Reply:
        """Scores of a sample's classes after each epoch; of tracked samples with heatmaps."""
        run = self._run(parameters)
        row = self._row(parameters, run)
        history_samples = run.read(lambda store: store.history(row))
        epochs = {
            epoch: {
                "scores": {
                    number: float(rows.scores[0, number])
                    for number in _shown(rows, to_float32(rows.scores[0]))
                },
                "maps": _maps(rows),
            }
            for epoch, rows in history_samples.items()
        }
        return as_json({"epochs": epochs or _logged(run, row)})

    def _thumbnail(self, parameters: Parameters) -> Reply:
        run = self._run(parameters)
        row, side = self._row(parameters, run), parameters.integer("side", 32, 1024, 256)
        body = pictures.thumbnail(run.data.index, row, side)
        return Reply(body=body, type="image/jpeg", headers=IMAGE_HEADERS)

    def _image(self, parameters: Parameters) -> Reply:
        run = self._run(parameters)
        kind, body = pictures.original(run.data.index, self._row(parameters, run))
        return Reply(body=body, type=kind, headers=IMAGE_HEADERS)

    # Classes

    def _classes(self, parameters: Parameters) -> Reply:
        run = self._run(parameters)
        if run.index is None:
            return as_json({"classes": None, "progress": run.progress, "failure": printable(run.failure)})
        counts, expected = run.index.classes, run.index.expected
        cuts = np.where(expected.tie_id >= 0, to_float32(expected.score), np.nan)
        columns = {
            name: getattr(counts, name).tolist() for name in ("annotated", "expected", "mined", "histogram")
        }
        if run.index.full_labels:
            columns |= {name: getattr(counts, name).tolist() for name in ("right", "missing")}
        trust = trust_at(run.store)
        lines = [expected.note] if trust is None else [expected.note, str(trust), *trust.of_groups()]
        return as_json({"classes": {**columns, "cut": cuts.tolist()}, "note": "; ".join(lines)})

    def _class(self, parameters: Parameters) -> Reply:
        """Return the classes mined in images that name a class, and those named where it is mined."""
        run = self._run(parameters)
        number = parameters.integer("class", 0, run.store.spec.num_classes - 1)
        together = np.empty((0, 3), np.int64) if run.index is None else run.index.classes.together
        return as_json(
            {"found_with": _most(together, 0, 1, number), "named_with": _most(together, 1, 0, number)}
        )

    # Questions

    def _questions_of(self, parameters: Parameters) -> Reply:
        number = parameters.integer("run", 0, len(self.runs) - 1, 0)
        pairs, told = self._questions[number].next(parameters.integer("count", 1, 50, 5))
        items = self._lists.items(self.runs[number], pairs)
        # Whoever is asked does not see the answer.
        return as_json({**told, "items": [{**item, "present": None, "known": None} for item in items]})

    def _take_answers(self, value: dict[str, Any]) -> None:
        """Keep the answers of one person, all or none of them."""
        own, who = value.get("answers"), value.get("who")
        if not (isinstance(own, list) and 0 < len(own) <= MAX_PAGE and isinstance(who, str)):
            raise UserError(f"answers: expected who: a name, and answers: a list of 1 to {MAX_PAGE}")
        run = self._run(_numbers(value, "run"))
        self._questions[self.runs.index(run)].answer([self._answer_of(run, one) for one in own], who)

    def _answer_of(self, run: OpenRun, value: Any) -> tuple[int, int, bool | None]:
        row, number = self._pair(run, value)
        yes = value.get("yes", "")
        if not (yes is None or isinstance(yes, bool)):
            raise UserError("answers: expected yes: true, false or null")
        return row, number, yes

    def _skip(self, value: dict[str, Any]) -> None:
        run = self._run(_numbers(value, "run"))
        queue = self._questions[self.runs.index(run)]
        queue.skip(*self._pair(run, value), again=value.get("again") is True)

    def _pair(self, run: OpenRun, value: Any) -> tuple[int, int]:
        """Return the row and the class that something sent is about."""
        given = _numbers(value, "row", "class")
        return self._row(given, run), given.integer("class", 0, run.store.spec.num_classes - 1)

    # The run as a whole

    def _curves(self, parameters: Parameters) -> Reply:
        run = self._run(parameters)
        return as_json(curves_of(run.folder, parameters.integer("after", 0, 2**60, 0)))

    def _store(self, parameters: Parameters) -> Reply:
        run = self._run(parameters)
        backend, holder = run.store.backend, read_holder(run.store.backend)
        checkpoints = checkpoints_by_snapshot(run.folder)
        snapshots = [
            {
                **snapshot_facts(snapshot, run.store.spec.num_classes),
                "checkpoints": checkpoints.get(snapshot.id, []),
            }
            for snapshot in run.store.snapshots()
        ]
        return as_json(
            {
                "url": printable(backend.url),
                "layout": run.store.group.to_json(),
                "lease": None if holder is None else {**asdict(holder), "alive": is_alive(holder)},
                "snapshots": snapshots,
                "bytes": self._bytes(run),
                "free": free_bytes(backend.url),
                **run.state(),
            }
        )

    def _bytes(self, run: OpenRun) -> dict[str, int]:
        """Return the bytes of a store by array, listed once for each snapshot: it has thousands of files."""
        at = run.store.snapshot.id
        if self._sizes.get(run.name, (None,))[0] != at:
            self._sizes[run.name] = at, bytes_by_array(list(run.store.backend.sizes("")))
        return self._sizes[run.name][1]


def _numbers(value: Any, *names: str) -> Parameters:
    """Return numbers of a value that was sent, as parameters, which are checked as those of any request."""
    numbers = {name: value.get(name) for name in names} if isinstance(value, dict) else {}
    if not numbers or not all(type(number) is int for number in numbers.values()):
        raise UserError(f"answers: expected numbers as {' and '.join(names)}")
    return Parameters(urlencode(numbers))


def _shown(rows: Rows, scores: NDArray[np.float32]) -> list[int]:
    """Return the classes of one sample with these scores that are listed, the highest score first."""
    highest = np.argsort(-scores, kind="stable")[:MAX_CLASSES]
    kept = rows.kept_classes()[0].astype(np.int64)
    return sorted({*highest.tolist(), *kept.tolist()}, key=lambda number: (-scores[number], number))


def _classes_of(
    run: OpenRun, store: HeatmapStore, rows: Rows, ids: NDArray[np.int64]
) -> list[dict[str, Any]]:
    annotated, present = run.data.annotated(ids)[0], run.data.present(ids)
    absent = run.data.index.labels_of(ids)[0] == 0
    expected = None if run.index is None else run.index.expected.expected(rows.ranked_by(), ids)[0]
    scores = store.scores_without_initial_value(rows, ids)[0]
    numbers = {*_shown(rows, scores), *np.flatnonzero(annotated).tolist()}
    numbers |= set() if present is None else {*np.flatnonzero(present[0]).tolist()}
    return [
        {
            "class": number,
            "score": float(scores[number]),
            "annotated": bool(annotated[number]),
            "absent": bool(absent[number]),
            "expected": None if expected is None else bool(expected[number]),
            "present": None if present is None else bool(present[0, number]),
        }
        for number in sorted(numbers, key=lambda number: (-scores[number], number))
    ]


def _maps(rows: Rows) -> dict[str, Any] | None:
    """Return the heatmaps of one sample as bytes, and their classes."""
    if rows.heatmaps is None:
        return None
    classes = rows.kept_classes()[0].astype(np.int64).tolist()
    return {"classes": classes, "heat": heat_text(to_bytes(rows.heatmaps[0]))}


def _logged(run: OpenRun, row: int) -> dict[int, Any]:
    """Return the scores of a sample that the run has logged at the ends of its epochs."""
    if run.folder is None:
        return {}
    position = int(np.searchsorted(run.data.index.ids(), row))
    epochs = read_score_log(run.folder, run.data.annotations, next_epoch(run.store))
    return {
        epoch: {
            "scores": {int(pair["class"]): float(pair["score"]) for pair in pairs[position]},
            "maps": None,
        }
        for epoch, pairs in epochs.items()
    }


def _most(together: NDArray[np.int64], by: int, other: int, number: int) -> list[list[int]]:
    partners = together[together[:, by] == number]
    order = np.argsort(-partners[:, 2], kind="stable")[:PARTNERS]
    most: list[list[int]] = partners[order][:, [other, 2]].tolist()
    return most
