"""Tars that are damaged, hostile or of another time: each bad sample is named, all others stay."""

import errno
import gzip
import io
import os
import tarfile
from dataclasses import replace

import numpy as np
import pytest

from bigscl.data import open_tar as sources
from bigscl.data.build_index import scan
from bigscl.data.epoch_plan import evaluation_plan
from bigscl.data.index import Index, default_path, load_index
from bigscl.data.loader import BadSamples, Loader
from bigscl.data.read_samples import read_metadata
from bigscl.data.transforms import EvaluationTransform
from tests.builders import classed, jpeg, labelled, write_shards, write_tar

TRANSFORM = EvaluationTransform(size=16)


def keys(index: Index) -> list[str]:
    return [index.key(n) for n in index.ids().tolist()]


def blocks(members: list[tuple[str, bytes]]) -> bytes:
    """Entries of a tar without its end."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
        return file.getvalue()[: tar.offset]


def entry(name: str = "x.jpg", content: bytes = b"", **fields) -> bytes:
    """One entry whose header says what it likes."""
    info = tarfile.TarInfo(name)
    for field, value in {"size": len(content), **fields}.items():
        setattr(info, field, value)
    return info.tobuf(tarfile.GNU_FORMAT) + content + bytes(-len(content) % 512)


def pax(records: bytes, size: int | None = None) -> bytes:
    return entry("p", records, type=tarfile.XHDTYPE, **({} if size is None else {"size": size}))


def base256(name: str, field: bytes) -> bytes:
    """An entry with these 12 bytes for its size, and a checksum that is right."""
    header = bytearray(entry(name))
    header[124:136] = field
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header)


A, Z = blocks(classed("a", 1, 0)), blocks(classed("z", 2, 1))
END = bytes(1024)
DAMAGES = {
    "size beyond the file": entry("evil.jpg", size=2**40),
    "size of 2 ** 62": entry("evil.jpg", size=2**62),
    "negative size": entry("evil.jpg", size=-1024),
    "size of -1 in base 256": base256("evil.jpg", b"\xff" * 12),
    "size of 2 ** 88 in base 256": base256("evil.jpg", b"\x80" + b"\xff" * 11),
    "size that is no number": base256("evil.jpg", b"8z9!\0\0\0\0\0\0\0\0"),
    "size that is not ascii": base256("evil.jpg", b"\xe9" * 11 + b"\0"),
    "a block of noise": bytes(range(256)) * 2,
    "pax header of 1 GB": pax(b"", 1 << 30),
    "long name of 1 GB": entry("n", size=1 << 30, type=tarfile.GNUTYPE_LONGNAME),
    "pax length of 5,000 digits": pax(b"9" * 5000 + b" path=x.jpg\n"),
    "pax length of 0": pax(b"0 path=x.jpg\n" * 1000),
    "pax length beyond": pax(b"999999 path=x.jpg\n"),
    "name of half a million slashes": pax(b"1000015 path=" + b"a/" * 500_000 + b"\n") + entry("x.jpg"),
}


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_entry_costs_only_itself(tmp_path, name, compressed):
    content = A + DAMAGES[name] + Z + END
    (tmp_path / "x.tar").write_bytes(gzip.compress(content) if compressed else content)
    index, problems = scan(str(tmp_path / "x.tar"), num_classes=2)
    assert keys(index) == ["a", "z"]
    assert name.startswith("pax length") or len(problems) >= 1
    assert all("Error" not in problem.what for problem in problems)


def test_nuls_inside_a_tar_are_not_taken_for_its_end(tmp_path):
    (tmp_path / "x.tar").write_bytes(A + bytes(4096) + Z + END)
    index, problems = scan(str(tmp_path / "x.tar"))
    assert keys(index) == ["a"]
    assert len(problems) == 1
    assert f"NULs at byte {len(A)}" in problems[0].what


def test_a_tar_of_nothing_but_damage_is_given_up_after_a_while(tmp_path):
    (tmp_path / "x.tar").write_bytes(A + entry("evil.jpg", size=2**40) * 5000)
    index, problems = scan(str(tmp_path / "x.tar"))
    assert keys(index) == ["a"]
    assert 100 <= len(problems) <= 102
    assert "given up" in problems[-1].what


# Labels.

DEEP = b"[" * 100_000 + b"]" * 100_000
LABELS = {
    "deep json": ("json", DEEP),
    "deep json as a label": ("json", b'{"labels": ' + b"[" * 900 + b"]" * 900 + b"}"),
    "json of 5,000 digits": ("json", b'{"labels": [' + b"9" * 5000 + b"]}"),
    "json of 4,000 digits": ("json", b'{"labels": [' + b"9" * 4000 + b"]}"),
    "json of a huge float": ("json", b'{"labels": [1e999]}'),
    "json of NaN": ("json", b'{"labels": [NaN]}'),
    "json of a bool": ("json", b'{"labels": [true]}'),
    "json of a null": ("json", b'{"labels": null}'),
    "json of a name": ("json", b'"labels"'),
    "json with a lone surrogate": ("json", b'{"labels": ["\\ud800"]}'),
    "json that is not UTF-8": ("json", b'{"labels": ["\xe9"]}'),
    "json of NULs": ("json", bytes(512)),
    "empty json": ("json", b""),
    "cls of 5,000 digits": ("cls", b"7" * 5000),
    "cls of NUL": ("cls", b"\0"),
    "cls of another alphabet": ("cls", "٣".encode()),
    "cls with an escape": ("cls", b"\x1b[2J"),
    "empty cls": ("cls", b""),
    "negative cls": ("cls", b"-0"),
    "cls of infinity": ("cls", b"inf"),
}


@pytest.mark.parametrize("name", LABELS)
def test_a_bad_label_costs_only_its_sample(tmp_path, name):
    kind, content = LABELS[name]
    members = [*classed("a", 1, 0), ("bad.jpg", jpeg(1)), (f"bad.{kind}", content), *classed("z", 2, 1)]
    index, problems = scan(str(write_tar(tmp_path / "x.tar", members)), num_classes=2)
    assert keys(index) == ["a", "z"]
    assert {problem.key for problem in problems} == {"bad"}
    assert all(len(str(problem)) < 500 and str(problem).isprintable() for problem in problems)


def test_a_label_of_many_megabytes_is_named_and_not_read(tmp_path):
    members = [
        ("bad.jpg", jpeg(1)),
        ("bad.json", b" " * (1 << 24) + b"{}"),
        ("bad.cls", b"1"),
        *classed("z", 2, 1),
    ]
    index, problems = scan(str(write_tar(tmp_path / "x.tar", members)))
    assert keys(index) == ["z"]
    assert "json: 16777218 bytes" in problems[0].what


# Names.


def test_a_key_that_is_not_utf8_is_kept_named_and_read(tmp_path):
    path = tmp_path / "x.tar"
    path.write_bytes(
        blocks([*classed("a", 1, 0), *classed("caf\udce9", 2, 1), *labelled("\x1b[2Jevil", 3, full=[1])])
        + END
    )
    index, problems = scan(str(path))
    assert keys(index) == ["a", "caf\\xe9", "\x1b[2Jevil"]
    assert [index.name(n) for n in range(3)] == ["x.tar/a", "x.tar/caf\\xe9", "x.tar/\\x1b[2Jevil"]
    assert [str(problem) for problem in problems] == [
        f"{path}: caf\\xe9: the key is not UTF-8; the sample is kept, other bytes written as \\x.."
    ]
    assert sum(map(len, loader(index))) == 3
    index.save(tmp_path / "index.npz")
    assert keys(load_index(str(path), tmp_path / "index.npz")) == keys(index)
    assert read_metadata(index, np.array([1, 2])) == {1: {}, 2: {"full": [1]}}


def test_links_and_sparse_files_are_named(tmp_path):
    content = A + entry("link.jpg", type=tarfile.SYMTYPE, linkname="a.jpg")
    content += entry("hard.jpg", type=tarfile.LNKTYPE, linkname="a.jpg", size=7)
    content += entry("sparse.jpg", b"x" * 512, type=tarfile.GNUTYPE_SPARSE) + Z + END
    (tmp_path / "x.tar").write_bytes(content)
    index, problems = scan(str(tmp_path / "x.tar"))
    assert keys(index) == ["a", "z"]
    assert [problem.key for problem in problems if "link or a sparse file" in problem.what] == [
        "link",
        "hard",
        "sparse",
    ]


def test_an_empty_image_is_named_and_kept(tmp_path):
    members = [("bad.jpg", b""), ("bad.cls", b"1"), *classed("z", 2, 1)]
    index, problems = scan(str(write_tar(tmp_path / "x.tar", members)))
    assert keys(index) == ["bad", "z"]
    assert "0 bytes" in problems[0].what
    bad = BadSamples(index, 2, max_share=1)
    assert sum(map(len, loader(index, bad=bad))) == 1


# Reading.


def loader(index: Index, **options) -> Loader:
    return Loader(
        index, evaluation_plan(index.shard_sizes, index.rows_per_shard, batch_size=4), 0, TRANSFORM, **options
    )


class Failing(io.FileIO):
    """A file on a disk with bad sectors."""

    bad = range(0)

    def readinto(self, buffer):
        start = self.tell()
        if start < self.bad.stop and start + len(buffer) > self.bad.start:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().readinto(buffer)


@pytest.fixture
def bad_sectors(monkeypatch):
    """Sets the bytes of every shard that cannot be read."""

    def choose(bad: range) -> None:
        monkeypatch.setattr(Failing, "bad", bad)
        monkeypatch.setattr(sources, "open", lambda path, mode, **_: Failing(path, "r"), raising=False)

    return choose


def test_an_io_error_in_a_label_costs_its_sample(tmp_path, bad_sectors):
    path = write_tar(tmp_path / "x.tar", [member for n in range(4) for member in classed(f"k{n}", n, 0)])
    with tarfile.open(path) as tar:
        at = tar.getmember("k1.cls").offset_data
    bad_sectors(range(at, at + 512))
    index, problems = scan(str(path))
    assert keys(index) == ["k0", "k2", "k3"]
    assert [problem.key for problem in problems] == ["k1"]
    assert "Input/output error" in problems[0].what


def test_an_io_error_in_a_header_costs_what_is_next_to_it(tmp_path, bad_sectors, monkeypatch):
    monkeypatch.setattr("bigscl.data.tar.STEP", 512)
    path = write_tar(tmp_path / "x.tar", [member for n in range(4) for member in classed(f"k{n}", n, 0)])
    with tarfile.open(path) as tar:
        at = tar.getmember("k1.jpg").offset
    bad_sectors(range(at, at + 512))
    index, problems = scan(str(path))
    assert keys(index) == ["k0", "k2", "k3"]
    assert any("Input/output error" in problem.what for problem in problems)


def test_an_io_error_in_an_image_is_skipped_and_counted(tmp_path, bad_sectors):
    index, _ = scan(write_shards(tmp_path, [5]))
    at = int(index.image_offsets[2])
    bad_sectors(range(at + 5, at + 6))
    bad = BadSamples(index, 5, max_share=1)
    assert sum(map(len, loader(index, bad=bad))) == 4
    assert "Input/output error" in bad.reasons[2]


def test_reads_that_return_less_than_asked_for_are_continued(tmp_path, monkeypatch):
    class Slow(io.FileIO):
        def readinto(self, buffer):
            return super().readinto(memoryview(buffer)[:100])

    monkeypatch.setattr(sources, "open", lambda path, mode, **_: Slow(path, "r"), raising=False)
    index, problems = scan(write_shards(tmp_path, [5]))
    assert problems == []
    assert sum(map(len, loader(index))) == 5


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize(
    ("offset", "size"), [(2**40, 100), (1024, 2**40), (-5, 100), (0, 100), (1024, -5), (2**62, 2**62)]
)
def test_an_index_that_points_out_of_its_tar_reads_nothing(tmp_path, offset, size, compressed):
    members = [member for n in range(3) for member in classed(f"k{n}", n, 0)]
    path = write_tar(tmp_path / "x.tar", members, "w:gz" if compressed else "w")
    index, _ = scan(str(path))
    offsets, sizes = index.image_offsets.copy(), index.image_bytes.copy()
    offsets[1], sizes[1] = offset, size
    broken = replace(index, image_offsets=offsets, image_bytes=sizes)
    bad = BadSamples(broken, 3, max_share=1)
    assert sum(map(len, loader(broken, bad=bad))) == 2
    assert list(bad.reasons) == [1]


def test_metadata_that_cannot_be_read_is_an_error_with_its_name(tmp_path):
    path = write_tar(tmp_path / "x.tar", [*classed("a", 1, 0), ("a.json", b'{"labels": [0]}')])
    index, _ = scan(str(path))
    content = path.read_bytes()
    path.write_bytes(content.replace(b'{"labels": [0]}', b'{"labels": [0}}'))
    with pytest.raises(sources.Unreadable, match=r"x\.tar/a: .*json"):
        read_metadata(index, np.array([0]))


def test_shards_of_another_length_are_one_error_that_is_cut(tmp_path):
    shards = write_shards(tmp_path, [1] * 30)
    index, _ = scan(shards)
    index.save(default_path(shards))
    for shard in shards:
        with open(shard, "ab") as file:
            file.write(bytes(512))
    with pytest.raises(ValueError, match=r"30 shards have changed: .*and 20 more\. Run `bigscl index` again"):
        load_index(shards)
    for shard in shards:
        os.remove(shard)
    with pytest.raises(FileNotFoundError, match=r"30 shards are missing: .*and 20 more"):
        load_index(shards)


def test_thousands_of_bad_samples_are_counted_and_some_named(tmp_path, caplog):
    members = [member for n in range(500) for member in ((f"k{n}.jpg", b"broken"), (f"k{n}.cls", b"0"))]
    index, _ = scan(str(write_tar(tmp_path / "x.tar", [*members, *classed("z", 1, 0)])))
    bad = BadSamples(index, 501, max_share=0.9)
    with pytest.raises(ValueError, match=r"(?s)452 of 501 .*x\.tar/k0.*and 432 more"):
        list(loader(index, bad=bad))
    warned = [record.getMessage() for record in caplog.records if "skipped" in record.getMessage()]
    assert len(warned) == 101
    assert "further" in warned[-1]
    assert len(bad.reasons) == 452
