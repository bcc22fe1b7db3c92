"""Writing shards: deterministic bytes, whole files only, resumed runs, changed settings refused."""

import io
import json
import tarfile
from dataclasses import dataclass

import numpy as np
import pytest
from PIL import Image

from bigscl.datasets.writer import MultiLabel, Sample, Shards, write
from tests.builders import encoded, picture


@dataclass(frozen=True)
class Bytes:
    """A picture that is in memory; `broken` stands for a source that cannot be read."""

    content: bytes
    broken: bool = False
    extension: str = "jpg"

    def encoded(self):
        if self.broken:
            raise OSError("disk on fire")
        return self.extension, self.content


def samples(count, broken=()):
    return [
        Sample(
            key=f"n{i:04d}",
            image=Bytes(bytes([i]) * (100 + i), i in broken),
            label=MultiLabel(full=(1, i), given=(i,)),
        )
        for i in range(count)
    ]


def shards(count=7, broken=(), **changes):
    fields = {
        "kind": "test",
        "classes": ["a", "b b", "c"],
        "parts": {"train": samples(count, broken), "val": samples(2)},
        "settings": {"seed": 1, "resize": None},
        "samples_per_shard": 3,
    }
    return Shards(**{**fields, **changes})


def read(path):
    """The samples of a shard as WebDataset groups them."""
    # Here, because the processes that write shards import this file: torch would take them seconds.
    from webdataset.tariterators import group_by_keys, tar_file_expander

    with path.open("rb") as stream:
        return list(group_by_keys(tar_file_expander([{"url": str(path), "stream": stream}])))


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_shards_hold_all_samples_in_order_as_webdataset_reads_them(tmp_path):
    written = list(write(shards(), tmp_path))
    names = ["train-000000.tar", "train-000001.tar", "train-000002.tar", "val-000000.tar"]
    assert [shard.name for shard in written] == names
    assert [shard.num_samples for shard in written] == [3, 3, 1, 2]
    found = [sample for name in names[:3] for sample in read(tmp_path / name)]
    assert [sample["__key__"] for sample in found] == [f"n{i:04d}" for i in range(7)]
    assert [sample["jpg"] for sample in found] == [bytes([i]) * (100 + i) for i in range(7)]
    assert [json.loads(sample["json"]) for sample in found] == [
        {"full": [1, i], "given": [i]} for i in range(7)
    ]
    assert (tmp_path / "classes.txt").read_text() == "a\nb b\nc\n"


def test_webdataset_decodes_what_was_written(tmp_path):
    from webdataset.filters import decode

    contents = [encoded(picture(i), ("JPEG", "PNG")[i % 2]) for i in range(7)]
    labels = [MultiLabel(full=(1, 4), given=(4,)) if i % 3 else i for i in range(7)]
    made = [
        Sample(key=f"n{i}", image=Bytes(content, extension=("jpg", "png")[i % 2]), label=labels[i])
        for i, content in enumerate(contents)
    ]
    list(write(shards(parts={"train": made}), tmp_path))
    files = sorted(tmp_path.glob("*.tar"))
    found = list(decode("rgb8")(sample for file in files for sample in read(file)))
    assert [sample["__key__"] for sample in found] == [f"n{i}" for i in range(7)]
    for i, sample in enumerate(found):
        pixels = np.asarray(Image.open(io.BytesIO(contents[i])).convert("RGB"))
        np.testing.assert_array_equal(sample[("jpg", "png")[i % 2]], pixels)
        if i % 3:
            assert sample["json"] == {"full": [1, 4], "given": [4]}
        else:
            assert sample["cls"] == i


def test_class_numbers_go_to_cls_members_as_in_public_tars(tmp_path):
    single = [Sample(key="n01440764_10026", image=Bytes(b"x"), label=7)]
    list(write(shards(parts={"train": single}), tmp_path))
    with tarfile.open(tmp_path / "train-000000.tar") as tar:
        assert tar.getnames() == ["n01440764_10026.jpg", "n01440764_10026.cls"]
        assert tar.extractfile("n01440764_10026.cls").read() == b"7"


def test_optional_fields_appear_only_where_they_are_known():
    everything = MultiLabel(full=(1, 2), given=(2,), negatives=(0,), boxes=((1, 0.0, 0.5, 1.0, 0.75),))
    assert everything.fields() == {
        "full": (1, 2),
        "given": (2,),
        "negatives": (0,),
        "boxes": ((1, 0.0, 0.5, 1.0, 0.75),),
    }
    assert MultiLabel(full=(1,), given=(1,)).fields() == {"full": (1,), "given": (1,)}
    assert MultiLabel(full=None, given=(1,)).fields() == {"given": (1,)}


def test_the_path_of_an_image_is_in_its_json():
    one = Sample(key="a", image=Bytes(b"x"), label=7, source="dog/a.jpg")
    assert one.label_members() == [("cls", b"7"), ("json", b'{"source":"dog/a.jpg"}')]
    several = Sample(key="a", image=Bytes(b"x"), label=MultiLabel(full=None, given=(7,)), source="a.jpg")
    assert several.label_members() == [("json", b'{"given":[7],"source":"a.jpg"}')]


@pytest.mark.parametrize("workers", [0, 2])
def test_bytes_depend_on_nothing_but_the_samples(tmp_path, workers):
    list(write(shards(), tmp_path / "one"))
    list(write(shards(), tmp_path / "two", workers=workers))
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    with tarfile.open(tmp_path / "one" / "train-000000.tar") as tar:
        assert {(info.mtime, info.uid, info.gid, info.uname, info.gname) for info in tar} == {
            (0, 0, 0, "", "")
        }


def test_bytes_are_those_of_a_plain_tar_without_owner_or_time(tmp_path):
    keys = ["k" * 150, "größe 日本", "n1"]
    list(
        write(
            shards(parts={"train": [Sample(key=key, image=Bytes(b"x"), label=3) for key in keys]}), tmp_path
        )
    )
    expected = io.BytesIO()
    with tarfile.open(fileobj=expected, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, content in [
            (f"{key}.{end}", c) for key in keys for end, c in (("jpg", b"x"), ("cls", b"3"))
        ]:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    assert (tmp_path / "train-000000.tar").read_bytes() == expected.getvalue()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_failed_run_leaves_whole_shards_only_and_the_next_finishes(tmp_path, workers):
    with pytest.raises(OSError, match="disk on fire"):
        list(write(shards(broken={4}), tmp_path / "out", workers=workers))
    assert "train-000001.tar" not in contents(tmp_path / "out")
    assert not list((tmp_path / "out").glob("*.partial"))
    assert not list((tmp_path / "out").glob(".*.partial"))
    first = (tmp_path / "out" / "train-000000.tar").stat()
    resumed = {shard.name: shard.skipped for shard in write(shards(), tmp_path / "out")}
    assert resumed["train-000000.tar"]
    assert not resumed["train-000001.tar"]
    assert (tmp_path / "out" / "train-000000.tar").stat() == first
    list(write(shards(), tmp_path / "fresh"))
    assert contents(tmp_path / "out") == contents(tmp_path / "fresh")


def test_a_killed_run_leaves_no_trace_in_the_next(tmp_path):
    list(write(shards(), tmp_path / "fresh"))
    list(write(shards(parts={"val": samples(2)}), tmp_path / "out"))
    (tmp_path / "out" / ".train-000000.tar.partial").write_bytes(b"half a shard")
    list(write(shards(), tmp_path / "out"))
    assert contents(tmp_path / "out") == contents(tmp_path / "fresh")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"settings": {"seed": 2, "resize": None}}, "seed was 1, is 2"),
        ({"settings": {"seed": 1, "resize": 256}}, "resize was None, is 256"),
        ({"samples_per_shard": 4}, "samples_per_shard was 3, is 4"),
        ({"kind": "voc"}, "kind was test, is voc"),
        ({"classes": ["a", "b"]}, "classes was"),
        ({"count": 8}, "part train was"),
    ],
)
def test_a_run_with_other_settings_is_refused_and_changes_nothing(tmp_path, changes, message):
    list(write(shards(), tmp_path))
    before = contents(tmp_path)
    with pytest.raises(ValueError, match=message):
        list(write(shards(**changes), tmp_path))
    assert contents(tmp_path) == before


def test_another_part_may_be_added_later(tmp_path):
    parts = {"train": samples(4), "val": samples(2)}
    for part in parts:
        list(write(shards(parts={part: parts[part]}), tmp_path / "by parts"))
    list(write(shards(parts=parts), tmp_path / "at once"))
    assert contents(tmp_path / "by parts") == contents(tmp_path / "at once")


def test_foreign_tars_are_not_mixed_with(tmp_path):
    (tmp_path / "train-000000.tar").write_bytes(b"mine")
    with pytest.raises(ValueError, match="Use an empty folder"):
        list(write(shards(), tmp_path))
    assert contents(tmp_path) == {"train-000000.tar": b"mine"}


@pytest.mark.parametrize(
    ("keys", "message"),
    [([], "no samples"), (["a", "b", "a"], "1 keys occur more than once, e.g. a"), (["a.b"], "has a dot")],
)
def test_keys_that_webdataset_would_confuse_are_refused(keys, message):
    with pytest.raises(ValueError, match=message):
        shards(parts={"val": [Sample(key=key, image=Bytes(b""), label=0) for key in keys]})
