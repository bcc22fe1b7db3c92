"""Shards of COCO-2014 by the single-positive protocol, from loose JPEGs and a file of labels.

    python -m tests.benchmarks.coco_shards IMAGES LABELS shards/coco14 --train-share 0.25 --val-share 0.25
    bigscl index 'shards/coco14/train-*.tar' && bigscl index 'shards/coco14/val-*.tar'

`bigscl shards coco` needs the original archives. This needs the images of train2014 by their ids, in any
size: IMAGES is a folder that has them as `<id in 12 digits>.jpg`, anywhere below it, or a bare git repository
with such files. LABELS is a .npz file of the official training set: `train_ids` [N], `train` [N,L/8] (bits of
the classes), `train_obs` [N] (the given class, seed 1200), `split_train`, `split_val` (rows), `names` [L].
The official validation set is the test split, and is not read. The bytes of the images are kept.

`--train-share` and `--val-share` keep the same random images every time, and those of a smaller share are
among those of a larger one.
"""

import argparse
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from bigscl.common.user_error import UserError
from bigscl.datasets.writer import MultiLabel, Sample, Shards, write

SEED = 1200


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagePath:
    """An image in a folder."""

    path: Path

    def encoded(self):
        """Return (extension, bytes)."""
        return "jpg", self.path.read_bytes()


@dataclass(frozen=True, slots=True, kw_only=True)
class GitBlob:
    """An image in a bare repository."""

    repository: Path
    name: str

    def encoded(self):
        """Return (extension, bytes)."""
        pipe = _cat_file(self.repository)
        pipe.stdin.write(self.name.encode() + b"\n")
        pipe.stdin.flush()
        header = pipe.stdout.readline().split()
        if len(header) != 3 or header[1] != b"blob":
            raise UserError(
                f"{self.repository}: blob {self.name} cannot be read. "
                f"Fetch the repository with all its files."
            )
        content = pipe.stdout.read(int(header[2]))
        pipe.stdout.read(1)
        return "jpg", content


@cache
def _cat_file(repository):
    """Return a `git cat-file --batch` for this process, which ends with it: its input is closed then."""
    return subprocess.Popen(
        ["git", "-C", str(repository), "cat-file", "--batch"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )


def find_images(source):
    """Return the images of a folder or a bare repository by their ids."""
    if not source.is_dir():
        raise UserError(f"{source}: not there, expected a folder of images or a bare git repository")
    if not (source / "HEAD").exists():
        return {
            int(path.stem): ImagePath(path=path) for path in source.rglob("*.jpg") if path.stem.isdecimal()
        }
    listed = subprocess.run(
        ["git", "-C", str(source), "ls-tree", "-r", "-z", "HEAD"], check=True, capture_output=True, text=True
    )
    blobs = [line.split("\t") for line in listed.stdout.split("\0") if line]
    found = [(about.split()[2], Path(path)) for about, path in blobs]
    return {
        int(path.stem): GitBlob(repository=source, name=name)
        for name, path in found
        if path.suffix == ".jpg" and path.stem.isdecimal()
    }


def coco_shards(images, labels, *, train_share=1.0, val_share=1.0, samples_per_shard=1000):
    """Return the shards of Cole's split of the official training set, or of a share of each part."""
    num_classes = len(labels["names"])
    truth = np.unpackbits(labels["train"], axis=1)[:, :num_classes]
    parts = {
        part: [
            _sample(images, int(labels["train_ids"][row]), truth[row], int(labels["train_obs"][row]))
            for row in share_of(labels[f"split_{part}"], share)
        ]
        for part, share in (("train", train_share), ("val", val_share))
    }
    return Shards(
        kind="coco14",
        classes=labels["names"].tolist(),
        parts=parts,
        settings={"train_share": train_share, "val_share": val_share},
        samples_per_shard=samples_per_shard,
    )


def share_of(rows, share):
    """Return a share of the rows in their order, the same every time."""
    order = np.random.RandomState(SEED).permutation(len(rows))
    return rows[np.sort(order[: round(share * len(rows))])]


def _sample(images, number, truth, given):
    if number not in images:
        raise UserError(f"image {number} of the labels is not there, expected {number:012d}.jpg")
    classes = tuple(np.flatnonzero(truth).tolist())
    return Sample(key=f"{number:012d}", image=images[number], label=MultiLabel(full=classes, given=(given,)))


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("images", type=Path, help="folder of JPEGs, or bare git repository")
    parser.add_argument("labels", type=Path, help="the .npz file")
    parser.add_argument("out", type=Path)
    parser.add_argument("--train-share", type=float, default=1.0)
    parser.add_argument("--val-share", type=float, default=1.0)
    parser.add_argument("--workers", type=int, default=0, help="processes that write shards")
    options = parser.parse_args()
    shards = coco_shards(
        find_images(options.images),
        np.load(options.labels),
        train_share=options.train_share,
        val_share=options.val_share,
    )
    count = sum(written.num_samples for written in write(shards, options.out, options.workers))
    sizes = ", ".join(f"{part} {len(samples)}" for part, samples in shards.parts.items())
    print(f"{options.out}: {count} images ({sizes})")


if __name__ == "__main__":
    main()
