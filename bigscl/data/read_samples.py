"""Read samples from their shards: encoded images in a stream's order, and a few chosen samples."""

import json
import logging
import os
import tarfile
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from bigscl.common.text import printable
from bigscl.data.epoch_plan import Stream
from bigscl.data.headers import image_size
from bigscl.data.index import Index
from bigscl.data.open_tar import Shard, Unreadable, open_shard
from bigscl.data.tar import BLOCK, LARGEST_IMAGE_BYTES, LARGEST_LABEL_BYTES, Member, members

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

Encoded = bytearray | Unreadable
# Bytes of an image file that hold its size, unless a large thumbnail or profile comes first.
HEAD_BYTES = 1 << 16
LARGEST_CLASS = (1 << 24) - 1


def encoded_images(index: Index, stream: Stream) -> Iterator[tuple[int, Encoded]]:
    """Yield (id, content of its image file or the reason why there is none), in the order of the stream.

    Shards are read from front to back, and only the samples of the stream. A sample that is read before its
    turn waits undecoded; the plan's shuffle buffer bounds their number.
    """
    waiting: dict[int, Encoded] = {}
    source = _in_reading_order(index, stream)
    for sample_id in stream.ids.tolist():
        while sample_id not in waiting:
            read_id, content = next(source)
            waiting[read_id] = content
        yield sample_id, waiting.pop(sample_id)


def _in_reading_order(index: Index, stream: Stream) -> Iterator[tuple[int, Encoded]]:
    ids = np.sort(stream.ids)
    for number in stream.shards.tolist():
        first, last = np.searchsorted(
            ids, [number * index.rows_per_shard, (number + 1) * index.rows_per_shard]
        )
        if first < last:
            yield from _images_of_shard(index, number, ids[first:last].tolist())


def _images_of_shard(index: Index, number: int, ids: list[int]) -> Iterator[tuple[int, Encoded]]:
    if index.folder is not None:
        yield from ((sample_id, _image_file(index, sample_id)) for sample_id in ids)
        return
    logger.debug("reading %d samples of %s", len(ids), index.urls[number])
    try:
        shard = open_shard(index.urls[number], allow_pipe=index.allow_pipe)
    except Unreadable as error:
        # It was there when the run started: its samples are skipped, counted and named like others.
        yield from ((sample_id, error) for sample_id in ids)
        return
    with closing(shard):
        for sample_id in ids:
            try:
                yield sample_id, _image(index, shard, sample_id)
            except Unreadable as error:
                yield sample_id, error


def _image_file(index: Index, sample_id: int) -> Encoded:
    """Return the content of an image that is a file of its own, or why it cannot be read."""
    assert index.folder is not None
    path = Path(index.folder, os.fsdecode(bytes(index.keys[sample_id])))
    try:
        if path.stat().st_size > LARGEST_IMAGE_BYTES:
            return Unreadable(f"{path.stat().st_size} bytes, expected at most {LARGEST_IMAGE_BYTES}")
        return bytearray(path.read_bytes())
    except OSError as error:
        return Unreadable(f"cannot be read: {error.strerror or error}")


def _image(index: Index, shard: Shard, sample_id: int) -> bytearray:
    """Return the content of a sample's image file; the tar header before it must be the indexed one."""
    offset, size = int(index.image_offsets[sample_id]), int(index.image_bytes[sample_id])
    # Before anything is allocated. A local tar checks its length, a stream does not know it.
    if offset < BLOCK or not 0 <= size <= LARGEST_IMAGE_BYTES:
        raise Unreadable(
            f"the index is damaged: an image of {size} bytes at byte {offset}. Run `bigscl index` again."
        )
    data = shard.read_at(offset - BLOCK, BLOCK + size)
    try:
        info = tarfile.TarInfo.frombuf(bytes(data[:BLOCK]), "utf-8", "surrogateescape")
    except (tarfile.TarError, ValueError) as error:
        raise Unreadable(
            f"the shard has changed since it was indexed: {error} before byte {offset}"
        ) from error
    key = bytes(index.keys[sample_id])
    # A header holds 100 bytes of a name, all of them ASCII.
    if info.size != size or (key.isascii() and not info.name.startswith(key[:90].decode())):
        raise Unreadable(
            f"the shard has changed since it was indexed: {printable(info.name)} is at byte {offset}"
        )
    del data[:BLOCK]
    return data


def read_encoded(index: Index, sample_id: int) -> bytearray:
    """Return the content of one sample's image file; raise Unreadable."""
    ids = np.array([sample_id])
    stream = Stream(shards=ids // index.rows_per_shard, ids=ids)
    _, content = next(encoded_images(index, stream))
    if isinstance(content, Unreadable):
        raise content
    return content


def read_images(index: Index, ids: NDArray[np.int64]) -> "dict[int, Tensor]":
    """Return the decoded images of a few samples, uint8 `[3,H,W]`, by id; raise Unreadable with its name."""
    # Here: the labels of samples are read without torch, which takes 700 MB.
    from bigscl.data.decode import decode

    stream = Stream(shards=np.unique(ids // index.rows_per_shard), ids=np.unique(ids))
    images = {}
    for sample_id, content in encoded_images(index, stream):
        try:
            if isinstance(content, Unreadable):
                raise content
            images[sample_id] = decode(content)
        except Unreadable as error:
            raise Unreadable(f"{index.name(sample_id)}: {error}") from error
    return {int(sample_id): images[int(sample_id)] for sample_id in ids}


def read_metadata(index: Index, ids: NDArray[np.int64]) -> dict[int, dict[str, Any]]:
    """Return the json of a few samples (with `boxes`, if it has any), by id; empty if there is none.

    Malformed `boxes`, which `bigscl index` reports, are left out.
    """
    metadata: dict[int, dict[str, Any]] = {int(sample_id): {} for sample_id in ids}
    for number in () if index.folder is not None else np.unique(ids // index.rows_per_shard).tolist():
        wanted = {bytes(index.keys[n]): n for n in metadata if n // index.rows_per_shard == number}
        with closing(open_shard(index.urls[number], allow_pipe=index.allow_pipe)) as shard:
            for member in members(shard, _ignore):
                key, extension = member.key_and_extension() or ("", "")
                row = wanted.get(key.encode(errors="surrogateescape")) if extension == "json" else None
                if row is not None:
                    metadata[row] = _metadata(index.name(row), shard, member)
                    del wanted[bytes(index.keys[row])]
                if not wanted:
                    break
    return metadata


def _ignore(damage: str) -> None:
    """Ignore damage between members: `bigscl index` has reported it."""


def _metadata(name: str, shard: Shard, member: Member) -> dict[str, Any]:
    if member.size > LARGEST_LABEL_BYTES:
        raise Unreadable(f"{name}: json of {member.size} bytes, expected at most {LARGEST_LABEL_BYTES}")
    try:
        content = json.loads(shard.read_at(member.offset, member.size))
    except (ValueError, RecursionError, Unreadable) as error:
        raise Unreadable(f"{name}: its json cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise Unreadable(f"{name}: its json is of type {type(content).__name__}, expected an object")
    if not are_boxes(content.get("boxes", [])):
        del content["boxes"]
    return content


def are_boxes(found: Any) -> bool:
    """Return whether this is a list of boxes, `[class, x0, y0, x1, y1]` each, all finite numbers."""
    if not isinstance(found, list) or not all(isinstance(box, list) and len(box) == 5 for box in found):
        return False
    numbers = [number for box in found for number in box]
    if not all(type(number) in (int, float) and abs(number) <= LARGEST_CLASS for number in numbers):
        return False
    return all(box[0] >= 0 and box[0] == int(box[0]) for box in found)


@dataclass(frozen=True, slots=True)
class ImageHead:
    """Facts of an image file that need no decoding."""

    name: str
    """Of the file in its tar; bytes that are not UTF-8 are escaped, as in keys."""
    width: int
    """Of the upright image, as it is decoded."""
    height: int


def read_image_heads(index: Index, ids: NDArray[np.int64]) -> dict[int, ImageHead]:
    """Return names and sizes of images by id, without those that are not readable images."""
    if index.folder is not None:
        return dict(_heads_of_files(index, ids))
    heads: dict[int, ImageHead] = {}
    for number in np.unique(ids // index.rows_per_shard).tolist():
        own = ids[ids // index.rows_per_shard == number]
        wanted = dict(zip(index.image_offsets[own].tolist(), own.tolist(), strict=True))
        with closing(open_shard(index.urls[number], allow_pipe=index.allow_pipe)) as shard:
            for member in members(shard, _ignore):
                row = wanted.pop(member.offset, None)
                if row is not None and (size := _upright_size(shard, member)) is not None:
                    name = member.name.encode(errors="surrogateescape").decode(errors="backslashreplace")
                    heads[row] = ImageHead(name, *size)
                if not wanted:
                    break
    return heads


def _heads_of_files(index: Index, ids: NDArray[np.int64]) -> Iterator[tuple[int, ImageHead]]:
    for sample_id in ids.tolist():
        content = _image_file(index, sample_id)
        with suppress(Unreadable):
            if not isinstance(content, Unreadable):
                yield sample_id, ImageHead(index.key(sample_id), *image_size(content))


def _upright_size(shard: Shard, member: Member) -> tuple[int, int] | None:
    """Return the size of an image from its first bytes, or from all; None if it is not a readable image."""
    for count in sorted({min(HEAD_BYTES, member.size), min(LARGEST_IMAGE_BYTES, member.size)}):
        try:
            return image_size(shard.read_at(member.offset, count))
        except Unreadable as error:
            logger.debug("%s: %s in %d bytes", member.name, error, count)
    return None
