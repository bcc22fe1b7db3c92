"""The labels that training sees: those of shards or of a file, drawn ones, and then answers of people."""

from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bigscl.data.answered import match_answers, with_answered
from bigscl.data.answers import Answers, AnswersFile
from bigscl.data.index import Index, Labels
from bigscl.data.labels_file import with_training_labels
from bigscl.data.observed import ObservedConfig
from bigscl.store import Annotations, Answered, SingleProcess, Transport, label_counts, on_rank_zero


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainingLabels:
    """Samples with the labels that training sees."""

    index: Index
    labels: Labels
    """Which labels of the index are the annotated ones."""
    labelled: Index
    """The same samples without answers of people: a store is created for these."""
    answers: Answers
    """What people said."""
    answered: Answered
    """The same by rows and classes."""
    annotations: Annotations
    """The annotated positives, answers among them."""

    def counts(self) -> NDArray[np.int64]:
        """Return how many labels each class has, without what only answers named, [L]: K counts these."""
        return label_counts(self.annotations, self.answered)


def with_given_labels(index: Index, labels_file: Path | None, drawn: ObservedConfig | None) -> Index:
    """Return the samples with the labels of a file, and observed ones drawn from the full ones."""
    if labels_file is not None:
        index = with_training_labels(index, labels_file)
    return index if drawn is None else index.draw_observed(**asdict(drawn))


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
