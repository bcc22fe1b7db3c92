"""Millions of tiny images in WebDataset tars, made in seconds, and the tiny network that trains on them."""

import argparse
import io
import sys
import tarfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

if TYPE_CHECKING:  # the benchmark's own process stays small: only the trainer imports torch
    from torch import nn

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

PICTURES, SIDE, BLOCK = 256, 32, 512
KEY_DIGITS = 9
RECORD_BYTES = 4 * BLOCK
"""Of a sample in a tar: header and content of the image, header and content of the label."""
CHECKSUM = slice(148, 154)
"""Where a tar header has the octal digits of its checksum."""


def tiny_net(num_classes: int) -> "nn.Module":
    """One convolution, average pooling, a linear layer: 28 x 28 pixels give maps of 7 x 7, as ImageNet's."""
    from collections import OrderedDict

    from torch import nn

    layers = {
        "conv": nn.Conv2d(3, 8, 4, stride=4),
        "tanh": nn.Tanh(),
        "pool": nn.AdaptiveAvgPool2d(1),
        "flatten": nn.Flatten(),
        "fc": nn.Linear(8, num_classes),
    }
    return nn.Sequential(OrderedDict(layers))


def pictures(seed: int) -> list[bytes]:
    """JPEGs of a coloured square on a coloured ground, all different, each of one tar block at most."""
    random = np.random.default_rng([seed, 1])
    made: list[bytes] = []
    while len(made) < PICTURES:
        pixels = np.empty((SIDE, SIDE, 3), np.uint8)
        pixels[:] = random.integers(0, 256, 3)
        top, left = random.integers(0, SIDE // 2, 2)
        pixels[top : top + SIDE // 2, left : left + SIDE // 2] = random.integers(0, 256, 3)
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "JPEG", quality=50, optimize=True)
        if file.tell() <= BLOCK:
            made.append(file.getvalue())
    return made


def shard_sizes(num_images: int, num_shards: int) -> list[int]:
    """Images of each shard, which differ by one at most."""
    ends = [num_images * n // num_shards for n in range(num_shards + 1)]
    return [end - start for start, end in pairwise(ends)]


def labels_of_shard(seed: int, shard: int, size: int, num_classes: int) -> np.ndarray[Any, Any]:
    """A label for each image of a shard."""
    return np.random.default_rng([seed, 2, shard]).integers(0, num_classes, size)


class Samples:
    """Tar records of samples: all that a label decides is made once, and only keys are filled in."""

    def __init__(self, seed: int, num_classes: int) -> None:
        drawn = pictures(seed)
        # Every record has the same length, so that a shard is one array.
        records = [
            _member("jpg", drawn[label % PICTURES]) + _member("cls", b"%d" % label)
            for label in range(num_classes)
        ]
        self._records: Bytes = np.frombuffer(b"".join(records), np.uint8).reshape(-1, RECORD_BYTES)

    def tar(self, first_key: int, labels: np.ndarray[Any, Any]) -> bytes:
        """A whole tar of samples with consecutive keys."""
        rows = self._records[labels]
        keys = first_key + np.arange(len(labels))
        key_digits = _digits(keys, 10, KEY_DIGITS)
        for start in (0, RECORD_BYTES // 2):
            rows[:, start : start + KEY_DIGITS] = key_digits
            header = rows[:, start : start + BLOCK]
            # The checksum is the sum of the header's bytes, its own field counted as 8 spaces.
            header[:, 148:156] = ord(" ")
            total = header.sum(1, dtype=np.int64)
            header[:, CHECKSUM] = _digits(total, 8, 6)
            header[:, 154] = 0
        return rows.tobytes() + bytes(2 * BLOCK)


def _member(suffix: str, body: bytes) -> bytes:
    """Header and padded content of a tar member whose key is still zeros."""
    info = tarfile.TarInfo(f"{0:0{KEY_DIGITS}d}.{suffix}")
    info.size = len(body)
    return info.tobuf(tarfile.USTAR_FORMAT) + body + bytes(-len(body) % BLOCK)


def _digits(values: np.ndarray[Any, Any], base: int, count: int) -> Bytes:
    """ASCII digits of each value, [len(values), count]."""
    powers = base ** np.arange(count - 1, -1, -1)
    return (values[:, None] // powers % base + ord("0")).astype(np.uint8)


def write_shards(
    folder: Path, part: str, *, num_images: int, num_shards: int, num_classes: int, seed: int
) -> Iterator[int]:
    """Write what is missing of a part's shards; yields the bytes of each, made now or before."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "classes.txt").write_text("".join(f"class {n}\n" for n in range(num_classes)))
    samples, first = Samples(seed, num_classes), 0
    for shard, size in enumerate(shard_sizes(num_images, num_shards)):
        path = folder / f"{part}-{shard:06d}.tar"
        if not path.exists():
            partial = path.with_suffix(".partial")
            partial.write_bytes(samples.tar(first, labels_of_shard(seed, shard, size, num_classes)))
            partial.rename(path)
        first += size
        yield path.stat().st_size


def main() -> None:
    """Write the training and validation shards of `python -m tests.benchmarks.scale`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    for name in ("images", "shards", "val-images", "classes", "seed"):
        parser.add_argument(f"--{name}", type=int, required=True)
    args = parser.parse_args()
    for part, images, shards in (("train", args.images, args.shards), ("val", args.val_images, 1)):
        made = write_shards(
            args.folder, part, num_images=images, num_shards=shards, num_classes=args.classes, seed=args.seed
        )
        for number, _ in enumerate(made, 1):
            if number % 100 == 0 or number == shards:
                print(f"{part}: {number} of {shards} shards", file=sys.stderr)


if __name__ == "__main__":
    main()
