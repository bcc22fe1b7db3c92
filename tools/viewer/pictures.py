"""Images for a browser: the files of the shards as they are, small ones, their size, boxes and views."""

import ctypes
import io
import json
import os
import socket
import sys
import threading
import webbrowser
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import numpy as np
from PIL import Image, ImageDraw, ImageOps

from bigscl.common.files import read_json_object
from bigscl.config import Config
from bigscl.data.headers import FORMATS, check_header, check_pixels, has_several_scans, image_size
from bigscl.data.index import Index
from bigscl.data.open_tar import Unreadable
from bigscl.data.read_samples import read_encoded, read_images, read_metadata
from bigscl.evaluation.sample_plots import SamplePicture, draw_samples, kinds_of, panel_of
from bigscl.store import HeatmapStore, process_start
from bigscl.tools.shared.open_store import Data
from bigscl.tools.shared.questions import Question

THUMBNAILS = 500
"""Kept in RAM: up to 64 KB each, mostly a few."""
QUALITY = 85
MAX_BOXES = 1000
SMALL_BYTES = 65_536
# For decoding, of all requests together: enough for an RGB PNG of all the pixels that are not refused.
DECODING_BYTES = 400_000_000
# Measured with 16 million pixels. Images with alpha are resized from a premultiplied copy, a WebP is decoded
# into frames of an animation, and a JPEG of several scans keeps its coefficients, however small it gets.
PIXEL_BYTES, ALPHA_BYTES, WEBP_BYTES, COEFFICIENT_BYTES = 4, 8, 17, 8
# Of glibc: blocks of this size and larger are mapped on their own.
M_MMAP_THRESHOLD, MAPPED_BYTES = -3, 1 << 20
GREY, DARK = (224, 224, 224), (64, 64, 64)
JPEG = b"\xff\xd8\xff"
TYPES = {
    JPEG: "image/jpeg",
    b"\x89PNG\r\n\x1a\n": "image/png",
    b"RIFF": "image/webp",
    b"GIF8": "image/gif",
    b"BM": "image/bmp",
}
"""How files begin that are sent as they are."""


class Budget:
    """Bytes that all requests together may take."""

    def __init__(self, most: int) -> None:
        self.most = self._left = most
        self._change = threading.Condition()
        _give_back_large_blocks()

    @contextmanager
    def hold(self, size: int) -> Iterator[None]:
        """Wait until so many bytes are free, and keep them during the block."""
        assert size <= self.most
        with self._change:
            self._change.wait_for(lambda: size <= self._left)
            self._left -= size
        try:
            yield
        finally:
            with self._change:
                self._left += size
                self._change.notify_all()


def _give_back_large_blocks() -> None:
    """Let glibc return large blocks to the system when they are freed.

    By itself it soon keeps them in the heap of the thread that freed them: 24 threads that decode one after
    the other take as much as 16 that decode at once.
    """
    with suppress(AttributeError, OSError, TypeError):  # another C library
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MAPPED_BYTES)


_decoding = Budget(DECODING_BYTES)


def original(index: Index, row: int) -> tuple[str, bytes]:
    """Return (type, content) of a sample's image file; Unreadable if it is none that a browser shows."""
    data = bytes(read_encoded(index, row))
    kind = next((kind for start, kind in TYPES.items() if data.startswith(start)), None)
    if kind is None:
        raise Unreadable(f"cannot be shown: it is none of {', '.join(FORMATS)}")
    return kind, data


@lru_cache(THUMBNAILS)
def thumbnail(index: Index, row: int, side: int) -> bytes:
    """Return a JPEG of a sample's image, upright, that fits into a square of this side.

    A JPEG that is small enough is sent as it is: that takes no time of a training's processors. Of an image
    that would take too much memory to decode, its size is drawn.
    """
    data = read_encoded(index, row)
    if len(data) <= SMALL_BYTES and data.startswith(JPEG) and check_header(data):
        return bytes(data)
    image = _opened(data)
    width, height = image.size
    try:
        image.draft("RGB", (side, side))  # A JPEG is decoded smaller than it is.
        needed = _decoding_bytes(image, width * height, data)
        if needed > _decoding.most:
            return _as_jpeg(_stated(width, height, side))
        with _decoding.hold(needed):
            image.thumbnail((side, side))
        # Turned when it is small: the other way round there would be two large ones.
        return _as_jpeg(ImageOps.exif_transpose(image))
    except Exception as error:  # A broken file can make Pillow's plugins raise anything.
        raise Unreadable(f"cannot be decoded: {str(error) or type(error).__name__}") from error


def _decoding_bytes(image: Image.Image, pixels: int, data: bytearray) -> int:
    """Return about how much memory it takes to decode an image, which has so many pixels, to a small one."""
    decoded, own = image.width * image.height, len(data)  # Pillow reads a copy of the file.
    if image.format == "JPEG":
        return own + PIXEL_BYTES * decoded + COEFFICIENT_BYTES * pixels * has_several_scans(data)
    if image.format == "WEBP":
        return own + WEBP_BYTES * decoded
    return own + (ALPHA_BYTES if "A" in image.mode else PIXEL_BYTES) * decoded


def _as_jpeg(image: Image.Image) -> bytes:
    out = io.BytesIO()
    image.convert("RGB").save(out, "JPEG", quality=QUALITY)
    return out.getvalue()


def _stated(width: int, height: int, side: int) -> Image.Image:
    """Return a picture of an image's shape that states its size."""
    scale = side / max(width, height)
    picture = Image.new("RGB", (max(1, round(width * scale)), max(1, round(height * scale))), GREY)
    ImageDraw.Draw(picture).text((4, 4), f"{width} x {height}\nnot decoded", fill=DARK)
    return picture


def upright_size(index: Index, row: int) -> tuple[int, int]:
    """Return (width, height) of a sample's image as it is shown."""
    data = read_encoded(index, row)
    image = _opened(data)
    # Pillow decodes a PNG to find out how it is turned.
    with _decoding.hold(PIXEL_BYTES * image.width * image.height if image.format == "PNG" else 0):
        return image_size(data)


def _opened(data: bytearray) -> Image.Image:
    check_header(data)
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except Exception as error:  # as above
        raise Unreadable(f"cannot be decoded: it is none of {', '.join(FORMATS)}") from error
    check_pixels(*image.size)
    return image


def boxes_of(index: Index, row: int) -> list[list[float]]:
    """Return the boxes of a sample as (class, x0, y0, x1, y1) in 0 to 1; none if the shards have none."""
    try:
        own = read_metadata(index, np.array([row]))[row].get("boxes", [])
    except Unreadable:
        return []
    boxes = np.array(own, np.float64).reshape(-1, 5)[:MAX_BOXES]
    boxes[:, 1:] = boxes[:, 1:].clip(0, 1)
    plain: list[list[float]] = boxes.tolist()
    return plain


def views_of(
    config: Config, row: int, size: tuple[int, int], last_epoch: int, count: int
) -> list[dict[str, Any]]:
    """Return what training saw of a sample in its last epochs, the newest first."""
    views = []
    for epoch in range(last_epoch, max(-1, last_epoch - count), -1):
        view = config.data.crop.view(
            seed=config.seed, epoch=epoch, sample_id=row, width=size[0], height=size[1]
        )
        views.append({"epoch": epoch, "box": view.fractions()[:4], "flip": view.flip})
    return views


# Images of questions in a terminal: on a page that is served, else a file that follows the questions

PAGE = "page.json"
FOLLOWING = '<meta http-equiv="refresh" content="1"><body style="background:#222"><img src="question.png">'
"""A page that shows the newest picture."""


@contextmanager
def announced(folders: Sequence[Path], address: str) -> Iterator[None]:
    """Keep the address of a page, while it is served, in the folder of the indexes of each of its runs.

    Only this user can read it: it has the token.
    """
    files = [folder / PAGE for folder in folders]
    facts = {"host": socket.gethostname(), "pid": os.getpid(), "started": process_start(os.getpid())}
    for number, file in enumerate(files):
        with suppress(OSError):  # a place that cannot be written: the address was printed
            file.parent.mkdir(parents=True, exist_ok=True)
            file.unlink(missing_ok=True)
            with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as opened:
                json.dump({**facts, "address": f"{address}&{urlencode({'run': number})}"}, opened)
    try:
        yield
    finally:
        for file in files:
            with suppress(OSError):
                if (read_json_object(file) or {}).get("pid") == os.getpid():
                    file.unlink()


def _page(folder: Path) -> str | None:
    """Return the address of the page that a process of this machine serves; None if there is none."""
    try:
        facts = read_json_object(folder / PAGE) or {}
        is_served = facts["host"] == socket.gethostname() and process_start(facts["pid"]) == facts["started"]
        return str(facts["address"]) if is_served else None
    except (OSError, KeyError, TypeError):
        return None


def has_display() -> bool:
    """Return whether somebody is at a terminal of a machine that can open windows."""
    windows = (
        sys.platform in ("darwin", "win32") or "DISPLAY" in os.environ or "WAYLAND_DISPLAY" in os.environ
    )
    return windows and sys.stdout.isatty()


class QuestionPictures:
    """Shows the image of each question with the heat of its class."""

    def __init__(
        self, store: HeatmapStore, data: Data, page_folder: Path, folder: Path, *, opens: bool
    ) -> None:
        """`page_folder` is that of the indexes of the run, `folder` one for the picture."""
        self._store, self._data, self._opens = store, data, opens
        self._page_folder, self._folder = page_folder, folder
        self._follows = False

    def show(self, question: Question) -> str:
        """Return the address or the file that shows the image, opened in a browser if that is wanted."""
        page = _page(self._page_folder)
        if page is not None:
            shown = (
                f"{page}&{urlencode({'page': 'sample', 'row': question.sample, 'focus': question.number})}"
            )
            if self._opens:
                webbrowser.open(shown)
            return shown
        file = self._folder / "question.png"
        try:
            draw_samples([self._picture(question)], file)
        except Unreadable as error:
            return f"no image: {error}"
        if self._opens and not self._follows:
            following = file.with_suffix(".html")
            following.write_text(FOLLOWING)
            webbrowser.open(following.absolute().as_uri())
            self._follows = True
        return str(file)

    def _picture(self, question: Question) -> SamplePicture:
        ids, names = np.array([question.sample]), self._data.index.class_names
        image = read_images(self._data.index, ids)[question.sample].numpy()
        rows = self._store.read_without_initial_value(ids)
        kinds = kinds_of(self._data.annotated(ids)[0])
        panels = [] if rows.heatmaps is None else [panel_of(rows, question.number, names, kinds)]
        return SamplePicture(image=image, title=question.key, panels=panels)
