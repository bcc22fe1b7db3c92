"""Labels from a file beside the shards: CSV, JSON lines, Parquet, or ReaL's list of lists.

A table has a line for each image: `key`, `positives` and, optionally, `negatives`. Classes are names or
numbers (a name comes first); in CSV and in text columns they are separated by `;`. `*` as the only negative
says that all classes but the positives are absent. A key is that of the sample in its shard, or `shard/key`
where several shards have the same key.
"""

import json
import logging
import re
import reprlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bigscl.common.files import BadFile, parse_errors
from bigscl.common.tables import READERS, Row, read_table
from bigscl.common.text import first_few, printable
from bigscl.common.user_error import UserError
from bigscl.data.index import Index, with_fingerprint
from bigscl.store import Ragged

logger = logging.getLogger(__name__)

COLUMNS = ("key", "positives", "negatives")
ALL_OTHERS = "*"
SEPARATOR = ";"


@dataclass(frozen=True, slots=True, eq=False)
class FileLabels:
    """Labels of some samples, by their ids."""

    positives: dict[int, list[int]]
    negatives: dict[int, list[int]]
    """Classes that are named as absent."""
    complete: frozenset[int]
    """Samples of which all classes are known: those that are not positives are absent."""


def with_training_labels(index: Index, path: Path) -> Index:
    """Return the index with the given labels of a file; samples that it lacks keep those of the shards.

    The full labels are the file's if it knows all classes of all samples.
    """
    own = read_labels(path, index)
    ids = index.ids()
    kept = len(ids) - len(own.positives)
    logger.info("%s: labels of %d of %d training images%s", path, len(own.positives), len(ids), _rest(kept))
    given = replaced_rows(index.given, own.positives)
    labelled = replace(
        index,
        given=given,
        negatives=replaced_rows(index.negatives, own.negatives),
        full=given if len(own.complete) == len(ids) else index.full,
    )
    return with_fingerprint(labelled)


def with_evaluation_labels(index: Index, path: Path) -> Index:
    """Return the index with the full labels of a file; no metric counts the samples that it lacks.

    Classes that are not positives are absent, so a file with other negatives than `*` is refused.
    """
    found = read_labels(path, index)
    if partial := [sample_id for sample_id, own in found.negatives.items() if own]:
        raise BadFile(
            f"{path}: {len(partial)} images have negatives, as {index.name(partial[0])}. Labels to evaluate "
            f"against are complete: all classes but the positives are absent. Leave negatives out, or write "
            f"{ALL_OTHERS}."
        )
    unknown = np.setdiff1d(index.ids(), np.array(list(found.positives), np.int64))
    logger.info(
        "%s: labels of %d of %d images; others are not evaluated",
        path,
        len(found.positives),
        index.num_samples,
    )
    empty = Ragged.from_lengths(np.zeros(len(index.keys), np.int64), np.empty(0, np.uint32))
    return with_fingerprint(replace(index, full=replaced_rows(empty, found.positives), unknown=unknown))


def read_labels(path: Path, index: Index) -> FileLabels:
    """Return the labels of a file for the samples of an index; BadFile names what does not fit."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file of labels")
    if path.suffix == ".json":
        return _read_real(path, index)
    if path.suffix not in READERS:
        raise UserError(f"{path}: labels are read from {', '.join([*READERS, '.json (ReaL)'])}")
    rows = read_table(path, _check_columns, f"the columns {', '.join(COLUMNS)}")
    return _matched(path, rows, index)


def _read_real(path: Path, index: Index) -> FileLabels:
    ids = index.ids()
    keys = [index.key(int(sample_id)) for sample_id in ids]
    labels = match_real_labels(read_real_labels(path), keys, index.class_names).labels
    positives = {
        int(sample_id): np.flatnonzero(own).tolist()
        for sample_id, own in zip(ids, labels, strict=True)
        if own.any()
    }
    return FileLabels(positives, {}, frozenset(positives))


# Tables


def _check_columns(found: list[str]) -> None:
    missing = [name for name in COLUMNS[:2] if name not in found]
    unknown = [name for name in found if name not in COLUMNS]
    if missing or unknown:
        what = f"no {missing[0]!r}" if missing else f"an unknown {unknown[0]!r}"
        raise UserError(f"found {what} in {found}, expected {', '.join(COLUMNS)}")


def _matched(path: Path, rows: Sequence[Row], index: Index) -> FileLabels:
    ids, classes = ids_by_key(index), _Classes(index.class_names)
    positives: dict[int, list[int]] = {}
    negatives: dict[int, list[int]] = {}
    complete: set[int] = set()
    unknown_keys: list[str] = []
    for row in rows:
        key = str(row["key"])
        sample_id = ids.get(key)
        if sample_id is None:
            unknown_keys.append(key)
            continue
        where = f"{path}: key {printable(key)!r}"
        if sample_id == SEVERAL:
            raise BadFile(
                f"{where} is in several shards. Write `shard/key`, as {index.name(_first(index, key))}."
            )
        if sample_id in positives:
            raise BadFile(f"{where} occurs twice, expected one line for each image. Merge the lines.")
        own, absent = (_listed(row.get(name), where, name) for name in COLUMNS[1:])
        if absent == [ALL_OTHERS] and not classes.knows(ALL_OTHERS):
            complete.add(sample_id)
            absent = []
        positives[sample_id] = classes.numbers(own, f"{where}: positives")
        negatives[sample_id] = classes.numbers(absent, f"{where}: negatives")
        if both := set(positives[sample_id]) & set(negatives[sample_id]):
            named = index.class_names[min(both)]
            raise BadFile(f"{where}: class {named!r} is positive and negative. Remove it from one of them.")
    if unknown_keys:
        raise BadFile(
            f"{path}: {len(unknown_keys)} of {len(rows)} keys are not in the shards: "
            f"{first_few(map(printable, unknown_keys), len(unknown_keys), most=3)}. Keys there look like "
            f"{printable(index.key(int(index.ids()[0])))!r}."
        )
    if not rows:
        raise BadFile(f"{path}: no lines with labels")
    return FileLabels(positives, negatives, frozenset(complete))


SEVERAL = -1


def ids_by_key(index: Index, wanted: Collection[str] | None = None) -> dict[str, int]:
    """Return the id of each key and of each `shard/key`; SEVERAL for a key of several samples.

    With `wanted`, only of those: a million keys are not kept for a few.
    """
    names: dict[str, int] = {}
    keys: dict[str, int] = {}
    for sample_id in index.ids().tolist():
        name, key = index.name(sample_id), index.key(sample_id)
        if wanted is None or name in wanted:
            names[name] = sample_id
        if wanted is None or key in wanted:
            keys[key] = SEVERAL if key in keys else sample_id
    return names | keys


def _first(index: Index, key: str) -> int:
    return next(int(sample_id) for sample_id in index.ids() if index.key(int(sample_id)) == key)


def _listed(value: Any, where: str, column: str) -> list[Any]:
    """Return a cell as a list of classes."""
    if value is None:
        return []
    if isinstance(value, str):
        return [part.strip() for part in value.split(SEPARATOR) if part.strip()]
    if isinstance(value, int) and not isinstance(value, bool):
        return [value]
    if not isinstance(value, list):
        raise BadFile(f"{where}: {column} is {value!r:.40}, expected class names or numbers")
    return value


class _Classes:
    """Numbers of classes by name or number."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._numbers = {name: number for number, name in enumerate(names)}

    def knows(self, name: str) -> bool:
        return name in self._numbers

    def numbers(self, values: Sequence[Any], where: str) -> list[int]:
        return sorted({self._number(value, where) for value in values})

    def _number(self, value: Any, where: str) -> int:
        if isinstance(value, str) and value in self._numbers:
            return self._numbers[value]
        text = str(value)
        number = int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else -1
        if isinstance(value, str | int) and not isinstance(value, bool) and 0 <= number < len(self._names):
            return number
        raise BadFile(
            f"{where}: unknown class {value!r:.60}, expected one of {len(self._names)} names, as "
            f"{self._names[0]!r}, or a number of 0 to {len(self._names) - 1}"
        )


# Into the index


def replaced_rows(rows: Ragged, changed: Mapping[int, Sequence[int]]) -> Ragged:
    """Return the rows with some of them replaced."""
    ids: NDArray[np.int64] = np.array(sorted(changed), np.int64)
    lengths = rows.lengths.copy()
    stays = np.ones(len(rows), bool)
    stays[ids] = False
    kept = rows.values[np.repeat(stays, lengths)]
    lengths[ids] = [len(changed[sample_id]) for sample_id in ids.tolist()]
    values = np.empty(int(lengths.sum()), np.uint32)
    own = np.repeat(stays, lengths)
    values[own] = kept
    values[~own] = [label for sample_id in ids.tolist() for label in changed[sample_id]]
    return Ragged.from_lengths(lengths, values)


def _rest(kept: int) -> str:
    return f"; {kept} keep the labels of the shards" if kept else ""


# ReaL labels of ImageNet's validation images (Beyer et al., 2020), matched to images by their number

NUMBER = re.compile(r"ILSVRC2012_val_(\d{8})")
WNID = re.compile(r"n\d{8}")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RealLabels:
    """The ReaL labels of some predicted images."""

    labels: NDArray[np.int8]
    """[n,L]; a row without a 1 is an image that ReaL does not evaluate."""
    missing: tuple[str, ...]
    """Validation images that were not predicted, evaluated by ReaL or not."""
    num_images: int
    """The size of the whole validation set."""


def read_real_labels(path: Path) -> list[list[int]]:
    """Return the classes of each validation image: item i is of ILSVRC2012_val_{i+1}, and may be empty."""
    if not path.is_file():
        raise FileNotFoundError(
            f"{path}: no such file. It is real.json of google-research/reassessed-imagenet."
        )
    with parse_errors(path, "JSON", "Download it again."):
        lists = json.loads(path.read_text())
    if not isinstance(lists, list) or not all(isinstance(own, list) for own in lists):
        raise BadFile(f"{path}: expected a list with a list of classes for each validation image")
    wrong = (label for own in lists for label in own if type(label) is not int or label < 0)
    if (label := next(wrong, None)) is not None or any(None in own for own in lists):
        raise BadFile(f"{path}: found the class {reprlib.repr(label)}, expected numbers from 0 on")
    return lists


def match_real_labels(
    real_labels: Sequence[Sequence[int]], keys: Sequence[str], class_names: Sequence[str]
) -> RealLabels:
    """Return the labels of images by the ILSVRC2012_val number in their keys, never by order."""
    _check_classes(real_labels, class_names)
    numbers = image_numbers(keys)
    if (largest := max(numbers, default=0)) > len(real_labels):
        raise UserError(f"{image_name(largest)}: predicted, but ReaL has {len(real_labels)} images only")
    labels = np.zeros((len(keys), len(class_names)), np.int8)
    for row, number in zip(labels, numbers, strict=True):
        row[list(real_labels[number - 1])] = 1
    missing = sorted(set(range(1, len(real_labels) + 1)) - set(numbers))
    return RealLabels(
        labels=labels, missing=tuple(image_name(number) for number in missing), num_images=len(real_labels)
    )


def image_numbers(keys: Sequence[str]) -> list[int]:
    """Return the number of each validation image from its key; each may occur once."""
    matches = [NUMBER.search(key) for key in keys]
    strange = [key for key, match in zip(keys, matches, strict=True) if match is None]
    if strange:
        raise UserError(
            f"{len(strange)} of {len(keys)} keys name no ILSVRC2012_val image, as {strange[0]!r}; expected "
            f"ILSVRC2012_val_ and eight digits somewhere in each: ReaL labels are matched by that number."
        )
    numbers = [int(match[1]) for match in matches if match is not None]
    twice = [number for number, count in Counter(numbers).items() if count > 1]
    if twice:
        names = ", ".join(image_name(number) for number in twice[:3])
        raise UserError(f"{len(twice)} images were predicted more than once: {names}. Give each image once.")
    return numbers


def image_name(number: int) -> str:
    """Return the name of a validation image, without its extension."""
    return f"ILSVRC2012_val_{number:08d}"


def _check_classes(real_labels: Sequence[Sequence[int]], class_names: Sequence[str]) -> None:
    largest = max((label for own in real_labels for label in own), default=-1)
    if largest >= len(class_names):
        raise UserError(f"ReaL has class {largest}, the predictions have only {len(class_names)} classes")
    wnids = [name.split()[0] for name in class_names if WNID.match(name)]
    if len(wnids) == len(class_names) and wnids != sorted(wnids):
        position = next(
            n for n, (name, other) in enumerate(zip(wnids, sorted(wnids), strict=True)) if name != other
        )
        raise UserError(
            f"class {position} is {wnids[position]}; ReaL counts classes by sorted wnid, where it is "
            f"{sorted(wnids)[position]}. Index the shards with the classes in that order."
        )
