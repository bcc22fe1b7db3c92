"""The given labels of every row, and answers of people about single classes, which change labels and rows.

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

import hashlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bigscl.common.user_error import UserError
from bigscl.store.errors import BadFile
from bigscl.store.format.spec import Array, Rows
from bigscl.store.snapshots import Snapshot


@dataclass(frozen=True, slots=True, eq=False)
class Ragged:
    """Rows of different lengths in two flat arrays: row n is `values[offsets[n]:offsets[n + 1]]`."""

    offsets: NDArray[np.int64]
    values: NDArray[Any]

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]]) -> "Ragged":
        values = np.array([value for row in rows for value in row], np.uint32)
        return cls.from_lengths(np.array([len(row) for row in rows], np.int64), values)

    @classmethod
    def of_bytes(cls, rows: Sequence[bytes]) -> "Ragged":
        values = np.frombuffer(b"".join(rows), np.uint8)
        return cls.from_lengths(np.array([len(row) for row in rows], np.int64), values)

    @classmethod
    def from_lengths(cls, lengths: NDArray[Any], values: NDArray[Any]) -> "Ragged":
        return cls(np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]), values)

    @classmethod
    def concatenate(cls, parts: Iterable["Ragged"], dtype: type[np.generic]) -> "Ragged":
        parts = list(parts)
        lengths = np.concatenate([np.empty(0, np.int64), *(part.lengths for part in parts)])
        return cls.from_lengths(
            lengths, np.concatenate([np.empty(0, dtype), *(part.values for part in parts)])
        )

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> NDArray[Any]:
        return self.values[self.offsets[row] : self.offsets[row + 1]]

    def entries(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[Any]]:
        """Return (index into `rows`, value) of every value of the chosen rows."""
        first, lengths = self.offsets[rows], self.offsets[rows + 1] - self.offsets[rows]
        indices = np.repeat(np.arange(len(rows)), lengths)
        within = np.arange(len(indices)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        return indices, self.values[first[indices] + within]

    def spread(self, rows: NDArray[np.int64], num_rows: int) -> "Ragged":
        """Return `num_rows` rows: these at the ascending positions `rows`, the others empty."""
        lengths = np.zeros(num_rows, np.int64)
        lengths[rows] = self.lengths
        return Ragged.from_lengths(lengths, self.values)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Annotations:
    """Given labels of all rows: the classes of row n are `given[n]`, ascending.

    Row n is sample `n % rows_per_shard` of shard `n // rows_per_shard`; rows past a shard's size are empty.
    """

    fingerprint: str
    """Digest of the data these labels describe; a store opens only against the one it was made for."""
    num_classes: int
    rows_per_shard: int
    shard_sizes: NDArray[np.int64]
    given: Ragged

    def __post_init__(self) -> None:
        rows, offsets, classes = self.num_rows, self.given.offsets, self.given.values
        if len(offsets) != rows + 1 or offsets[-1] != len(classes):
            raise UserError(
                f"annotations: offsets must have {rows + 1} entries ending in {len(classes)}, "
                f"found {len(offsets)} ending in {offsets[-1] if len(offsets) else 'nothing'}"
            )
        if len(self.shard_sizes) and self.shard_sizes.max() > self.rows_per_shard:
            raise UserError(
                f"annotations: a shard has {self.shard_sizes.max()} samples, "
                f"more than rows_per_shard {self.rows_per_shard}"
            )
        if len(classes) and not 0 <= classes.min() <= classes.max() < self.num_classes:
            raise UserError(
                f"annotations: classes span {classes.min()}..{classes.max()}, "
                f"expected 0..{self.num_classes - 1}"
            )

    @classmethod
    def of(
        cls, given: Sequence[Collection[int]], num_classes: int, *, rows_per_shard: int = 1000
    ) -> "Annotations":
        """Return the annotations of a dataset that has no shards: sample n is row n.

        `given` are the labelled classes of each sample; each `rows_per_shard` samples share a chunk.
        """
        if not len(given) or rows_per_shard < 1:
            raise UserError(
                f"annotations: {len(given)} samples, rows_per_shard {rows_per_shard}, expected at least 1"
            )
        rows = min(rows_per_shard, len(given))
        num_shards = -(-len(given) // rows)
        lengths = np.zeros(num_shards * rows, np.int64)
        lengths[: len(given)] = [len(classes) for classes in given]
        values = np.array([number for classes in given for number in sorted(classes)], np.int64)
        labels = Ragged.from_lengths(lengths, values)
        sizes = np.full(num_shards, rows)
        sizes[-1] = len(given) - rows * (num_shards - 1)
        digest = hashlib.sha256(f"{num_classes} {rows} {len(given)}".encode())
        digest.update(labels.offsets.astype("<i8").tobytes() + values.astype("<i8").tobytes())
        return cls(
            fingerprint=digest.hexdigest(),
            num_classes=num_classes,
            rows_per_shard=rows,
            shard_sizes=sizes,
            given=labels,
        )

    @property
    def num_rows(self) -> int:
        """The number of rows, those past a shard's size included."""
        return len(self.shard_sizes) * self.rows_per_shard

    @property
    def num_samples(self) -> int:
        return int(self.shard_sizes.sum())

    def of_shard(self, shard: int) -> NDArray[np.bool_]:
        """Return which classes are given labels of each row of a shard, [R,L]."""
        return self.of_rows(shard * self.rows_per_shard + np.arange(self.rows_per_shard))

    def of_rows(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which classes are given labels of these rows, [n,L]."""
        mask = np.zeros((len(rows), self.num_classes), bool)
        mask[self.given.entries(rows)] = True
        return mask

    def is_given(self, rows: NDArray[np.int64], classes: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return whether each class is a given label of its row; both have the same shape."""
        indices, given = self.given.entries(rows.ravel())
        mask = np.zeros(rows.size, bool)
        mask[indices[given == classes.ravel()[indices]]] = True
        return mask.reshape(rows.shape)

    def counts(self) -> NDArray[np.int64]:
        """Return the number of given labels of each class, over the whole dataset."""
        return np.bincount(self.given.values, minlength=self.num_classes)


# Answers of people, after the labels were made

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
        names = ("rows", "classes", "says", "named", "late")
        return Answered(**{name: getattr(self, name)[places] for name in names})


def with_answers(annotations: Annotations, answered: Answered, *, from_start: bool = False) -> Annotations:
    """Return the given labels after the answers; `from_start`: only those whose heatmaps started at 1."""
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
    positions, given = own.rows % annotations.rows_per_shard, annotations.of_shard(shard)
    is_present = (own.says == 1) | ((own.says == WITHDRAWN) & own.named)
    changed = Rows(rows.num_classes, **{name: array.copy() for name, array in rows.items()})
    spatial = changed.get("spatial_score")
    answers = zip(positions.tolist(), own.classes.tolist(), is_present.tolist(), strict=True)
    for row, number, present in answers:
        index = number if changed.classes is None else _index_of(changed, row, number, present, given[row])
        _set_score(changed, row, number, present, given[row])
        if index >= 0:
            if spatial is not None:
                spatial[row, index] = present
            if changed.heatmaps is not None and not present:
                changed.heatmaps[row, index] = 0
    for names in (("classes", "heatmaps", "spatial_score"), ("score_classes", "scores")):
        if names[0] in changed:
            _sort_classes([changed[name] for name in names if name in changed], np.unique(positions))
    return changed


def _set_score(rows: Rows, row: int, number: int, present: bool, given: NDArray[np.bool_]) -> None:
    if (classes := rows.get("score_classes")) is None:
        rows.scores[row, number] = present
        return
    scores, floors = rows["scores"], rows["score_floor"]
    found = np.flatnonzero(classes[row] == number)
    if len(found):
        scores[row, found[0]] = present
    elif present:
        kept = classes[row].astype(np.int64)
        order = scores[row].astype(np.float32) + 2 * given[kept]
        if rows.classes is not None:
            order += np.isin(kept, rows.classes[row])
        place = len(kept) - 1 - int(order[::-1].argmin())
        floors[row] = max(floors[row], scores[row, place])
        classes[row, place], scores[row, place] = number, present


def _index_of(rows: Rows, row: int, number: int, present: bool, given: NDArray[np.bool_]) -> int:
    """Return the index of a class's heatmap in its row, which makes room for it if it must; -1 for none."""
    assert rows.classes is not None
    kept = rows.classes[row].astype(np.int64)
    found = np.flatnonzero(kept == number)
    if len(found):
        return int(found[0])
    if not present:
        return -1
    own = rows.take(np.array([row])).scores[0]
    scores = np.where(given[kept], np.inf, own[kept].astype(np.float32))
    index = len(kept) - 1 - int(scores[::-1].argmin())
    rows.classes[row, index] = number
    if rows.heatmaps is not None:
        rows.heatmaps[row, index] = own[number]
    return index


def _sort_classes(arrays: list[Array], positions: Array) -> None:
    """Bring the classes of some rows, the first array, into ascending order, with what belongs to them."""
    order = np.argsort(arrays[0][positions], axis=1, kind="stable")
    for array in arrays:
        places = order.reshape(order.shape + (1,) * (array.ndim - 2))
        array[positions] = np.take_along_axis(array[positions], places, 1)
