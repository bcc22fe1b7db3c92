"""Pictures of samples: the image, and next to it the heatmaps of some classes as overlays.

Used by the trainer after each epoch, by `bigscl render` and in notebooks.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from bigscl.common.files import atomic_write
from bigscl.common.user_error import UserError
from bigscl.data.index import Index
from bigscl.data.open_tar import Unreadable
from bigscl.data.read_samples import read_images, read_metadata
from bigscl.store import HeatmapStore, Rows

Kind = Literal["annotated", "unannotated", "expected", "negative", "unknown"]
"""Label of a class in an image. Where they are incomplete, others are expected or unknown."""
Box = tuple[float, float, float, float]

# Distinguishable for people with red-green colour blindness, too.
COLORS: dict[Kind, str] = {
    "annotated": "#009e73",
    "unannotated": "#d55e00",
    "expected": "#cc79a7",
    "negative": "#56667a",
    "unknown": "#8a8a8a",
}
MEANINGS: dict[Kind, str] = {
    "annotated": "annotated positive",
    "unannotated": "unannotated positive",
    "expected": "not annotated, expected",
    "negative": "negative",
    "unknown": "not annotated",
}
BOX_COLOR = "white"
INSIDE, OUTSIDE = "o", "x"
"""Marks of the hottest cell: inside one of the boxes of its class, or outside of all."""
DIM = 0.7
# Inches and pixels of the page.
TILE = 1.5
GAP = 0.08
LINE = 0.17
LEGEND = 0.36
DPI = 128
MAX_PIXELS_PER_SIDE = 2**16 - 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Panel:
    """One heatmap over the sample's image."""

    heatmap: NDArray[Any]
    """`[W,W]` in 0..1, covering the whole image whatever its aspect ratio."""
    name: str
    score: float
    kind: Kind
    boxes: tuple[Box, ...] = ()
    """Boxes of the class's objects, if known: (x0, y0, x1, y1) in 0..1 of the image."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SamplePicture:
    """A sample: its image and the heatmaps to show next to it."""

    image: NDArray[np.uint8]
    """`[3,H,W]`"""
    title: str
    panels: Sequence[Panel]


def classes_to_show(rows: Rows, kinds: Sequence[Kind], count: int, *, reserve: bool = True) -> list[int]:
    """Return classes with heatmaps: annotated, other (expected) positives, the rest; each by falling score.

    With `reserve`, the last place is for one of the rest.
    """
    scores = rows.scores[0]
    classes = sorted(rows.kept_classes()[0].tolist(), key=lambda number: -scores[number])
    positive: tuple[Kind, ...] = ("annotated", "unannotated", "expected")
    positives = [number for kind in positive for number in classes if kinds[number] == kind]
    negatives = [number for number in classes if kinds[number] not in positive]
    chosen = positives[: max(1, count - 1) if negatives and reserve else count]
    return chosen + negatives[: count - len(chosen)]


def panel_of(
    rows: Rows,
    number: int,
    names: Sequence[str],
    kinds: Sequence[Kind],
    boxes: Mapping[int, Sequence[Box]] | None = None,
) -> Panel:
    """Return the panel of one class; a class whose heatmap is not kept has no heat."""
    heatmap = heatmap_of(rows, number)
    return Panel(
        heatmap=np.zeros((1, 1), np.float16) if heatmap is None else heatmap,
        name=names[number],
        score=float(rows.scores[0, number]),
        kind=kinds[number],
        boxes=tuple((boxes or {}).get(number, ())),
    )


def heatmap_of(rows: Rows, number: int) -> NDArray[Any] | None:
    """The heatmap `[W,W]` of a class of the one sample in `rows`; None if it is not kept."""
    if number not in rows.kept_classes()[0]:
        return None
    return np.asarray(rows.heatmaps_of(np.array([0]), np.array([number]))[0])


def kinds_of(
    annotated: NDArray[np.bool_],
    *,
    present: NDArray[np.bool_] | None = None,
    expected: NDArray[np.bool_] | None = None,
    negatives: NDArray[np.bool_] | None = None,
) -> list[Kind]:
    """Return the kind of every class in a sample.

    `annotated` are the positives that training sees. `present` are all positives, if the full labels are
    known; if they are not, `expected` are the expected positives, and `negatives` are known to be absent.
    """
    kinds: list[Kind] = ["unknown" if present is None else "negative"] * len(annotated)
    marks: list[tuple[Kind, NDArray[np.bool_] | None]] = [("annotated", annotated)]
    if present is None:
        marks = [("expected", expected), ("negative", negatives), *marks]
    else:
        marks = [("unannotated", present), *marks]
    for kind, mask in marks:
        for number in np.flatnonzero(mask) if mask is not None else ():
            kinds[number] = kind
    return kinds


def peak_of(heatmap: NDArray[Any]) -> tuple[float, float] | None:
    """Return the centre (x, y) of the hottest cell, in 0..1 of the image; None of a map without heat."""
    if not heatmap.max() > 0:
        return None
    row, column = np.unravel_index(int(heatmap.argmax()), heatmap.shape)
    return (float(column) + 0.5) / heatmap.shape[1], (float(row) + 0.5) / heatmap.shape[0]


def boxes_by_class(boxes: list[list[float]]) -> dict[int, list[Box]]:
    """Return the boxes (x0, y0, x1, y1) of each class, from rows of a class and its box."""
    by_class: dict[int, list[Box]] = {}
    for number, x0, y0, x1, y1 in boxes:
        by_class.setdefault(int(number), []).append((x0, y0, x1, y1))
    return by_class


def is_inside(point: tuple[float, float], boxes: Sequence[Box]) -> bool:
    """Return whether a point lies in one of the boxes: a hit of the pointing game."""
    return any(x0 <= point[0] <= x1 and y0 <= point[1] <= y1 for x0, y0, x1, y1 in boxes)


def overlay(image: NDArray[np.uint8], heatmap: NDArray[Any]) -> NDArray[np.uint8]:
    """Return `[H,W,3]`: the heat in fixed colours over the image `[3,H,W]` in dim grey."""
    _, height, width = image.shape
    heat = over_image(heatmap, width, height)[:, :, None]
    grey = DIM * image.astype(np.float32).mean(axis=0)[:, :, None]
    colors = _heat_colors(heat[:, :, 0]) * 255
    # The image shows through strong heat too; weak heat is visible, but not mistaken for strong.
    opacity = 0.75 * np.sqrt(heat)
    return np.asarray(grey * (1 - opacity) + colors * opacity).round().astype(np.uint8)


def over_image(heatmap: NDArray[Any], width: int, height: int) -> NDArray[np.float32]:
    """Return a heatmap `[W,W]` in 0..1 as `[height,width]`: it covers the whole image."""
    small = Image.fromarray(heatmap.astype(np.float32))
    return np.asarray(small.resize((width, height), Image.Resampling.BILINEAR)).clip(0, 1)


def _heat_colors(values: NDArray[Any]) -> NDArray[np.float64]:
    """Return colours `[...,3]` in 0..1, without the darkest, which would look like shadows in the image."""
    import matplotlib

    return np.asarray(matplotlib.colormaps["inferno"](0.3 + 0.7 * values))[..., :3]


def draw_samples(samples: Sequence[SamplePicture], path: Path, *, title: str = "", across: int = 1) -> None:
    """Write a picture of the samples, `across` of them side by side; the suffix gives the format."""
    with atomic_write(path) as partial:
        figure = figure_of(samples, title=title, across=across)
        figure.savefig(partial, dpi=DPI, format=path.suffix.removeprefix(".") or None)


def figure_of(samples: Sequence[SamplePicture], *, title: str = "", across: int = 1) -> Any:
    """Return the matplotlib figure that `draw_samples` writes."""
    from matplotlib.figure import Figure

    if not samples or across < 1:
        raise UserError(f"picture: {len(samples)} samples, {across} across; expected at least one")
    across = min(across, len(samples))
    tiles = 1 + max(len(sample.panels) for sample in samples)
    row_height = TILE + 2 * LINE + GAP
    lines = title.splitlines()
    head = LINE * len(lines) + GAP / 2 if title else GAP
    width = across * tiles * (TILE + GAP) + across * GAP
    height = head + -(-len(samples) // across) * row_height + LEGEND
    if max(width, height) * DPI > MAX_PIXELS_PER_SIDE:
        raise UserError(f"picture: {len(samples)} samples do not fit on one page; draw fewer, or more across")
    figure = Figure(figsize=(width, height), dpi=DPI)
    # One coordinate system in inches from the top left: hundreds of axes would take minutes.
    axes = figure.add_axes((0, 0, 1, 1), frameon=False)
    axes.set(xlim=(0, width), ylim=(height, 0), xticks=[], yticks=[], autoscale_on=False)
    for number, line in enumerate(lines):
        fitting = _short(line, int(width / 0.085))
        axes.text(GAP, LINE * (number + 0.6), fitting, fontsize=9, weight="bold", va="center")
    for number, sample in enumerate(samples):
        row, column = divmod(number, across)
        left = GAP + column * (tiles * (TILE + GAP) + GAP)
        _draw_sample(axes, sample, left, head + row * row_height, tiles)
    _draw_legend(axes, samples, width, height)
    return figure


def _draw_sample(axes: Any, sample: SamplePicture, left: float, top: float, tiles: int) -> None:
    room = len(sample.panels) + 1 if len(sample.panels) + 1 < tiles else tiles
    _text(axes, left, top + LINE / 2, sample.title, room * TILE, color="black", weight="bold")
    image = _shrunk(sample.image)
    _put(axes, np.moveaxis(image, 0, 2), left, top + LINE)
    for number, panel in enumerate(sample.panels, start=1):
        x = left + number * (TILE + GAP)
        box = _put(axes, overlay(image, panel.heatmap), x, top + LINE, COLORS[panel.kind])
        for x0, y0, x1, y1 in panel.boxes:
            across, down = box[1] - box[0], box[2] - box[3]
            corner = (box[0] + x0 * across, box[3] + y0 * down)
            _frame(axes, corner, (x1 - x0) * across, (y1 - y0) * down, BOX_COLOR, 0.9)
        _mark_peak(axes, panel, box)
        label = f"{_short(panel.name, 17)} {panel.score:.2f}"
        _text(axes, x, top + LINE * 1.5 + TILE, label, TILE, color=COLORS[panel.kind], weight="bold")


def _mark_peak(axes: Any, panel: Panel, extent: tuple[float, float, float, float]) -> None:
    """Mark the hottest cell of a class whose boxes are known: where the pointing game looks."""
    peak = peak_of(panel.heatmap)
    if peak is None or not panel.boxes:
        return
    left, right, bottom, top = extent
    mark = INSIDE if is_inside(peak, panel.boxes) else OUTSIDE
    x, y = left + peak[0] * (right - left), top + peak[1] * (bottom - top)
    axes.plot([x], [y], mark, color=BOX_COLOR, markersize=4.5, markeredgecolor="black", markeredgewidth=0.8)
    if mark == OUTSIDE:  # a cross has no face: white over black
        axes.plot([x], [y], mark, color=BOX_COLOR, markersize=3.5, markeredgewidth=1.2)


def _put(
    axes: Any, pixels: NDArray[np.uint8], left: float, top: float, color: str | None = None
) -> tuple[float, float, float, float]:
    """Draw an image into its tile; return its place as matplotlib's extent."""
    height, width = pixels.shape[:2]
    scale = TILE / max(height, width)
    x = left + (TILE - width * scale) / 2
    y = top + (TILE - height * scale) / 2
    extent = (x, x + width * scale, y + height * scale, y)
    axes.imshow(pixels, extent=extent, interpolation="antialiased", aspect="auto")
    if color is not None:
        _frame(axes, (x, y), width * scale, height * scale, color, 2.0)
    return extent


def _frame(
    axes: Any, corner: tuple[float, float], width: float, height: float, color: str, line: float
) -> None:
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle(corner, width, height, fill=False, edgecolor=color, linewidth=line))


def _text(axes: Any, x: float, y: float, text: str, room: float, **style: Any) -> None:
    """Draw text that fits into `room` inches: bold 7 point letters are about 0.068 wide."""
    axes.text(x, y, _short(text, max(4, int(room / 0.068))), fontsize=7, va="center", **style)


def _short(text: str, length: int) -> str:
    """Return the text, or its beginning and end if it is too long: keys differ at their ends."""
    if len(text) <= length:
        return text
    end = (length - 1) // 2
    return f"{text[: length - 1 - end]}…{text[len(text) - end :]}"


def _draw_legend(axes: Any, samples: Sequence[SamplePicture], width: float, height: float) -> None:
    """Draw the meaning of the frames and the colour scale, as far as there is room."""
    panels = [panel for sample in samples for panel in sample.panels]
    kinds = {panel.kind for panel in panels}
    entries = [(COLORS[kind], MEANINGS[kind]) for kind in COLORS if kind in kinds]
    y, x = height - LEGEND / 2, GAP
    for color, meaning in entries:
        _frame(axes, (x + 0.02, y - 0.06), 0.12, 0.12, color, 2.0)
        axes.text(x + 0.2, y, meaning, fontsize=7, va="center", color=color)
        x += 0.35 + 0.062 * len(meaning)
    if panels and x + 1.2 < width:
        ramp = _heat_colors(np.linspace(0, 1, 64)[None])
        axes.imshow(ramp, extent=(x + 0.15, x + 0.95, y + 0.06, y - 0.06), aspect="auto")
        axes.text(x + 0.1, y, "0", fontsize=7, va="center", ha="right")
        axes.text(x + 1.0, y, "1", fontsize=7, va="center")
        x += 1.3
    for text in _legend_texts(panels):
        if x + 0.062 * len(text) < width:
            axes.text(x, y, text, fontsize=7, va="center")
            x += 0.062 * len(text) + 0.1


def _legend_texts(panels: Sequence[Panel]) -> list[str]:
    """Return what the number, the boxes and the marks mean, as far as there are any."""
    if not panels:
        return []
    texts = ["number: score of the class"]
    if any(panel.boxes for panel in panels):
        texts.append("box: the object; hottest cell: o inside, x outside")
    return texts


def _shrunk(image: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the image with at most twice the pixels that its tile can show."""
    side = int(2 * TILE * DPI)
    scale = side / max(image.shape[1:])
    if scale >= 1:
        return image
    size = (max(1, round(image.shape[2] * scale)), max(1, round(image.shape[1] * scale)))
    pixels = Image.fromarray(np.ascontiguousarray(np.moveaxis(image, 0, 2)))
    return np.moveaxis(np.asarray(pixels.resize(size, Image.Resampling.BOX)), 2, 0)


# Samples of a store as pictures: their images, and the heatmaps of some classes beside or over epochs

MAX_EPOCHS = 8


class SampleImages:
    """Pixels of some samples, the kinds of all classes in them, and their boxes, from their shards."""

    def __init__(
        self,
        index: Index,
        ids: NDArray[np.int64],
        annotated: NDArray[np.bool_],
        expected: NDArray[np.bool_] | None = None,
    ) -> None:
        """`annotated` [n,L] are the given classes; `expected` [n,L] is needed without full labels."""
        try:
            self.images = read_images(index, ids)
            metadata = read_metadata(index, ids)
        except Unreadable as error:
            raise UserError(f"{error}. Choose other samples, or write the shards again.") from error
        self.index = index
        self.boxes = {sample: boxes_by_class(fields.get("boxes", [])) for sample, fields in metadata.items()}
        if index.full is not None:
            present = index.labels_of(ids, "full") == 1
            kinds = [kinds_of(own, present=present[n]) for n, own in enumerate(annotated)]
        else:
            assert expected is not None
            negatives = index.labels_of(ids) == 0
            kinds = [
                kinds_of(own, expected=expected[n], negatives=negatives[n]) for n, own in enumerate(annotated)
            ]
        self.kinds = kinds
        """The kinds of all classes in each sample."""

    def picture(self, sample: int, title: str, panels: Sequence[Panel]) -> SamplePicture:
        return SamplePicture(image=self.images[sample].numpy(), title=title, panels=panels)


def side_by_side(
    stores: Sequence[HeatmapStore], images: SampleImages, ids: NDArray[np.int64], count: int
) -> list[SamplePicture]:
    """Return one picture per sample and store, with the classes that are strongest in the first store."""
    memories, names = [_memory(store, ids) for store in stores], images.index.class_names
    pictures = []
    for row, sample in enumerate(ids.tolist()):
        first = memories[0].take(slice(row, row + 1))
        kinds = images.kinds[row]
        classes = classes_to_show(first, kinds, count)
        for store, memory in zip(stores, memories, strict=True):
            rows = memory.take(slice(row, row + 1))
            panels = [panel_of(rows, number, names, kinds, images.boxes[sample]) for number in classes]
            title = images.index.name(sample)
            title += f"   {store.backend.url}" if len(stores) > 1 else ""
            pictures.append(images.picture(sample, title, panels))
    return pictures


def _memory(store: HeatmapStore, ids: NDArray[np.int64]) -> Rows:
    """Return the rows of samples with scores and heatmaps without their initial values."""
    rows = store.read_without_initial_value(ids)
    return rows.with_scores(store.scores_without_initial_value(rows, ids).astype(np.float16))


def over_epochs(
    stores: Sequence[HeatmapStore], images: SampleImages, ids: NDArray[np.int64], count: int
) -> list[SamplePicture]:
    """Return one picture per sample and class, with its heatmap in each epoch."""
    store = stores[0]
    pictures: list[SamplePicture] = []
    for row, sample in enumerate(ids.tolist()):
        history = {epoch: rows for epoch, rows in store.history(sample).items() if rows.heatmaps is not None}
        if not history:
            raise UserError(
                f"{images.index.name(sample)}: no heatmaps of earlier epochs. Tracked samples have them: "
                f"{', '.join(images.index.key(one) for one in store.spec.history_samples[:8])} ..."
            )
        pictures += _epochs_of(images, row, sample, history, count, images.index.name(sample))
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
                panel_of(history[epoch], number, images.index.class_names, kinds, images.boxes[sample]),
                name=f"e{epoch} {images.index.class_names[number]}",
            )
            for epoch in shown
        ]
        yield images.picture(sample, f"{name}: {images.index.class_names[number]}", panels)
