"""Samples of a store as pictures: their images, and the heatmaps of some classes beside or over epochs."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from bigscl.common.user_error import UserError
from bigscl.data.open_tar import Unreadable
from bigscl.data.read_samples import read_images, read_metadata
from bigscl.evaluation.sample_plots import (
    Panel,
    SamplePicture,
    boxes_by_class,
    classes_to_show,
    kinds_of,
    panel_of,
)
from bigscl.store import HeatmapStore, Rows
from bigscl.tools.shared.open_store import Data
from bigscl.tools.shared.shard_passes import SnapshotThresholds

MAX_EPOCHS = 8


class SampleImages:
    """Pixels, labels and boxes of each sample of a picture, from the shards."""

    def __init__(
        self, store: HeatmapStore, data: Data, ids: NDArray[np.int64], expected: SnapshotThresholds | None
    ) -> None:
        try:
            self.images = read_images(data.index, ids)
            metadata = read_metadata(data.index, ids)
        except Unreadable as error:
            raise UserError(f"{error}. Choose other samples, or write the shards again.") from error
        self.boxes = {sample: boxes_by_class(fields.get("boxes", [])) for sample, fields in metadata.items()}
        self.names = data.index.class_names
        annotated, present = data.annotated(ids), data.present(ids)
        if present is not None:
            kinds = [kinds_of(annotated[n], present=present[n]) for n in range(len(ids))]
        else:
            assert expected is not None
            selected = expected.expected(store.read(ids).ranked_by(), ids)
            negatives = data.index.labels_of(ids) == 0
            kinds = [
                kinds_of(annotated[n], expected=selected[n], negatives=negatives[n]) for n in range(len(ids))
            ]
        self.kinds = kinds
        """The kinds of all classes in each sample."""

    def picture(self, sample: int, title: str, panels: Sequence[Panel]) -> SamplePicture:
        return SamplePicture(image=self.images[sample].numpy(), title=title, panels=panels)


def side_by_side(
    stores: Sequence[HeatmapStore], images: SampleImages, data: Data, ids: NDArray[np.int64], count: int
) -> list[SamplePicture]:
    """Return one picture per sample and store, with the classes that are strongest in the first store."""
    memories = [_memory(store, ids) for store in stores]
    pictures = []
    for row, sample in enumerate(ids.tolist()):
        first = memories[0].take(slice(row, row + 1))
        kinds = images.kinds[row]
        classes = classes_to_show(first, kinds, count)
        for store, memory in zip(stores, memories, strict=True):
            rows = memory.take(slice(row, row + 1))
            panels = [panel_of(rows, number, images.names, kinds, images.boxes[sample]) for number in classes]
            title = data.index.name(sample)
            title += f"   {store.backend.url}" if len(stores) > 1 else ""
            pictures.append(images.picture(sample, title, panels))
    return pictures


def _memory(store: HeatmapStore, ids: NDArray[np.int64]) -> Rows:
    """Return the rows of samples with scores and heatmaps without their initial values."""
    rows = store.read_without_initial_value(ids)
    return rows.with_scores(store.scores_without_initial_value(rows, ids).astype(np.float16))


def over_epochs(
    stores: Sequence[HeatmapStore], images: SampleImages, data: Data, ids: NDArray[np.int64], count: int
) -> list[SamplePicture]:
    """Return one picture per sample and class, with its heatmap in each epoch."""
    store = stores[0]
    pictures: list[SamplePicture] = []
    for row, sample in enumerate(ids.tolist()):
        history = {epoch: rows for epoch, rows in store.history(sample).items() if rows.heatmaps is not None}
        if not history:
            raise UserError(
                f"{data.index.name(sample)}: no heatmaps of earlier epochs. Tracked samples have them: "
                f"{', '.join(data.index.key(one) for one in store.spec.history_samples[:8])} ..."
            )
        pictures += _epochs_of(images, row, sample, history, count, data.index.name(sample))
    return pictures


def _epochs_of(
    images: SampleImages, row: int, sample: int, history: dict[int, Rows], count: int, name: str
) -> Iterator[SamplePicture]:
    last = history[max(history)]
    kinds = images.kinds[row]
    shown = [sorted(history)[n] for n in np.unique(np.linspace(0, len(history) - 1, MAX_EPOCHS).astype(int))]
    for number in classes_to_show(last, kinds, count, reserve=False):
        panels = [
            replace(
                panel_of(history[epoch], number, images.names, kinds, images.boxes[sample]),
                name=f"e{epoch} {images.names[number]}",
            )
            for epoch in shown
        ]
        yield images.picture(sample, f"{name}: {images.names[number]}", panels)
