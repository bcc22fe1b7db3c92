"""From heatmaps of all classes (or none yet) to those of the k strongest classes of each image."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from bigscl.common.user_error import UserError
from bigscl.store.format.annotations import Annotations
from bigscl.store.format.array_types import ARRAYS, Compaction
from bigscl.store.format.layout import choose_classes
from bigscl.store.format.spec import GENERATIONS, Array, Codec, GroupSpec, Rows, StoreSpec


def check_top(annotations: Annotations, top: int, name: str = "top") -> None:
    """Refuse a number of kept classes that would lose given labels."""
    if not 1 <= top <= annotations.num_classes:
        raise UserError(f"{name}: {top}, expected 1 to {annotations.num_classes}, the number of classes")
    most = int(annotations.given.lengths.max(initial=0))
    if most > top:
        row = int(annotations.given.lengths.argmax())
        raise UserError(
            f"{name}: {top} would lose given labels: sample {row} has {most}. Choose at least {most}."
        )


def compacted_group(
    old: GroupSpec, generation: int, top: int, slots: int | None, codec: Codec | None
) -> GroupSpec:
    """The array group that a writer's compaction makes; slots and codec stay as they are by default."""
    if old.top is not None and top > old.top:
        raise UserError(f"top: {top}, but only {old.top} classes per image are there")
    return replace(
        rewritten_group(old, generation),
        layout="topk",
        top=top,
        slots=slots or old.slots,
        codec=codec or old.codec,
    )


def rewritten_group(old: GroupSpec, generation: int) -> GroupSpec:
    """The array group in which a writer rewrites all rows of another."""
    # A number that no other writer chooses, even one that was frozen in a rewriting of its own.
    return replace(
        old, name=f"arrays-{int(old.name.split('-')[1]) + generation:03d}", generations=GENERATIONS
    )


def compact_rows(rows: Rows, given: NDArray[np.bool_], spec: StoreSpec, group: GroupSpec) -> Rows:
    """The same rows in the layout of `group`, with heatmaps of the `top` highest-scoring classes of each row.

    Given labels are always kept. Rows with heatmaps of some classes keep the strongest of those.
    """
    assert group.top is not None
    # The classes to choose from: those with a heatmap so far, or those whose scores are kept.
    choice = rows.get("score_classes") if rows.classes is None else rows.classes
    scores, among = rows.scores, given
    if choice is not None:
        scores, among = (np.take_along_axis(array, choice.astype(np.int64), 1) for array in (scores, given))
    classes: Array = choose_classes(scores, among, group.top)
    if choice is not None:
        classes = np.take_along_axis(choice, classes, 1)
    compaction = Compaction(
        rows=rows,
        given=given,
        classes=classes,
        heatmap_size=spec.heatmap_size,
        debiased=group.debiased,
    )
    arrays = [array for array in ARRAYS.values() if array.exists(spec, group)]
    return Rows(spec.num_classes, **{array.name: array.compacted(compaction) for array in arrays})
