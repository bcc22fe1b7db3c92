"""Answers of people in the labels of an index: yes is an observed positive, no a known negative."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from bigscl.common.files import BadFile
from bigscl.common.text import first_few, printable
from bigscl.data.answers import Answers, moment
from bigscl.data.index import Index
from bigscl.data.labels_file import SEVERAL, ids_by_key, replaced_rows
from bigscl.store import Answered


def match_answers(index: Index, answers: Answers, path: Path) -> Answered:
    """Return the answers by row and class, withdrawn ones too; BadFile for what the index does not have."""
    ids = ids_by_key(index, {key for key, _ in answers.asked})
    numbers = {name: number for number, name in enumerate(index.class_names)}
    unknown = sorted({key for key, _ in answers.asked if ids.get(key, SEVERAL) == SEVERAL})
    if unknown:
        first = int(index.ids()[0])
        raise BadFile(
            f"{path}: {len(unknown)} keys are not in the shards, or in several of them: "
            f"{first_few(unknown, len(unknown), most=3)}. Expected keys as "
            f"{printable(index.key(first))!r}, or shard/key as {index.name(first)!r}."
        )
    for key, name in answers.asked:
        if name not in numbers:
            raise BadFile(
                f"{path}: key {printable(key)!r}: unknown class {printable(name[:60])!r}, expected one of "
                f"{index.num_classes} names, as {index.class_names[0]!r}"
            )
    says = {(ids[key], numbers[name]): -1 for key, name in answers.asked}
    # A key, and the same as shard/key, are one image: the later counts.
    for one in sorted(answers.standing.values(), key=lambda one: moment(one.when)):
        says[ids[one.key], numbers[one.class_name]] = int(bool(one.yes))
    pairs = np.array(list(says), np.int64).reshape(-1, 2)
    named = index.annotations("observed").includes(pairs[:, 0], pairs[:, 1])
    return Answered.of(pairs[:, 0], pairs[:, 1], list(says.values()), named=named)


def with_answered(index: Index, answered: Answered) -> Index:
    """Return the index with the answers in its observed labels and known negatives.

    It keeps its fingerprint: a store is made for the labels without answers, and its snapshots say which
    answers they know of.
    """
    positives = {int(row): set(index.observed[row].tolist()) for row in np.unique(answered.rows)}
    negatives = {row: set(index.negatives[row].tolist()) for row in positives}
    lists = (one.tolist() for one in (answered.rows, answered.classes, answered.says))
    for row, number, says in zip(*lists, strict=True):
        if says >= 0:
            to, of = (positives, negatives) if says else (negatives, positives)
            to[row].add(number)
            of[row].discard(number)
    return replace(
        index,
        observed=replaced_rows(index.observed, {row: sorted(own) for row, own in positives.items()}),
        negatives=replaced_rows(index.negatives, {row: sorted(own) for row, own in negatives.items()}),
    )
