"""Pictures of a run's tracked samples with their current heatmaps."""

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from bigscl.data.index import Index
from bigscl.data.reader import read_images, read_metadata
from bigscl.method.selection import Selection
from bigscl.plots.samples import Box, SamplePicture, draw_samples, panels_of
from bigscl.store import HeatmapStore

PANELS = 5


def draw_epoch(
    store: HeatmapStore, index: Index, selection: Selection, path: Path, count: int, title: str = ""
) -> None:
    """Draw the first `count` tracked samples with the heatmaps of some of their classes."""
    ids = np.array(store.spec.tracked[:count], np.int64)
    rows = store.read(ids)
    images, metadata = read_images(index, ids), read_metadata(index, ids)
    annotated = index.labels_of(ids) == 1
    present = _present(index, ids, annotated, rows.scores, selection)
    samples = [
        SamplePicture(
            image=images[int(n)].numpy(),
            title=index.key(int(n)),
            panels=panels_of(
                rows.take(slice(place, place + 1)),
                index.class_names,
                annotated=annotated[place],
                present=present[place],
                boxes=boxes_by_class(metadata[int(n)].get("boxes", [])),
                count=PANELS,
            ),
        )
        for place, n in enumerate(ids)
    ]
    draw_samples(samples, path, title=title)


def _present(
    index: Index,
    ids: NDArray[np.int64],
    annotated: NDArray[np.bool_],
    scores: NDArray[np.float16],
    selection: Selection,
) -> NDArray[np.bool_]:
    """Return which classes are present by the full labels; without them, by what is expected."""
    if index.labels is not None:
        return np.asarray(index.labels_of(ids, "labels") == 1)
    expected = selection.to("cpu").expected(torch.from_numpy(scores), torch.from_numpy(ids))
    return np.asarray(annotated | expected.numpy())


def boxes_by_class(boxes: list[list[float]]) -> dict[int, list[Box]]:
    """Return the boxes (x0, y0, x1, y1) of each class, from rows of a class and its box."""
    found: dict[int, list[Box]] = {}
    for number, x0, y0, x1, y1 in boxes:
        found.setdefault(int(number), []).append((x0, y0, x1, y1))
    return found
