"""The labels that training sees: those of shards or of a file, drawn ones, and then answers of people."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bigscl.common.bounds import Count, CountOrZero
from bigscl.common.files import BadFile
from bigscl.common.text import first_few, printable
from bigscl.data.answers import Answers, AnswersFile, moment
from bigscl.data.index import Index, Labels, with_fingerprint
from bigscl.data.labels.label_files import SEVERAL, ids_by_key, replaced_rows, with_training_labels
from bigscl.store import Annotations, Answered, Ragged, SingleProcess, Transport, label_counts, on_rank_zero

BLOCK = 4096
HIDING = 2
"""Stream of random numbers of hidden labels; 0 and 1 are those of drawn ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenConfig:
    """Given labels drawn from the full ones, in place of those in the shards."""

    seed: CountOrZero
    """Seed of the draw."""
    positives: Count = 1
    """Given positives per image; images with fewer keep all."""
    negatives: CountOrZero = 0
    """Given negatives per image."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainingLabels:
    """Samples with the labels that training sees."""

    index: Index
    labels: Labels
    """Which labels of the index are the annotated ones."""
    labelled: Index
    """The same samples without answers of people: a store is created for these."""
    answers: Answers
    """Answers of people."""
    answered: Answered
    """The same by rows and classes."""
    annotations: Annotations
    """The annotated positives, answers among them."""

    def counts(self) -> NDArray[np.int64]:
        """Return how many labels each class has, without what only answers named, [L]: K counts these.

        Labels that are hidden from training are among them.
        """
        return label_counts(self.annotations, self.answered) + hidden_counts(self.index)


def with_given_labels(
    index: Index, labels_file: Path | None, drawn: GivenConfig | None, canaries: float = 0.0
) -> Index:
    """Return the samples with the labels of a file, given ones drawn from the full ones, some hidden."""
    if labels_file is not None:
        index = with_training_labels(index, labels_file)
    if drawn is not None:
        index = draw_given(index, **asdict(drawn))
    return hide_given(index, canaries, 0 if drawn is None else drawn.seed) if canaries else index


def training_labels(
    labelled: Index, labels: Labels, answers: Path | None, ranks: Transport | None = None
) -> TrainingLabels:
    """Return samples with given labels and the answers in a file, which has none while it does not exist.

    If all `ranks` call it together, they have the same answers, even while people give more.
    """
    index, said, answered = labelled, Answers(standing={}), Answered.of()
    if answers is not None:
        data = on_rank_zero(
            ranks or SingleProcess(), lambda: answers.read_bytes() if answers.exists() else b""
        )
        said = AnswersFile(answers).take(data)
        answered = match_answers(labelled, said, answers)
        index = with_answered(labelled, answered)
    return TrainingLabels(
        index=index,
        labels=labels,
        labelled=labelled,
        answers=said,
        answered=answered,
        annotations=index.annotations(labels),
    )


def hidden_counts(index: Index) -> NDArray[np.int64]:
    """Return how many labels of each class are hidden from training, [L]."""
    hidden = () if index.hidden is None else index.hidden.values
    return np.bincount(np.asarray(hidden, np.int64), minlength=index.num_classes)


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
    for answer in sorted(answers.standing.values(), key=lambda answer: moment(answer.when)):
        says[ids[answer.key], numbers[answer.class_name]] = int(bool(answer.yes))
    pairs = np.array(list(says), np.int64).reshape(-1, 2)
    labelled = index.annotations("given").is_given(pairs[:, 0], pairs[:, 1])
    return Answered.of(pairs[:, 0], pairs[:, 1], list(says.values()), named=labelled)


def with_answered(index: Index, answered: Answered) -> Index:
    """Return the index with the answers in its given labels and known negatives.

    It keeps its fingerprint: a store is made for the labels without answers, and its snapshots say which
    answers they contain.
    """
    positives = {int(row): set(index.given[row].tolist()) for row in np.unique(answered.rows)}
    negatives = {row: set(index.negatives[row].tolist()) for row in positives}
    hidden = {row: set() if index.hidden is None else set(index.hidden[row].tolist()) for row in positives}
    lists = (array.tolist() for array in (answered.rows, answered.classes, answered.says))
    for row, number, says in zip(*lists, strict=True):
        if says >= 0:
            to, of = (positives, negatives) if says else (negatives, positives)
            to[row].add(number)
            of[row].discard(number)
            hidden[row].discard(number)
    return replace(
        index,
        hidden=None
        if index.hidden is None
        else replaced_rows(index.hidden, {row: sorted(own) for row, own in hidden.items()}),
        given=replaced_rows(index.given, {row: sorted(own) for row, own in positives.items()}),
        negatives=replaced_rows(index.negatives, {row: sorted(own) for row, own in negatives.items()}),
    )


# Drawn labels


def draw_given(index: Index, seed: int, positives: int = 1, negatives: int = 0) -> Index:
    """Return the same samples with other given labels, drawn uniformly from the full ones.

    A sample with fewer labels than requested keeps all of them.
    """
    full = index.full_labels()
    random = np.random.Generator(np.random.Philox(key=np.array([seed, 0], np.uint64)))
    kept = draw_positives(full, positives, random)
    absent = draw_negatives(full, index.ids(), negatives, index.num_classes, random)
    return with_fingerprint(replace(index, given=kept, negatives=absent))


def hide_given(index: Index, share: float, seed: int = 0) -> Index:
    """Return the same samples without one given label of a share of those that have any.

    Exactly `round(share * samples)` of them, drawn uniformly; `hidden` of the index has these labels.
    """
    random = np.random.Generator(np.random.Philox(key=np.array([seed, HIDING], np.uint64)))
    given = index.given
    able = np.flatnonzero(given.lengths > 0)
    rows = np.sort(random.permutation(able)[: round(share * len(able))])
    places = given.offsets[rows] + random.integers(0, given.lengths[rows])
    lengths = np.zeros(len(given), np.int64)
    lengths[rows] = 1
    kept = Ragged.from_lengths(given.lengths - lengths, np.delete(given.values, places))
    hidden = Ragged.from_lengths(lengths, given.values[places])
    return with_fingerprint(replace(index, given=kept, hidden=hidden))


def with_hidden(index: Index) -> Index:
    """Return the samples with all their given labels, also those that are hidden from training."""
    if index.hidden is None:
        return index
    return replace(index, given=_joined(index.given, index.hidden), hidden=None)


def _joined(rows: Ragged, other: Ragged) -> Ragged:
    """Return the values of both in each row, ascending."""
    owners = np.concatenate([np.repeat(np.arange(len(part)), part.lengths) for part in (rows, other)])
    values = np.concatenate([rows.values, other.values])
    order = np.lexsort((values, owners))
    return Ragged.from_lengths(rows.lengths + other.lengths, values[order])


def draw_positives(full: Ragged, count: int, random: np.random.Generator) -> Ragged:
    """Return at most `count` values of each row, ascending, drawn uniformly."""
    rows = np.repeat(np.arange(len(full)), full.lengths)
    order = np.lexsort((random.random(len(rows)), rows))
    turn_in_row = np.arange(len(rows)) - full.offsets[rows]
    kept = np.sort(order[turn_in_row < count])
    return Ragged.from_lengths(np.minimum(full.lengths, count), full.values[kept])


def draw_negatives(
    full: Ragged, ids: NDArray[np.int64], count: int, num_classes: int, random: np.random.Generator
) -> Ragged:
    """Return at most `count` classes that are not in each row of `ids`, drawn uniformly, ascending."""
    lengths = np.zeros(len(full), np.int64)
    drawn = [np.empty(0, full.values.dtype)]
    # In blocks, so that memory does not grow with the number of samples.
    for block in np.array_split(ids, -(-len(ids) // BLOCK)) if count else []:
        turns = random.random((len(block), num_classes))
        turns[full.entries(block)] = 2.0
        ranks = np.argsort(np.argsort(turns, axis=1), axis=1)
        chosen = (ranks < count) & (turns < 2.0)
        lengths[block] = chosen.sum(axis=1)
        drawn.append(np.nonzero(chosen)[1].astype(full.values.dtype))
    return Ragged.from_lengths(lengths, np.concatenate(drawn))
