"""Localization: pointing game and energy in boxes, for stored heatmaps and for a network's maps.

Every pair of an image and a class with boxes is one trial, in the frame of the whole image. `given` pairs
are positives that training sees, `missing` pairs are positives that it does not see.
"""

# Shapes: p pairs of image and class, n heatmaps, m boxes, W side of the heatmaps.

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bigscl.common.user_error import UserError
from bigscl.data.index import Index
from bigscl.data.read_samples import read_metadata
from bigscl.evaluation.inference import Arrays, NetworkBatch, concatenate
from bigscl.memory.heatmaps import to_image
from bigscl.store import HeatmapStore, Rows

STORED = "stored heatmaps of training images"
NETWORK = "network maps"
"""Sources of heat, by their names in reports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pointing:
    """Figures over pairs of image and class, as fractions; NaN if there are no pairs."""

    num_pairs: int
    hit_rate: float
    """Fraction whose heatmap is hottest inside a box of the class; a flat heatmap scores chance."""
    energy: float
    """Mean fraction of the heat inside boxes of the class, over the heatmaps with any heat."""
    chance: float
    """Mean fraction of the image that those boxes cover: the score of a flat heatmap."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Objects:
    """The boxes of some images, grouped by pairs of image and class."""

    ids: NDArray[np.int64]
    """[p], the image of each pair, ascending."""
    classes: NDArray[np.int64]
    """[p]."""
    boxes: NDArray[np.float64]
    """[m,4]: x0, y0, x1, y1 in 0 to 1."""
    owners: NDArray[np.int64]
    """[m]: the pair that each box belongs to, ascending."""

    def of(self, ids: NDArray[np.int64]) -> "Objects":
        kept = np.isin(self.ids, ids)
        boxes = kept[self.owners]
        return Objects(
            ids=self.ids[kept],
            classes=self.classes[kept],
            boxes=self.boxes[boxes],
            owners=(np.cumsum(kept) - 1)[self.owners[boxes]],
        )


def pointing(store: HeatmapStore, index: Index) -> dict[str, Pointing]:
    """Return figures of the stored heatmaps of all images: `given`, `missing` and `all` pairs.

    Heat is what was seen since the start of the heatmaps. A class whose heatmap is not among an image's top
    classes has none there.
    """
    objects = read_objects(index, index.ids())
    trials = concatenate(
        _trials(_stored_heatmaps(store.read_without_initial_value(part), part, own), own)
        for part in _by_shard(np.unique(objects.ids), index.rows_per_shard)
        for own in [objects.of(part)]
    )
    return summarize(trials, index)


def map_trials(objects: Objects, batch: NetworkBatch, logit_map: Tensor) -> Arrays:
    """Return the trials of a batch by the network's score maps, for `summarize`; a `measure` of `predict`.

    Maps are put back into the image at twice their side, as heatmaps are; what the view left out has no heat.
    """
    own = objects.of(batch.ids.numpy())
    rows = _rows_of(own.ids, batch.ids.numpy())
    # The sigmoid of the whole map: its shape is fixed, and so are the last bits that vector code gives.
    maps = logit_map.float().sigmoid()[rows, torch.from_numpy(own.classes)].cpu()
    heat, mask = to_image(maps[:, None], batch.views[rows], 2 * maps.shape[-1])
    return _trials(heat[:, 0] * mask, own)


def read_objects(index: Index, ids: NDArray[np.int64]) -> Objects:
    """Read the boxes in the shards' json, `[class, x0, y0, x1, y1]` each; refuse shards without any."""
    rows = [
        (sample_id, int(box[0]), *box[1:])
        for sample_id, fields in read_metadata(index, ids).items()
        for box in fields.get("boxes", ())
    ]
    if not rows:
        raise UserError(
            f"boxes: none of these {len(ids)} samples has any. Expected `boxes` in the json of the shards: "
            f"[class, x0, y0, x1, y1] each, in 0 to 1."
        )
    table = np.array(rows, np.float64)
    pairs, owners = np.unique(table[:, :2].astype(np.int64), axis=0, return_inverse=True)
    order = np.argsort(owners.ravel(), kind="stable")
    return Objects(ids=pairs[:, 0], classes=pairs[:, 1], boxes=table[order, 2:], owners=owners.ravel()[order])


def summarize(trials: Arrays, index: Index) -> dict[str, Pointing]:
    """Return figures over `given`, `missing` and `all` pairs.

    If the shards have full labels, only their positives count; boxes of other classes are ignored.
    """
    pairs = (np.arange(len(trials["ids"])), trials["classes"])
    given = index.labels_of(trials["ids"], "given")[pairs] == 1
    present = np.ones_like(given)
    if index.full is not None:
        present = index.labels_of(trials["ids"], "full")[pairs] == 1
    masks = {"given": given, "missing": present & ~given, "all": given | present}
    return {name: _figures(trials, mask) for name, mask in masks.items()}


def _figures(trials: Arrays, mask: NDArray[np.bool_]) -> Pointing:
    return Pointing(
        num_pairs=int(mask.sum()),
        hit_rate=_mean(trials["hits"][mask]),
        energy=_mean(trials["energy"][mask]),
        chance=_mean(trials["chance"][mask]),
    )


def _mean(values: NDArray[Any]) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else float("nan")


def _trials(heat: Tensor, objects: Objects) -> Arrays:
    """Return the outcome of every pair, from its heatmap [p,W,W]."""
    heat = heat.float()
    boxes, owners = torch.from_numpy(objects.boxes), torch.from_numpy(objects.owners)
    return {
        "ids": objects.ids,
        "classes": objects.classes,
        "hits": pointing_hits(heat, boxes, owners).numpy(),
        "energy": energy_in_boxes(heat, boxes, owners).numpy(),
        "chance": energy_in_boxes(torch.ones_like(heat), boxes, owners).numpy(),
    }


def _stored_heatmaps(rows: Rows, ids: NDArray[np.int64], objects: Objects) -> Tensor:
    """The heatmap [p,W,W] of each pair, from the rows of some images."""
    places = _rows_of(objects.ids, ids).numpy()
    return torch.from_numpy(rows.heatmaps_of(places, objects.classes))


def _rows_of(wanted: NDArray[np.int64], ids: NDArray[np.int64]) -> Tensor:
    """Return the position of each wanted id in `ids`."""
    order = np.argsort(ids)
    return torch.from_numpy(order[np.searchsorted(ids[order], wanted)])


def _by_shard(ids: NDArray[np.int64], rows_per_shard: int) -> Iterator[NDArray[np.int64]]:
    shards = ids // rows_per_shard
    for shard in np.unique(shards):
        yield ids[shards == shard]


# Heat in boxes


def pointing_hits(heatmaps: Tensor, boxes: Tensor, owners: Tensor) -> Tensor:
    """Return whether each heatmap [n,W,W] is hottest inside one of its boxes: 1 or 0, float64 [n].

    Boxes [m,4] are (x0, y0, x1, y1) in 0 to 1; box j belongs to heatmap `owners[j]`, which may have several.
    If several cells are hottest, the fraction of them in a box counts; so a flat heatmap scores chance. NaN
    for a heatmap without a box.
    """
    hottest = heatmaps == heatmaps.amax((1, 2), keepdim=True)
    return _share_in_boxes(hottest, boxes, owners)


def energy_in_boxes(heatmaps: Tensor, boxes: Tensor, owners: Tensor) -> Tensor:
    """Return the fraction of each heatmap's heat in its boxes, float64 [n]; boxes as in `pointing_hits`.

    NaN for a heatmap without a box, or without heat.
    """
    return _share_in_boxes(heatmaps, boxes, owners)


def _share_in_boxes(heat: Tensor, boxes: Tensor, owners: Tensor) -> Tensor:
    """Return the fraction of heat [n,W,W] in the cells that any box of the heatmap covers."""
    cells = _cells_of(boxes, heat.shape[-1])
    owned = torch.zeros(heat.shape, dtype=torch.int32, device=heat.device)
    held = owned.index_add_(0, owners.long(), cells.int()) > 0
    heat = heat.double()
    share = torch.where(held, heat, 0).sum((1, 2)) / heat.sum((1, 2))
    return torch.where(held.any(2).any(1), share, torch.nan)


def _cells_of(boxes: Tensor, size: int) -> Tensor:
    """Return the cells [m,size,size] whose centre is in each box, and the cell at the box's centre.

    So a box smaller than a cell, which may be between the centres of cells, still covers one.
    """
    low, high = boxes.double()[:, :2, None], boxes.double()[:, 2:, None]
    grid = torch.arange(size, device=boxes.device)
    centres = (grid + 0.5) / size
    middle = ((low + high) / 2 * size).long().clamp(0, size - 1)
    x, y = (((centres >= low) & (centres <= high)) | (grid == middle)).unbind(1)
    return y[:, :, None] & x[:, None, :]
