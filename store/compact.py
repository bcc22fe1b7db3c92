"""From heatmaps of all classes (or none yet) to those of the k strongest classes of each image."""

import numpy as np
from numpy.typing import NDArray

from bigscl.store.annotations import Annotations
from bigscl.store.layout import MAX_COUNT, choose_classes, class_dtype
from bigscl.store.spec import Array, Rows


def check_top(annotations: Annotations, top: int) -> None:
    """Refuse a k that would lose annotated positives."""
    if not 1 <= top <= annotations.num_classes:
        raise ValueError(f"top: {top}, expected 1 to {annotations.num_classes}, the number of classes")
    most = int(np.diff(annotations.offsets).max(initial=0))
    if most > top:
        row = int(np.diff(annotations.offsets).argmax())
        raise ValueError(
            f"top: {top} would lose annotated positives: sample {row} has {most}. Choose at least {most}."
        )


def compact_rows(rows: Rows, annotated: NDArray[np.bool_], top: int, heatmap_size: int) -> Rows:
    """The same rows with heatmaps of their `top` highest-scoring classes, annotated positives always kept.

    Rows without heatmaps start them at the score everywhere, 1 for annotated classes. Rows with heatmaps of
    some classes keep the strongest of those.
    """
    if rows.heatmaps is None:
        return _from_scores(rows, annotated, top, heatmap_size)
    scores = rows.scores
    if rows.classes is not None:
        scores, annotated = (np.take_along_axis(array, rows.classes, 1) for array in (scores, annotated))
    columns = choose_classes(scores, annotated, top)
    classes = columns if rows.classes is None else np.take_along_axis(rows.classes, columns, 1)
    heatmaps = np.take_along_axis(rows.heatmaps, columns[:, :, None, None], axis=1)
    return _topk(rows, classes, heatmaps, rows.counts)


def _from_scores(rows: Rows, annotated: NDArray[np.bool_], top: int, size: int) -> Rows:
    classes = choose_classes(rows.scores, annotated, top)
    start = np.take_along_axis(rows.scores, classes, 1)
    start[np.take_along_axis(annotated, classes, 1)] = 1
    heatmaps = np.broadcast_to(start[:, :, None, None], (*classes.shape, size, size))
    # Every epoch up to the last visit counts as one look at the whole image.
    visits = np.clip(rows.visited + 1, 0, MAX_COUNT).astype(np.uint8)
    counts = np.broadcast_to(visits[:, None, None], (len(rows), size, size))
    return _topk(rows, classes, heatmaps, counts)


def _topk(rows: Rows, classes: Array, heatmaps: Array, counts: Array | None) -> Rows:
    return Rows(
        scores=rows.scores,
        visited=rows.visited,
        heatmaps=np.ascontiguousarray(heatmaps),
        classes=classes.astype(class_dtype(rows.scores.shape[1])),
        counts=None if counts is None else np.ascontiguousarray(counts),
    )
