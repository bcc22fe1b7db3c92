"""Labels from a file beside the shards: a table, ReaL's list of lists, or MultiLabel-ImageNet's lines.

A table (CSV, JSON lines, Parquet) has a line for each image: `key`, `positives` and maybe `negatives`.
Classes are names or numbers (a name comes first); in CSV and in text columns they are separated by `;`. `*`
as the only negative says that all classes but the positives are absent. A key is that of the sample in its
shard, or `shard/key` where several shards have the same key.

MultiLabel-ImageNet (.txt, .tsv) has a line for each image, with tabs between `wnid/file`, the given class,
the positives and their scores; numbers are separated by commas. Classes that are not positives are absent.
The image is the one with that path without its suffix as key, else with the name of the file.
"""

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bigscl.common.files import BadFile, ClassNumbers, Row, parse_errors, read_table
from bigscl.common.text import first_few, printable
from bigscl.common.user_error import UserError
from bigscl.data.index import Index, with_fingerprint
from bigscl.data.labels.real_labels import match_real_labels, read_real_labels
from bigscl.store import Ragged

logger = logging.getLogger(__name__)

COLUMNS = ("key", "positives", "negatives")
OTHER_COLUMNS = ("path",)
"""For people: exported labels have them."""
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
    rest = f"; {kept} keep the labels of the shards" if kept else ""
    logger.info("%s: labels of %d of %d training images%s", path, len(own.positives), len(ids), rest)
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
    if path.suffix not in SUFFIXES:
        raise UserError(f"{path}: labels are read from {', '.join([*SUFFIXES, '.json (ReaL)'])}")
    if path.suffix in IMAGE_LINES:
        with parse_errors(path, "labels of images", EXPECTED_LINES):
            rows = list(_image_lines(path))
    else:
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


def _image_lines(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            fields = line.rstrip("\r\n").split("\t")
            if len(fields) != IMAGE_FIELDS:
                raise UserError(
                    f"line {number} has {len(fields)} fields between tabs, expected {IMAGE_FIELDS}"
                )
            file_name, _, positives, scores = fields
            classes = [int(each) for each in positives.split(",") if each]
            if len(classes) != sum(1 for each in scores.split(",") if each):
                raise UserError(f"line {number} has {len(classes)} classes and another number of scores")
            folder, slash, name = file_name.rpartition("/")
            # As in a tar: a key ends at the first dot of the file's name.
            yield {
                "key": folder + slash + name.partition(".")[0],
                "positives": classes,
                "negatives": ALL_OTHERS,
            }


IMAGE_LINES = (".txt", ".tsv")
"""Suffixes of MultiLabel-ImageNet's files. Their keys are paths of images: the last part may be the key."""
SUFFIXES = (".csv", ".jsonl", ".parquet", *IMAGE_LINES)
IMAGE_FIELDS = 4
EXPECTED_LINES = "Expected lines of path, given class, positives and their scores, between tabs."


def _check_columns(found: list[str]) -> None:
    missing = [name for name in COLUMNS[:2] if name not in found]
    unknown = [name for name in found if name not in (*COLUMNS, *OTHER_COLUMNS)]
    if missing or unknown:
        what = f"no {missing[0]!r}" if missing else f"an unknown {unknown[0]!r}"
        raise UserError(f"found {what} in {found}, expected {', '.join(COLUMNS)}")


def _matched(path: Path, rows: Sequence[Row], index: Index) -> FileLabels:
    ids, classes = ids_by_key(index), ClassNumbers(index.class_names)
    positives: dict[int, list[int]] = {}
    negatives: dict[int, list[int]] = {}
    complete: set[int] = set()
    unknown_keys: list[str] = []
    for row in rows:
        key = str(row["key"])
        sample_id = ids.get(key)
        if sample_id is None and path.suffix in IMAGE_LINES:
            sample_id = ids.get(key.rpartition("/")[2])
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
        if absent == [ALL_OTHERS] and ALL_OTHERS not in classes:
            complete.add(sample_id)
            absent = []
        positives[sample_id] = sorted({classes.of(value, f"{where}: positives") for value in own})
        negatives[sample_id] = sorted({classes.of(value, f"{where}: negatives") for value in absent})
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
    if value is None:
        return []
    if isinstance(value, str):
        return [part.strip() for part in value.split(SEPARATOR) if part.strip()]
    if isinstance(value, int) and not isinstance(value, bool):
        return [value]
    if not isinstance(value, list):
        raise BadFile(f"{where}: {column} is {value!r:.40}, expected class names or numbers")
    return value


# Into the index


def replaced_rows(rows: Ragged, changed: Mapping[int, Sequence[int]]) -> Ragged:
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
