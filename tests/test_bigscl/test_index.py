import gzip
import io
import json
import mmap
import os
import re
import tarfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from webdataset import tariterators

from bigscl.common.files import BadFile
from bigscl.data.build_index import NoSamples, scan
from bigscl.data.index import Index, default_path, load_index, sample_ids, short_names, with_fingerprint
from bigscl.data.labels.training_labels import draw_given
from bigscl.data.open_tar import open_shard
from bigscl.data.read_samples import read_metadata
from bigscl.data.tar import expand, members
from bigscl.store import Ragged
from tests.builders import VOC, WDS, classed, jpeg, labelled, real_data, write_shards, write_tar
from tests.servers import web_server


@pytest.fixture
def labelled_shards(tmp_path):
    """Two shards with given and full labels, negatives, and sizes 3 and 2."""
    first = [
        *labelled("a", 0, full=[0, 2], given=[2]),
        *labelled("b", 1, full=[1], given=[1], negatives=[0, 3]),
        *labelled("c", 2, full=[]),
    ]
    second = [*labelled("d", 3, full=[3, 0, 1], given=[3]), *labelled("e", 4, full=[2])]
    return [str(write_tar(tmp_path / "x-0.tar", first)), str(write_tar(tmp_path / "x-1.tar", second))]


def keys(index: Index) -> list[str]:
    return [index.key(n) for n in index.ids()]


def test_rows_are_numbered_by_shard_and_position(labelled_shards):
    index, problems = scan(labelled_shards)
    assert problems == []
    assert index.shard_sizes.tolist() == [3, 2]
    assert index.rows_per_shard == 3
    assert index.ids().tolist() == [0, 1, 2, 3, 4]
    assert keys(index) == ["a", "b", "c", "d", "e"]
    assert index.name(4) == "x-1.tar/e"
    assert index.num_classes == 4


def test_labels_are_positive_negative_or_unknown(labelled_shards):
    index, _ = scan(labelled_shards, num_classes=4)
    given = index.labels_of(np.array([1, 0, 2, 3]))
    assert given.tolist() == [[0, 1, -1, 0], [-1, -1, 1, -1], [-1, -1, -1, -1], [-1, -1, -1, 1]]
    assert index.labels_of(np.array([0, 3]), "full").tolist() == [[1, 0, 1, 0], [1, 1, 0, 1]]


def test_annotations_are_the_positives_and_their_fingerprint_tells_which(labelled_shards):
    index, _ = scan(labelled_shards, num_classes=4)
    given, full = index.annotations(), index.annotations("full")
    assert given.given.values.tolist() == [2, 1, 3, 2]
    assert [indices.tolist() for indices in full.of_shard(1).nonzero()] == [[0, 0, 0, 1], [0, 1, 3, 2]]
    assert given.counts().tolist() == [0, 1, 2, 1]
    assert len({given.fingerprint, full.fingerprint, index.fingerprint}) == 3
    assert scan(labelled_shards, num_classes=4)[0].annotations().fingerprint == given.fingerprint


def test_full_labels_are_refused_where_the_shards_do_not_carry_them(tmp_path):
    index, _ = scan(write_shards(tmp_path, [3]))
    with pytest.raises(ValueError, match="full labels"):
        index.labels_of(np.array([0]), "full")


def test_saved_index_is_loaded_equal(labelled_shards, tmp_path):
    index, _ = scan(labelled_shards, class_names=["cat", "dog", "eel", "fox"])
    index.save(tmp_path / "index.npz")
    loaded = load_index(labelled_shards, tmp_path / "index.npz")
    assert loaded.fingerprint == index.fingerprint == with_fingerprint(loaded).fingerprint
    assert loaded.class_names == ("cat", "dog", "eel", "fox")
    for name in ("shard_bytes", "shard_sizes", "image_offsets", "image_bytes"):
        assert np.array_equal(getattr(loaded, name), getattr(index, name))
    for name in ("keys", "given", "negatives", "full"):
        left, right = getattr(loaded, name), getattr(index, name)
        assert np.array_equal(left.offsets, right.offsets)
        assert np.array_equal(left.values, right.values)


def test_an_index_without_full_labels_stays_so(tmp_path):
    shards = write_shards(tmp_path, [3, 1])
    scan(shards)[0].save(default_path(shards))
    assert load_index(shards).full is None


def test_the_fingerprint_is_of_the_data_not_of_its_place(tmp_path, labelled_shards):
    (tmp_path / "moved").mkdir()
    for shard in labelled_shards:
        os.link(shard, tmp_path / "moved" / os.path.basename(shard))
    assert scan(str(tmp_path / "moved"))[0].fingerprint == scan(labelled_shards)[0].fingerprint


@pytest.mark.parametrize(
    "other",
    [
        labelled("a", 0, full=[0], given=[2]),  # a label
        labelled("z", 0, full=[0, 2], given=[2]),  # a key
        labelled("a", 9, full=[0, 2], given=[2]),  # an image
        labelled("a", 0, full=[0, 2], given=[2], negatives=[3]),
    ],
)
def test_other_data_has_another_fingerprint(tmp_path, other):
    one = write_tar(tmp_path / "x.tar", labelled("a", 0, full=[0, 2], given=[2]))
    before = scan(str(one), num_classes=4)[0].fingerprint
    write_tar(one, other)
    assert scan(str(one), num_classes=4)[0].fingerprint != before


def test_an_index_of_other_shards_is_refused(tmp_path):
    shards = write_shards(tmp_path, [1, 1, 1])
    scan(shards)[0].save(default_path(shards))
    with pytest.raises(ValueError, match=r"made for 3 shards, these are 2; they differ in train-000002\.tar"):
        load_index(shards[:2])


@pytest.mark.parametrize("content", [b"", b"PK nonsense", b"\x93NUMPY"])
def test_a_file_that_is_no_index_is_refused(tmp_path, content):
    shards = write_shards(tmp_path, [1])
    default_path(shards).write_bytes(content)
    with pytest.raises(ValueError, match="not an index"):
        load_index(shards)


@given(
    st.lists(st.lists(st.integers(0, 9), unique=True, max_size=6), min_size=1, max_size=8), st.integers(1, 3)
)
@settings(max_examples=60, deadline=None)
def test_drawn_labels_are_some_of_the_full_ones(rows, count):
    rows = [sorted(row) for row in rows]
    index = an_index(np.array([len(rows)]), full=rows, num_classes=10)
    drawn = draw_given(index, seed=3, positives=count, negatives=2)
    for n, row in enumerate(rows):
        assert len(drawn.given[n]) == min(count, len(row))
        assert set(drawn.given[n].tolist()) <= set(row)
        assert len(drawn.negatives[n]) == min(2, 10 - len(row))
        assert not set(drawn.negatives[n].tolist()) & set(row)
    again = draw_given(index, seed=3, positives=count, negatives=2)
    assert again.fingerprint == drawn.fingerprint
    assert again.full is index.full


def test_drawn_labels_are_drawn_without_bias_and_depend_on_the_seed():
    index = an_index(np.array([6000]), full=[[1, 4, 7]] * 6000, num_classes=8)
    one, two = draw_given(index, seed=1, negatives=1), draw_given(index, seed=2, negatives=1)
    assert np.abs(np.bincount(one.given.values)[[1, 4, 7]] - 2000).max() < 200
    assert np.abs(np.bincount(one.negatives.values)[[0, 2, 3, 5, 6]] - 1200).max() < 160
    assert 0.2 < (one.given.values == two.given.values).mean() < 0.5
    assert len({index.fingerprint, one.fingerprint, two.fingerprint}) == 3


def test_draws_are_those_of_earlier_revisions():
    index = an_index(np.array([5]), full=[[1, 4, 7], [0, 2], [], [5], [1, 2, 3, 6]], num_classes=8)
    drawn = draw_given(index, seed=3, negatives=2)
    assert [drawn.given[row].tolist() for row in range(5)] == [[4], [2], [], [5], [1]]
    assert [drawn.negatives[row].tolist() for row in range(5)] == [[0, 3], [1, 6], [0, 5], [0, 3], [0, 5]]


def an_index(sizes, *, full=None, num_classes=1000) -> Index:
    """An index made up without shards."""
    ids, rows = sample_ids(sizes), len(sizes) * int(sizes.max())
    single = Ragged.from_lengths(np.ones(len(ids)), np.arange(len(ids), dtype=np.uint32) % num_classes)
    labels = (single if full is None else Ragged.of(full)).spread(ids, rows)
    numbers = np.random.default_rng(0).integers(50_000, 200_000, rows)
    return Index(
        urls=tuple(f"data/train-{n:06d}.tar" for n in range(len(sizes))),
        shard_bytes=sizes * 100_000,
        shard_sizes=sizes,
        class_names=tuple(map(str, range(num_classes))),
        keys=Ragged.of_bytes([f"n{n % 1000:08d}_{n}".encode() for n in range(len(ids))]).spread(ids, rows),
        image_offsets=np.cumsum(numbers),
        image_bytes=numbers,
        given=labels,
        negatives=Ragged(np.zeros(rows + 1, np.int64), np.empty(0, np.uint32)),
        full=labels,
        fingerprint="",
    )


def test_an_index_is_small(tmp_path, monkeypatch):
    """A tenth of ImageNet."""
    index = with_fingerprint(an_index(np.array([1000] * 128 + [1167])))
    assert index.num_samples == 129_167
    index.save(tmp_path / "index.npz")
    monkeypatch.setattr("bigscl.data.index.check_shards", lambda index: None)
    # 1.2 MB.
    loaded = load_index(list(index.urls), tmp_path / "index.npz")
    assert (tmp_path / "index.npz").stat().st_size < 10e6
    assert loaded.name(1167 * 128 + 1166) == "train-000128.tar/n00000166_129166"


def test_a_large_index_is_mapped_and_equals_the_compressed_one(tmp_path, labelled_shards, monkeypatch):
    index, _ = scan(labelled_shards, num_classes=4)
    index.save(tmp_path / "small.npz")
    monkeypatch.setattr("bigscl.data.index.MAPPED_ROWS", 0)
    index.save(tmp_path / "large.npz")
    small, large = (load_index(labelled_shards, tmp_path / f"{name}.npz") for name in ("small", "large"))
    for name in ("shard_bytes", "shard_sizes", "image_offsets", "image_bytes"):
        assert np.array_equal(getattr(small, name), getattr(large, name))
    for name in ("keys", "given", "negatives", "full"):
        rows = getattr(large, name)
        assert np.array_equal(rows.values, getattr(small, name).values)
        for mapped in (rows.offsets, rows.values):
            assert isinstance(mapped.base.base.obj, mmap.mmap)
            assert mapped.flags.aligned
            assert not mapped.flags.writeable
    assert large.fingerprint == index.fingerprint == with_fingerprint(large).fingerprint
    assert large.annotations("full").of_rows(large.ids()).tolist() == (
        index.annotations("full").of_rows(index.ids()).tolist()
    )
    with np.load(tmp_path / "large.npz") as file:
        assert np.array_equal(file["keys.values"], index.keys.values)


def test_a_flipped_byte_of_a_mapped_index_is_found(tmp_path, labelled_shards, monkeypatch):
    monkeypatch.setattr("bigscl.data.index.MAPPED_ROWS", 0)
    path = tmp_path / "index.npz"
    scan(labelled_shards, num_classes=4)[0].save(path)
    content, values = path.read_bytes(), load_index(labelled_shards, path).keys.values.tobytes()
    for place in (content.index(values), content.index(b"image_offsets.npy") + 90):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with pytest.raises(BadFile, match=r"index.npz: not an index of bigscl"):
            load_index(labelled_shards, path)


# What is wrong with shards.


def problems_of(tmp_path, content: list[tuple[str, bytes]], **options) -> list[tuple[str, str]]:
    good = classed("good", 0, 1)
    _, problems = scan(str(write_tar(tmp_path / "x.tar", good + content)), **options)
    assert all(problem.shard.endswith("x.tar") for problem in problems)
    return [(problem.key, problem.what) for problem in problems]


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ([("bad.jpg", jpeg(1))], "no label"),
        ([("bad.cls", b"1")], "no image"),
        ([("bad.txt", b"1"), ("bad.cls", b"1")], "no image"),
        (classed("bad", 1, 1000), "given: 1000 is out of range, expected 0 to 999"),
        ([("bad.jpg", jpeg(1)), ("bad.cls", b"-1")], "expected class numbers"),
        ([("bad.jpg", jpeg(1)), ("bad.cls", b"cat")], "expected class numbers"),
        (labelled("bad", 1, full=[1, 1000]), "full: 1000 is out of range"),
        (labelled("bad", 1, full=3), "expected class numbers"),
        (labelled("bad", 1, full=["cat"]), "expected class numbers"),
        (labelled("bad", 1, full=[True]), "expected class numbers"),
        (labelled("bad", 1, caption="a dog"), "no label"),
        (labelled("bad", 1, full=[1], negatives=[1, 2]), r"negatives: \[1\] are positives as well"),
        ([("bad.jpg", jpeg(1)), ("bad.json", b"{oops")], "json: cannot be read"),
        ([("bad.jpg", jpeg(1)), ("bad.json", b"17")], "json: cannot be read"),
        ([("bad.jpg", jpeg(1)), ("bad.jpg", jpeg(2)), ("bad.cls", b"1")], "two members jpg"),
        (
            [*classed("bad", 1, 1), *classed("other", 2, 1), *classed("bad", 1, 1)],
            "occurs before in this shard",
        ),
        ([("bad.jpg", jpeg(1)), ("bad.pkl", b"cos\nsystem\n"), ("bad.pyd", b"x")], "no label"),
    ],
)
def test_a_bad_sample_is_left_out_and_named(tmp_path, content, what):
    found = problems_of(tmp_path, content, num_classes=1000)
    assert [key for key, _ in found] == ["bad"]
    assert re.search(what, found[0][1])


def test_all_problems_of_all_shards_are_found(tmp_path):
    write_tar(
        tmp_path / "0.tar", [*classed("a", 1, 7), ("b.jpg", jpeg(1)), ("c.cls", b"1"), *classed("d", 1, 0)]
    )
    write_tar(tmp_path / "1.tar", [])
    write_tar(tmp_path / "2.tar", classed("d", 1, 0))
    (tmp_path / "3.tar").write_bytes(b"this is no tar" * 100)
    index, problems = scan(str(tmp_path), num_classes=5)
    assert keys(index) == ["d", "d"]
    assert index.shard_sizes.tolist() == [1, 0, 1, 0]
    assert index.ids().tolist() == [0, 2]
    found = [(os.path.basename(problem.shard), problem.key) for problem in problems]
    assert found == [
        ("0.tar", "a"),
        ("0.tar", "b"),
        ("0.tar", "c"),
        ("1.tar", ""),
        ("3.tar", ""),
        ("2.tar", "d"),
    ]
    assert "empty" in problems[3].what
    assert "no tar header" in problems[4].what
    assert "both samples are kept" in problems[5].what


@pytest.mark.parametrize("compressed", [False, True])
def test_a_truncated_tar_keeps_its_whole_samples(tmp_path, compressed):
    shard = tmp_path / "x.tar"
    write_tar(shard, [member for n in range(4) for member in classed(f"k{n}", n, n)])
    with tarfile.open(shard) as tar:
        last = tar.getmember("k3.jpg")
    for cut, whole in ((last.offset_data + 10, 3), (last.offset_data, 3), (last.offset + 100, 3)):
        content = shard.read_bytes()[:cut]
        short = tmp_path / ("short.tgz" if compressed else "short.tar")
        short.write_bytes(gzip.compress(content) if compressed else content)
        index, problems = scan(str(short))
        assert keys(index) == ["k0", "k1", "k2"][:whole]
        assert any("breaks off" in p.what or "ends at byte" in p.what for p in problems)


@pytest.mark.parametrize("compressed", [False, True])
def test_an_image_that_is_cut_off_is_left_out_though_its_label_came_before(tmp_path, compressed):
    members = [member for n in range(3) for member in reversed(classed(f"k{n}", n, n))]
    content = write_tar(tmp_path / "x.tar", members).read_bytes()
    with tarfile.open(tmp_path / "x.tar") as tar:
        content = content[: tar.getmember("k2.jpg").offset_data + 100]
    (tmp_path / "x.tar").write_bytes(gzip.compress(content) if compressed else content)
    index, problems = scan(str(tmp_path / "x.tar"))
    assert keys(index) == ["k0", "k1"]
    assert [problem.key for problem in problems] == ["k2", "k2"]
    assert "cut off" in problems[0].what


def test_shards_without_any_sample_are_refused_with_the_problems(tmp_path):
    with pytest.raises(NoSamples, match="no sample with an image and a label") as caught:
        scan(str(write_tar(tmp_path / "x.tar", [("a.jpg", jpeg(1)), ("b.txt", b"?")])))
    assert [problem.key for problem in caught.value.problems] == ["a", "b", "b"]


def test_more_jobs_find_the_same(tmp_path):
    shards = write_shards(tmp_path, [3, 1, 4])
    write_tar(tmp_path / "train-000003.tar", [("bad.jpg", jpeg(0))])
    one, problems = scan(str(tmp_path))
    two, same = scan(str(tmp_path), jobs=2)
    assert two.fingerprint == one.fingerprint
    assert same == problems
    assert len(one.urls) == len(shards) + 1


# Where shards lie.


def test_patterns_name_shards(tmp_path):
    shards = write_shards(tmp_path, [1, 1, 1])
    (tmp_path / "notes.txt").write_text("no shard")
    assert expand(str(tmp_path)) == shards
    assert expand(str(tmp_path / "*.tar")) == shards
    assert expand(str(tmp_path / "train-{000001..000002}.tar")) == shards[1:]
    assert expand([shards[2], f"file://{shards[0]}"]) == [shards[2], shards[0]]
    assert expand("http://host/{a,b}.tar") == ["http://host/a.tar", "http://host/b.tar"]
    with pytest.raises(ValueError, match="named more than once"):
        expand([shards[0], str(tmp_path)])
    with pytest.raises(ValueError, match="no shards there"):
        expand(str(tmp_path / "nothing-*.tar"))


def test_indexes_of_the_parts_of_a_folder_have_different_names():
    def name(*shards):
        return default_path([f"d/{shard}" for shard in shards]).name

    assert name("train-000000.tar", "train-000001.tar") == "bigscl-index-train.npz"
    assert name("val-000000.tar") == "bigscl-index-val.npz"
    assert name("train-0.tar", "val-0.tar") == name("0.tar", "1.tar") == "bigscl-index.npz"
    assert name("sample.tgz") == "bigscl-index-sample.npz"


def test_names_are_relative_to_the_common_folder():
    assert short_names(["/a/b/train/0.tar", "/a/b/val/0.tar"]) == ("train/0.tar", "val/0.tar")
    assert short_names(["s3://bucket/x/0.tar"]) == ("0.tar",)


def test_long_and_foreign_names_are_read(tmp_path):
    for style, name in (
        (tarfile.GNU_FORMAT, "gnu.tar"),
        (tarfile.PAX_FORMAT, "pax.tar"),
        (tarfile.USTAR_FORMAT, "u.tar"),
    ):
        deep = "folder/" * 12 + "späte_grüße" * (9 if style != tarfile.USTAR_FORMAT else 1)
        with tarfile.open(tmp_path / name, "w", format=style) as tar:
            folder = tarfile.TarInfo("folder")
            folder.type = tarfile.DIRTYPE
            tar.addfile(folder)
            link = tarfile.TarInfo("link.jpg")
            link.type, link.linkname = tarfile.SYMTYPE, "elsewhere"
            tar.addfile(link)
            for extension, content in (("jpg", jpeg(1)), ("cls", b"3")):
                info = tarfile.TarInfo(f"{deep}.{extension}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
        index, problems = scan(str(tmp_path / name))
        assert [problem.key for problem in problems] == ["link"] * 2
        assert keys(index) == [deep]


def test_members_are_those_that_tarfile_finds(tmp_path):
    path = write_shards(tmp_path, [20])[0]
    shard = open_shard(path)
    with tarfile.open(path) as tar:
        expected = [(info.name, info.offset_data, info.size) for info in tar]
    assert [(member.name, member.offset, member.size) for member in members(shard)] == expected
    shard.close()


def test_a_long_name_belongs_to_its_own_entry_alone(tmp_path):
    with tarfile.open(tmp_path / "x.tar", "w", format=tarfile.GNU_FORMAT) as tar:
        folder = tarfile.TarInfo("long" * 50)
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
        link = tarfile.TarInfo("link" * 50)
        link.type, link.linkname = tarfile.SYMTYPE, "target" * 50
        tar.addfile(link)
        info = tarfile.TarInfo("a.cls")
        info.size = 1
        tar.addfile(info, io.BytesIO(b"1"))
    shard = open_shard(str(tmp_path / "x.tar"))
    assert [member.name for member in members(shard)] == ["a.cls"]
    shard.close()


@pytest.fixture
def server(tmp_path):
    with web_server(tmp_path) as address:
        yield address


def test_a_shard_missing_on_a_server_is_a_problem(tmp_path, server):
    write_shards(tmp_path, [3])
    index, problems = scan([f"{server}/train-000000.tar", f"{server}/train-000001.tar"])
    assert index.num_samples == 3
    assert "404" in problems[0].what
    assert problems[0].shard.endswith("train-000001.tar")


def test_pipes_run_only_where_allowed(tmp_path):
    shard = write_shards(tmp_path, [3])[0]
    url = f"pipe:cat {shard} && touch {tmp_path}/ran"
    with pytest.raises(NoSamples) as caught:
        scan(url)
    assert "pipes are allowed" in caught.value.problems[0].what
    assert not (tmp_path / "ran").exists()
    index, problems = scan(url, allow_pipe=True)
    assert problems == []
    assert index.num_samples == 3
    assert (tmp_path / "ran").exists()


# Shards made by others.


def read_by_webdataset(urls):
    for url in urls:
        with open(url, "rb") as stream:
            files = tariterators.tar_file_expander([{"url": url, "stream": stream}])
            yield from tariterators.group_by_keys(files)


@real_data
def test_real_shards_are_indexed_as_webdataset_reads_them():
    index, problems = scan(str(VOC / "val-*.tar"))
    assert problems == []
    samples = list(read_by_webdataset(index.urls))
    assert keys(index) == [sample["__key__"] for sample in samples]
    assert index.num_samples == 1143
    assert index.num_classes == 20
    for n, sample in zip(index.ids(), samples, strict=True):
        fields = json.loads(sample["json"])
        assert index.given[n].tolist() == sorted(fields["observed"])
        assert index.full[n].tolist() == sorted(fields["labels"])
        assert index.image_bytes[n] == len(sample["jpg"])


@real_data
def test_tars_written_by_others_are_read_or_their_lack_of_labels_is_named():
    index, problems = scan(str(WDS / "sample.tgz"))
    assert problems == []
    samples = list(read_by_webdataset(index.urls))
    assert keys(index) == [sample["__key__"] for sample in samples]
    assert index.given.values.tolist() == [int(sample["cls"]) for sample in samples]
    with pytest.raises(NoSamples) as caught:
        scan([str(WDS / "cc12m-train-0000.tar"), str(WDS / "compressed.tar")])
    assert sum("no label" in p.what for p in caught.value.problems if "cc12m" in p.shard) == 32
    assert any("no image" in p.what for p in caught.value.problems if "compressed" in p.shard)


@pytest.mark.parametrize(
    "boxes",
    [3, {"0": 1}, [[0, 0, 0, 1]], [["x", 0, 0, 1, 1]], [[0.5, 0, 0, 1, 1]], [[-1, 0, 0, 1, 1]], [None],
     [[0, 0, 0, 1, float("nan")]], [[0, 0, 0, 1, 10**400]], [[0, 0, True, 1, 1]]],
)  # fmt: skip
def test_malformed_boxes_are_reported_and_left_out_and_the_sample_is_kept(tmp_path, boxes):
    good = [[1, 0.1, 0.2, 0.3, 0.4]]
    members = [*labelled("a", 0, full=[0], boxes=boxes), *labelled("b", 1, full=[1], boxes=good)]
    index, problems = scan([str(write_tar(tmp_path / "t.tar", members))])
    assert [problem.key for problem in problems] == ["a"]
    assert "expected a list of [class, x0, y0, x1, y1]; the sample is kept without them" in str(problems[0])
    assert keys(index) == ["a", "b"]
    assert read_metadata(index, index.ids()) == {0: {"full": [0]}, 1: {"full": [1], "boxes": good}}
