"""Pictures of the same training images with the heatmaps of several runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bigscl.config import Config
from bigscl.data.index import Index
from bigscl.data.reader import read_images, read_metadata
from bigscl.plots.samples import (
    MEANINGS,
    Kind,
    SamplePicture,
    boxes_by_class,
    draw_samples,
    kinds_of,
    panel_of,
)
from bigscl.store import Rows
from bigscl.training.run_folder import open_data, read_store

KINDS: tuple[Kind, ...] = ("annotated", "unannotated", "negative")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoredSample:
    """The stored rows of one image in a run, and its annotated classes."""

    rows: Rows
    annotated: NDArray[np.bool_]
    """[L], by the labels that the run trains on."""


def draw_runs(
    runs: Mapping[str, Config], path: Path, *, kinds: Sequence[Kind] = KINDS, count: int = 4
) -> None:
    """Draw `count` training images that have an unannotated positive, one line for each kind of class.

    All runs use the same shards and keep their heatmaps on disk. The first run's labels decide which classes
    are annotated; of several classes, that with the highest mean score over the runs is shown.
    """
    index = open_data(next(iter(runs.values()))).train
    ids = _with_missing(index, count)
    images, metadata = read_images(index, ids), read_metadata(index, ids)
    stored = {name: _stored_samples(config, ids) for name, config in runs.items()}
    present = index.labels_of(ids, "labels") == 1
    samples = []
    for place, sample_id in enumerate(ids.tolist()):
        held = {name: samples[place] for name, samples in stored.items()}
        boxes = boxes_by_class(metadata[sample_id].get("boxes", []))
        for kind, number in _shown(held, present[place], kinds):
            panels = [
                replace(
                    panel_of(
                        own.rows,
                        number,
                        index.class_names,
                        kinds_of(own.annotated, present=present[place]),
                        boxes,
                    ),
                    name=f"{name}: {index.class_names[number]}",
                )
                for name, own in held.items()
            ]
            title = f"{index.class_names[number]}: {MEANINGS[kind]}"
            samples.append(SamplePicture(image=images[sample_id].numpy(), title=title, panels=panels))
    draw_samples(
        samples,
        path,
        title=f"{len(ids)} training images with an unannotated positive, evenly over the set",
    )


def _with_missing(index: Index, count: int) -> NDArray[np.int64]:
    """Return images spread over the set that have an unannotated positive; any images if none has one."""
    ids = index.ids()
    missing = ((index.labels_of(ids, "labels") == 1) & (index.labels_of(ids) != 1)).any(1)
    candidates = ids[missing] if missing.any() else ids
    return candidates[:: max(1, len(candidates) // count)][:count]


def _stored_samples(config: Config, ids: NDArray[np.int64]) -> list[StoredSample]:
    """Return the stored rows of each of these images in a run."""
    data = open_data(config)
    annotated = data.train.labels_of(ids, config.data.labels) == 1
    with read_store(config, data.labelled) as store:
        rows = store.read_evidence(ids)
    return [StoredSample(rows=rows.take(slice(n, n + 1)), annotated=annotated[n]) for n in range(len(ids))]


def _shown(
    held: Mapping[str, StoredSample], present: NDArray[np.bool_], kinds: Sequence[Kind]
) -> list[tuple[Kind, int]]:
    """Return a class of each kind, if the image has one."""
    annotated = next(iter(held.values())).annotated
    scores = np.mean([own.rows.scores[0].astype(np.float64) for own in held.values()], axis=0)
    masks = {"annotated": annotated, "unannotated": present & ~annotated, "negative": ~present & ~annotated}
    return [(kind, int(np.where(masks[kind], scores, -1.0).argmax())) for kind in kinds if masks[kind].any()]
