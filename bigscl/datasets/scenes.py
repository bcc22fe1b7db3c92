"""Scenes of several handwritten digits over clutter: a small dataset that is made, not downloaded.

All pixels come from real images that ship with scikit-learn: 1,797 handwritten digits of 8 x 8 pixels, and
two photographs for backgrounds and clutter.
"""

import io
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from bigscl.common.user_error import UserError
from bigscl.datasets.multilabel import Box, draw_given, fraction, label_matrix
from bigscl.datasets.writer import MultiLabel, Sample, Shards

# Fractions of the 1,797 source digits: no digit is in two parts.
SOURCES = {"single": 0.35, "train": 0.3, "val": 0.1, "test": 0.25}
SIDE = 72
# Smallest and largest height of a digit, in pixels.
SINGLE_DIGIT = (20, 52)
SCENE_DIGIT = (18, 30)
MAX_ATTEMPTS = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Digit:
    """A source digit and the rectangle it is stretched to, in pixels."""

    source: int
    left: int
    top: int
    width: int
    height: int

    def overlaps(self, other: "Digit") -> bool:
        return (
            self.left < other.left + other.width
            and other.left < self.left + self.width
            and self.top < other.top + other.height
            and other.top < self.top + self.height
        )

    def box(self) -> Box:
        """Return (class, x0, y0, x1, y1) around the ink, in 0..1 of the picture."""
        images, targets = _digits()
        ink = images[self.source] > 0.25
        columns, rows = np.flatnonzero(ink.any(axis=0)) / 8, np.flatnonzero(ink.any(axis=1)) / 8
        edges = (
            self.left + columns[0] * self.width,
            self.top + rows[0] * self.height,
            self.left + (columns[-1] + 0.125) * self.width,
            self.top + (rows[-1] + 0.125) * self.height,
        )
        x0, y0, x1, y1 = (fraction(float(edge), SIDE) for edge in edges)
        return int(targets[self.source]), x0, y0, x1, y1


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """A picture of digits over clutter: the digits' places are given, the rest is drawn from the seed."""

    seed: tuple[int, ...]
    digits: tuple[Digit, ...]

    def encoded(self) -> tuple[str, bytes]:
        buffer = io.BytesIO()
        # Level 1 takes half the time of the default for files a tenth larger.
        Image.fromarray(self.pixels()).save(buffer, format="PNG", compress_level=1)
        return "png", buffer.getvalue()

    def pixels(self) -> NDArray[np.uint8]:
        random = np.random.RandomState(self.seed)
        picture = _background(random)
        for digit in self.digits:
            _draw(picture, digit, random)
        return (picture.clip(0, 1) * 255).round().astype(np.uint8)


def scenes(sizes: dict[str, int], seed: int) -> Shards:
    """Return `single` digits for pretraining; `train`, `val`, `test` scenes of 2-4 digits, one given."""
    sources = _split_sources(seed)
    parts = {}
    for number, part in enumerate(SOURCES):
        pictures = [_scene(part, sources[part], (seed, number, index)) for index in range(sizes[part])]
        parts[part] = _samples(part, pictures)
    return Shards(
        kind="scenes",
        classes=[str(digit) for digit in range(10)],
        parts=parts,
        settings={"seed": seed, "sizes": sizes},
    )


def _samples(part: str, pictures: list[Scene]) -> list[Sample]:
    boxes = [tuple(digit.box() for digit in picture.digits) for picture in pictures]
    labels = [tuple(sorted(box[0] for box in found)) for found in boxes]
    given, _ = draw_given(label_matrix(labels, 10))
    return [
        Sample(
            key=f"{part}_{index:06d}",
            image=picture,
            label=MultiLabel(full=labels[index], given=given[index], boxes=boxes[index]),
        )
        for index, picture in enumerate(pictures)
    ]


def _scene(part: str, sources: list[NDArray[np.int64]], seed: tuple[int, ...]) -> Scene:
    random = np.random.RandomState((*seed, 0))
    count, heights = (1, SINGLE_DIGIT) if part == "single" else (random.randint(2, 5), SCENE_DIGIT)
    chosen = [int(random.choice(sources[label])) for label in random.permutation(10)[:count]]
    while (digits := _place(chosen, heights, random)) is None:
        pass
    return Scene(seed=(*seed, 1), digits=digits)


def _place(
    chosen: list[int], heights: tuple[int, int], random: np.random.RandomState
) -> tuple[Digit, ...] | None:
    """Return the digits at free places with random sizes; None if the first ones left no room."""
    placed: list[Digit] = []
    for source in chosen:
        for _ in range(MAX_ATTEMPTS):
            height = int(random.randint(heights[0], heights[1] + 1))
            width = round(height * random.uniform(0.75, 1.0))
            left, top = random.randint(0, SIDE - width + 1), random.randint(0, SIDE - height + 1)
            digit = Digit(source=source, left=int(left), top=int(top), width=width, height=height)
            if not any(digit.overlaps(other) for other in placed):
                placed.append(digit)
                break
        else:
            return None
    return tuple(placed)


def _background(random: np.random.RandomState) -> NDArray[np.float64]:
    """Return a piece of a photograph at low contrast, with smaller pieces pasted on it."""
    picture = _piece(random, SIDE, SIDE)
    for _ in range(random.randint(1, 5)):
        width, height = random.randint(SIDE // 9, SIDE // 4, 2).tolist()
        left, top = random.randint(0, SIDE - width), random.randint(0, SIDE - height)
        picture[top : top + height, left : left + width] = _piece(random, width, height)
    return picture


def _piece(random: np.random.RandomState, width: int, height: int) -> NDArray[np.float64]:
    """Return a random part of a photograph, resized, at low contrast around a random grey."""
    photograph = _photographs()[random.randint(2)]
    zoom = random.uniform(1.0, 3.0)
    part_width, part_height = int(width * zoom), int(height * zoom)
    left = random.randint(0, photograph.width - part_width)
    top = random.randint(0, photograph.height - part_height)
    box = (left, top, left + part_width, top + part_height)
    resized = photograph.resize((width, height), Image.Resampling.BILINEAR, box=box)
    piece: NDArray[np.float64] = np.asarray(resized) / 255
    return np.asarray(random.uniform(0.3, 0.7) + random.uniform(0.15, 0.4) * (piece - piece.mean()))


def _draw(picture: NDArray[np.float64], digit: Digit, random: np.random.RandomState) -> None:
    """Blend a digit's ink into the picture, lighter or darker than its background."""
    rows = slice(digit.top, digit.top + digit.height)
    columns = slice(digit.left, digit.left + digit.width)
    mean = picture[rows, columns].mean()
    ink = (0.9 if mean < 0.5 else 0.1) + random.uniform(-0.1, 0.1, 3)
    small = Image.fromarray((_digits()[0][digit.source] * 255).astype(np.uint8))
    shape = np.asarray(small.resize((digit.width, digit.height), Image.Resampling.BICUBIC)) / 255
    alpha = (shape * random.uniform(0.75, 1.0))[:, :, None]
    picture[rows, columns] = (1 - alpha) * picture[rows, columns] + alpha * ink


def _split_sources(seed: int) -> dict[str, list[NDArray[np.int64]]]:
    """Return the source digits of each part and class; all classes are split alike."""
    random = np.random.RandomState(seed)
    sources: dict[str, list[NDArray[np.int64]]] = {part: [] for part in SOURCES}
    for label in range(10):
        members = random.permutation(np.flatnonzero(_digits()[1] == label))
        cuts = np.round(np.cumsum(list(SOURCES.values()))[:-1] * len(members)).astype(int)
        for part, share in zip(SOURCES, np.split(members, cuts), strict=True):
            sources[part].append(share)
    return sources


@cache
def _digits() -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return `[1797, 8, 8]` ink in 0..1, and the classes."""
    digits = _sklearn().load_digits()
    return digits.images / 16, digits.target


@cache
def _photographs() -> list[Image.Image]:
    return [Image.fromarray(image) for image in _sklearn().load_sample_images().images]


def _sklearn() -> Any:
    try:
        from sklearn import datasets
    except ImportError:
        raise UserError("scenes need scikit-learn's images: pip install 'bigscl[quickstart]'") from None
    return datasets
