"""Shards of COCO from loose images and a file of labels: the split, the shares, the bytes of the images."""

import json
import subprocess
import tarfile

import numpy as np
import pytest

from bigscl.common.user_error import UserError
from bigscl.data.build_index import scan
from bigscl.datasets.writer import write
from tests.benchmarks.coco_shards import coco_shards, find_images, share_of

IDS = [9, 25, 30, 100012, 581929]


@pytest.fixture
def labels():
    """Five images of three classes; the fourth is validation."""
    truth = np.array([[1, 0, 1], [0, 1, 0], [1, 1, 1], [0, 0, 1], [1, 0, 0]], np.uint8)
    return {
        "train_ids": np.array(IDS),
        "train": np.packbits(truth, axis=1),
        "train_obs": np.array([2, 1, 0, 2, 0], np.uint8),
        "split_train": np.array([0, 1, 2, 4]),
        "split_val": np.array([3]),
        "names": np.array(["person", "bicycle", "car"]),
    }


@pytest.fixture
def folder(tmp_path):
    """Their images below a folder, beside a file that is none of them."""
    images = tmp_path / "images" / "train2017"
    images.mkdir(parents=True)
    for number in IDS:
        (images / f"{number:012d}.jpg").write_bytes(b"\xff\xd8\xff image %d\n" % number)
    (images.parent / "lena.jpg").write_bytes(b"another")
    return images.parent


def bare_repository(folder):
    """The same files, committed, as a bare repository."""
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@example.org", "-C", str(folder)]
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "images"]):
        subprocess.run([*git, *command], check=True)
    bare = folder.parent / "bare"
    subprocess.run(["git", "clone", "-q", "--bare", str(folder), str(bare)], check=True)
    return bare


def contents(out):
    found = {}
    for path in sorted(out.glob("*.tar")):
        with tarfile.open(path) as tar:
            found |= {(path.name, member.name): tar.extractfile(member).read() for member in tar}
    return found


@pytest.mark.parametrize(
    "make_source", [lambda folder: folder, bare_repository], ids=["folder", "repository"]
)
def test_shards_have_the_split_labels_and_bytes_of_the_images(tmp_path, folder, labels, make_source):
    out = tmp_path / "shards"
    shards = coco_shards(find_images(make_source(folder)), labels, samples_per_shard=3)
    assert sum(written.num_samples for written in write(shards, out)) == 5
    found = contents(out)
    images = {number: b"\xff\xd8\xff image %d\n" % number for number in IDS}
    assert found["train-000000.tar", "000000000030.jpg"] == images[30]
    assert json.loads(found["train-000000.tar", "000000000030.json"]) == {"full": [0, 1, 2], "given": [0]}
    assert found["train-000001.tar", "000000581929.jpg"] == images[581929]
    assert found["val-000000.tar", "000000100012.jpg"] == images[100012]
    assert len(found) == 10
    index, problems = scan([str(path) for path in sorted(out.glob("train-*.tar"))])
    assert not problems
    assert index.num_samples == 4
    assert (out / "classes.txt").read_text() == "person\nbicycle\ncar\n"


def test_smaller_share_is_part_of_a_larger_one():
    rows = np.arange(100, 200)
    quarter, half = share_of(rows, 0.25), share_of(rows, 0.5)
    assert (len(quarter), len(half)) == (25, 50)
    assert set(quarter) < set(half) < set(rows)
    assert (np.diff(quarter) > 0).all()
    np.testing.assert_array_equal(quarter, share_of(rows, 0.25))


def test_missing_image_is_named(folder, labels):
    (folder / "train2017" / "000000000025.jpg").unlink()
    with pytest.raises(UserError, match=r"image 25 of the labels is not there, expected 000000000025\.jpg"):
        coco_shards(find_images(folder), labels)
