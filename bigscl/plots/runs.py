"""The same images in the memories of several runs: what each of them remembers of a class that is there."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bigscl.config import Config
from bigscl.data.index import Index
from bigscl.data.reader import read_images, read_metadata
from bigscl.plots.epochs import boxes_by_class
from bigscl.plots.samples import MEANINGS, Kind, SamplePicture, draw_samples, panel_of
from bigscl.store import Rows
from bigscl.training.run import open_data, read_store

KINDS: tuple[Kind, ...] = ("annotated", "unannotated", "negative")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Held:
    """What a run remembers of one image."""

    rows: Rows
    annotated: NDArray[np.bool_]
    """[L], what the run's labels say of it."""


def draw_side_by_side(
    runs: Mapping[str, Config], path: Path, *, kinds: Sequence[Kind] = KINDS, count: int = 4
) -> None:
    """Draw `count` training images that have a positive without a label, a line for each kind of class.

    All runs are on the same shards and keep heatmaps on disk. What is annotated, and what is not, is told by
    the first run's labels; of several classes, that of the highest mean score over the runs is shown.
    """
    index = open_data(next(iter(runs.values()))).train
    ids = _with_missing(index, count)
    images, metadata = read_images(index, ids), read_metadata(index, ids)
    memories = {name: _remembered(config, ids) for name, config in runs.items()}
    present = index.labels_of(ids, "labels") == 1
    samples = []
    for place, sample_id in enumerate(ids.tolist()):
        held = {name: memory[place] for name, memory in memories.items()}
        boxes = boxes_by_class(metadata[sample_id].get("boxes", []))
        for kind, number in _shown(held, present[place], kinds):
            panels = [
                replace(
                    panel_of(own.rows, number, index.class_names, own.annotated, present[place], boxes),
                    name=name,
                )
                for name, own in held.items()
            ]
            title = f"{index.class_names[number]}: {MEANINGS[kind]}"
            samples.append(SamplePicture(image=images[sample_id].numpy(), title=title, panels=panels))
    draw_samples(samples, path)


def _with_missing(index: Index, count: int) -> NDArray[np.int64]:
    """Images all over the set that have a positive which is not annotated; any images, if none has."""
    ids = index.ids()
    missing = ((index.labels_of(ids, "labels") == 1) & (index.labels_of(ids) != 1)).any(1)
    candidates = ids[missing] if missing.any() else ids
    return candidates[:: max(1, len(candidates) // count)][:count]


def _remembered(config: Config, ids: NDArray[np.int64]) -> list[Held]:
    """What a run remembers of each of these images."""
    data = open_data(config)
    annotated = data.train.labels_of(ids, config.data.labels) == 1
    with read_store(config, data.annotations) as store:
        rows = store.read(ids)
    return [Held(rows=rows.take(slice(n, n + 1)), annotated=annotated[n]) for n in range(len(ids))]


def _shown(
    held: Mapping[str, Held], present: NDArray[np.bool_], kinds: Sequence[Kind]
) -> list[tuple[Kind, int]]:
    """A class of each kind, where the image has one."""
    annotated = next(iter(held.values())).annotated
    scores = np.mean([own.rows.scores[0].astype(np.float64) for own in held.values()], axis=0)
    masks = {"annotated": annotated, "unannotated": present & ~annotated, "negative": ~present & ~annotated}
    return [(kind, int(np.where(masks[kind], scores, -1.0).argmax())) for kind in kinds if masks[kind].any()]
