"""Pictures of a run's tracked samples with their current heatmaps."""

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from bigscl.data.index import Index
from bigscl.data.reader import read_images, read_metadata
from bigscl.plots.samples import Kind, SamplePicture, boxes_by_class, draw_samples, kinds_of, panels_of
from bigscl.selection.selection import Selection
from bigscl.store import HeatmapStore

PANELS = 5


def draw_epoch(
    store: HeatmapStore, index: Index, selection: Selection, path: Path, count: int, title: str = ""
) -> None:
    """Draw the first `count` tracked samples with the heatmaps of some of their classes."""
    ids = np.array(store.spec.tracked[:count], np.int64)
    rows = store.read_evidence(ids)
    images, metadata = read_images(index, ids), read_metadata(index, ids)
    kinds = _kinds(index, ids, rows.scores, selection)
    samples = [
        SamplePicture(
            image=images[int(n)].numpy(),
            title=index.key(int(n)),
            panels=panels_of(
                rows.take(slice(place, place + 1)),
                index.class_names,
                kinds=kinds[place],
                boxes=boxes_by_class(metadata[int(n)].get("boxes", [])),
                count=PANELS,
            ),
        )
        for place, n in enumerate(ids)
    ]
    draw_samples(samples, path, title=title or f"the first {len(ids)} tracked samples, evenly over the set")


def _kinds(
    index: Index, ids: NDArray[np.int64], scores: NDArray[np.float16], selection: Selection
) -> list[list[Kind]]:
    """Return the kinds of all classes in each sample, by the full labels or by what is expected."""
    observed = index.labels_of(ids)
    if index.labels is not None:
        present = index.labels_of(ids, "labels") == 1
        return [kinds_of(observed[n] == 1, present=present[n]) for n in range(len(ids))]
    expected = selection.to("cpu").expected(torch.from_numpy(scores), torch.from_numpy(ids)).numpy()
    return [
        kinds_of(observed[n] == 1, expected=expected[n], negatives=observed[n] == 0) for n in range(len(ids))
    ]
