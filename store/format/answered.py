"""Answers of people about single classes after the labels were made, and how they change stored rows.

A class that is said to be present is a given label from then on. Its score becomes 1; its heatmap
stays what was learnt. If the row keeps the heatmaps of some classes only, and not of this one, it takes the
place of the class of lowest score that is not given (of several the last), with a heatmap that is flat at
its score before. If the row keeps the scores of some classes only, it takes a place there likewise, rather
that of a class without a heatmap; the score that gives way becomes the floor if it is higher. A class that is
said to be absent gets score 0 and an empty heatmap, unless its score is not kept: then it is not expected
anyway. An answer that was withdrawn leaves the row as it is, unless the label names the class: that is as
present again. Rows that were never stored have the initial values of their given labels.
"""

# Shapes: n answers, R rows, L classes, k kept classes, W side of a heatmap.

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bigscl.store.commit.snapshots import Snapshot
from bigscl.store.errors import BadFile
from bigscl.store.format.annotations import Annotations, Ragged
from bigscl.store.format.spec import Array, Rows

ATTRIBUTE = "answers"
"""The attribute of a snapshot that has the answers its rows know of."""
WITHDRAWN = -1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Answered:
    """Answers about single classes of rows, no pair twice, in the order of rows and classes."""

    rows: NDArray[np.int64]
    classes: NDArray[np.int64]
    says: NDArray[np.int8]
    """1 present, 0 absent, -1 withdrawn."""
    named: NDArray[np.bool_]
    """Whether the labels without answers name the class."""
    late: NDArray[np.bool_]
    """Whether the row was stored when the answer came: its heatmap did not start at 1."""

    @classmethod
    def of(
        cls, rows: Any = (), classes: Any = (), says: Any = (), *, named: Any = None, late: Any = None
    ) -> "Answered":
        """Return answers from lists of the same length, sorted."""
        rows, classes = np.asarray(rows, np.int64), np.asarray(classes, np.int64)
        order = np.lexsort((classes, rows))
        flags = [np.zeros(len(rows), bool) if one is None else np.asarray(one, bool) for one in (named, late)]
        return cls(
            rows=rows[order],
            classes=classes[order],
            says=np.asarray(says, np.int8)[order],
            named=flags[0][order],
            late=flags[1][order],
        )

    @classmethod
    def at(cls, snapshot: Snapshot) -> "Answered":
        """Return the answers that the rows of a snapshot know of."""
        found = snapshot.attributes.get(ATTRIBUTE)
        if found is None:
            return cls.of()
        try:
            flags = {name: np.zeros(len(found["rows"]), bool) for name in ("named", "late")}
            for name, values in flags.items():
                values[np.asarray(found[name], np.int64)] = True
            return cls.of(found["rows"], found["classes"], found["says"], **flags)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise BadFile(
                f"snapshot {snapshot.id}: its answers cannot be read ({error!r}): the file is damaged, or of "
                f"an earlier revision. Restore it from a copy, or use an older snapshot."
            ) from None

    def attribute(self) -> dict[str, Any]:
        """Return the answers as an attribute of a snapshot, by its name; nothing if there are none."""
        if not len(self):
            return {}
        lists: dict[str, Array] = {"rows": self.rows, "classes": self.classes, "says": self.says}
        lists |= {"named": np.flatnonzero(self.named), "late": np.flatnonzero(self.late)}
        return {ATTRIBUTE: {name: values.tolist() for name, values in lists.items()}}

    def __len__(self) -> int:
        return len(self.rows)

    def _keys(self) -> set[tuple[int, int]]:
        return set(zip(self.rows.tolist(), self.classes.tolist(), strict=True))

    def lost(self, later: "Answered") -> list[tuple[int, int]]:
        """Return the (row, class) of answers of which the later ones do not know any more."""
        return sorted(self._keys() - later._keys())

    def since(
        self, earlier: "Answered", *, stored: NDArray[np.bool_], heatmaps: bool
    ) -> tuple["Answered", NDArray[np.bool_]]:
        """Return these answers as those of rows that have the earlier ones, and which of them change a row.

        `stored` says of each answer whether its row is stored, `heatmaps` whether rows have any. `late` is
        that of the earlier answers, and set by a change.
        """
        known = zip(earlier.rows.tolist(), earlier.classes.tolist(), strict=True)
        places = {pair: place for place, pair in enumerate(known)}
        now = np.where(self.says == WITHDRAWN, np.where(self.named, 1, WITHDRAWN), self.says)
        before, late = np.where(self.named, 1, WITHDRAWN), np.zeros(len(self), bool)
        for place, pair in enumerate(zip(self.rows.tolist(), self.classes.tolist(), strict=True)):
            if pair in places:
                late[place] = earlier.late[places[pair]]
                if earlier.says[places[pair]] != WITHDRAWN:
                    before[place] = earlier.says[places[pair]]
        changes = (now != before) & (now != WITHDRAWN) & stored
        return replace(self, late=late | (changes & heatmaps)), changes

    def take(self, places: Array) -> "Answered":
        """Return some of the answers."""
        names = ("rows", "classes", "says", "named", "late")
        return Answered(**{name: getattr(self, name)[places] for name in names})


def with_answers(annotations: Annotations, answered: Answered, *, from_start: bool = False) -> Annotations:
    """Return the given labels of all rows after the answers.

    With `from_start` only those whose heatmaps started at 1: no class of a late answer is among them.
    """
    rows = np.arange(annotations.num_rows)
    keys = np.repeat(rows, annotations.given.lengths) * annotations.num_classes + annotations.given.values
    said = answered.rows * annotations.num_classes + answered.classes
    absent = (answered.says == 0) | (answered.late if from_start else False)
    present = (answered.says == 1) & ~absent
    keys = np.union1d(np.setdiff1d(keys, said[absent]), said[present])
    owners, classes = np.divmod(keys, annotations.num_classes)
    return replace(annotations, given=Ragged(np.searchsorted(owners, np.append(rows, len(rows))), classes))


def label_counts(annotations: Annotations, answered: Answered) -> NDArray[np.int64]:
    """Return how many labels of each class the annotations have, without those that only answers named, [L].

    There are K positives for each label. An answer says which image is one of them, not that there are more.
    """
    found = answered.classes[(answered.says == 1) & ~answered.named]
    return annotations.counts() - np.bincount(found, minlength=annotations.num_classes)


def answered_shard(rows: Rows, shard: int, answered: Answered, annotations: Annotations) -> Rows:
    """Return the rows of a shard after those answers that are about it, by the rule of this module.

    `annotations` are the positives after all answers. Other rows stay bit for bit.
    """
    own = answered.take(answered.rows // annotations.rows_per_shard == shard)
    return _answered_rows(rows, own.rows % annotations.rows_per_shard, own, annotations.of_shard(shard))


def _answered_rows(rows: Rows, positions: Array, answered: Answered, given: NDArray[np.bool_]) -> Rows:
    changed = Rows(rows.num_classes, **{name: array.copy() for name, array in rows.items()})
    spatial = changed.get("spatial_score")
    for row, number, present in zip(positions, answered.classes, _present(answered), strict=True):
        place = int(number)
        if changed.classes is not None:
            place = _place(changed, int(row), int(number), present, given[row])
        _set_score(changed, int(row), int(number), present, given[row])
        if place >= 0:
            if spatial is not None:
                spatial[row, place] = 1 if present else 0
            if changed.heatmaps is not None and not present:
                changed.heatmaps[row, place] = 0
    maps = ("classes", "heatmaps", "spatial_score")
    for names in (maps, ("score_classes", "scores")):
        if names[0] in changed:
            arrays = [changed[name] for name in names if name in changed]
            _sort_classes(arrays, np.unique(positions))
    return changed


def _set_score(rows: Rows, row: int, number: int, present: bool, given: NDArray[np.bool_]) -> None:
    """Set the score of a class that is said to be present or absent."""
    value = 1 if present else 0
    if (classes := rows.get("score_classes")) is None:
        rows.scores[row, number] = value
        return
    scores, floors = rows["scores"], rows["score_floor"]
    found = np.flatnonzero(classes[row] == number)
    if len(found):
        scores[row, found[0]] = value
    elif present:
        kept = classes[row].astype(np.int64)
        order = scores[row].astype(np.float32) + 2 * given[kept]
        if rows.classes is not None:
            order += np.isin(kept, rows.classes[row])
        place = len(kept) - 1 - int(order[::-1].argmin())
        floors[row] = max(floors[row], scores[row, place])
        classes[row, place], scores[row, place] = number, value


def _present(answered: Answered) -> list[bool]:
    present = (answered.says == 1) | ((answered.says == WITHDRAWN) & answered.named)
    return [bool(one) for one in present]


def _place(rows: Rows, row: int, number: int, present: bool, given: NDArray[np.bool_]) -> int:
    """Return where the heatmap of a class is in its row, after it got a place if it needs one; else -1."""
    assert rows.classes is not None
    kept = rows.classes[row].astype(np.int64)
    found = np.flatnonzero(kept == number)
    if len(found):
        return int(found[0])
    if not present:
        return -1
    own = rows.take(np.array([row])).scores[0]
    scores = np.where(given[kept], np.inf, own[kept].astype(np.float32))
    place = len(kept) - 1 - int(scores[::-1].argmin())
    rows.classes[row, place] = number
    if rows.heatmaps is not None:
        rows.heatmaps[row, place] = own[number]
    return place


def _sort_classes(arrays: list[Array], positions: Array) -> None:
    """Bring the classes of some rows, the first array, into ascending order, with what belongs to them."""
    order = np.argsort(arrays[0][positions], axis=1, kind="stable")
    for array in arrays:
        places = order.reshape(order.shape + (1,) * (array.ndim - 2))
        array[positions] = np.take_along_axis(array[positions], places, 1)
