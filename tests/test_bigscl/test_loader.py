import gc
import gzip
import io
import itertools
import json
import logging
import multiprocessing
import os
import pickle
import signal
import struct
import tarfile
import time
import zlib
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
import torchvision.transforms.v2.functional as V
import webdataset
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from bigscl.data.augmentation import ColorJitter, RandomColors
from bigscl.data.build_index import scan
from bigscl.data.crops import RandomErasing, View
from bigscl.data.epoch_plan import evaluation_plan, training_plan
from bigscl.data.loader import (
    BadSamples,
    Batch,
    Batches,
    Loader,
    LoaderWorkers,
    TooManyBadSamples,
    Work,
    normalize,
)
from bigscl.data.open_tar import Unreadable
from bigscl.data.read_samples import read_images, read_metadata
from bigscl.data.transforms import EvaluationTransform, TrainingTransform
from tests.builders import VOC, WDS, classed, encoded, jpeg, picture, real_data, write_shards, write_tar
from tests.decoders import decoded, every_decoder
from tests.servers import QuietHandler, web_server

# Some tests want more workers than a small machine has cores.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

SIZES = [7, 1, 12, 4, 9]
TRANSFORM = TrainingTransform(size=16, seed=1, epoch=2)


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    return scan(write_shards(tmp_path_factory.mktemp("shards"), SIZES))[0]


def plan_for(index, **options):
    options = {"seed": 1, "epoch": 2, "batch_size": 4, "shuffle_buffer": 6} | options
    return training_plan(index.shard_sizes, index.rows_per_shard, **options)


def contents(batches: list[Batch]) -> set[tuple]:
    """What came: id, view, pixels and labels of every sample."""
    return {
        (int(n), tuple(view.tolist()), image.contiguous().numpy().tobytes(), tuple(labels.tolist()))
        for batch in batches
        for n, view, image, labels in zip(batch.ids, batch.views, batch.images, batch.labels, strict=True)
    }


def ids_of(batches: list[Batch]) -> list[list[int]]:
    return [batch.ids.tolist() for batch in batches]


def planned(plan, rank=0) -> list[list[int]]:
    return [ids.tolist() for ids in plan.batches(rank)]


@pytest.fixture(scope="module")
def expected(index):
    """Every sample, read by one process in one rank."""
    found = contents(list(Loader(index, plan_for(index), 0, TRANSFORM)))
    assert len(found) == sum(SIZES)
    return found


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_topology_gives_the_same_samples_views_and_pixels(index, expected, workers, world_size):
    plan = plan_for(index, workers=workers, world_size=world_size)
    found = []
    for rank in range(world_size):
        batches = list(Loader(index, plan, rank, TRANSFORM))
        # No rank waits for a batch that never comes, and the order is the planned one.
        assert len(batches) == plan.num_batches(rank)
        assert ids_of(batches) == planned(plan, rank)
        found += batches
    assert sum(len(batch) for batch in found) == sum(SIZES)
    assert contents(found) == expected


@pytest.mark.parametrize("workers", [0, 3])
def test_an_interrupted_epoch_goes_on_with_the_same_batches(index, workers):
    plan = plan_for(index, workers=workers)
    whole = list(Loader(index, plan, 0, TRANSFORM))
    for steps in (1, 2, 3, 5, len(whole) - 1, len(whole)):
        visited = np.zeros(len(SIZES) * index.rows_per_shard, dtype=bool)
        for batch in whole[:steps]:
            visited[batch.ids.numpy()] = True
        rest = list(Loader(index, plan_for(index, workers=workers, visited=visited), 0, TRANSFORM))
        assert ids_of(rest) == ids_of(whole[steps:])
        assert contents(rest) == contents(whole[steps:])


def test_labels_and_dtypes_are_those_of_the_batch_contract(index):
    batch = next(iter(Loader(index, plan_for(index), 0, TRANSFORM)))
    assert batch.ids.dtype == torch.int64
    assert batch.images.dtype == torch.uint8
    assert batch.images.shape == (4, 3, 16, 16)
    assert batch.images.is_contiguous(memory_format=torch.channels_last)
    assert batch.labels.dtype == torch.int8
    assert np.array_equal(batch.labels.numpy(), index.labels_of(batch.ids.numpy()))
    assert batch.views.dtype == torch.float32
    assert batch.views.shape == (4, 5)
    assert batch.erased is None
    assert batch.skipped.dtype == torch.int64
    assert len(batch.skipped) == 0
    moved = batch.to("meta")
    assert {moved.ids.device.type, moved.images.device.type, moved.skipped.device.type} == {"meta"}


def assert_same_pixels(found, expected):
    """To the last bit; torchvision 0.19 resizes in float on CPUs with AVX512, which may round otherwise."""
    resizes_bytes = V._geometry._do_native_uint8_resize_on_cpu(V.InterpolationMode.BILINEAR)
    assert found.shape == expected.shape
    assert (found.int() - expected.int()).abs().max() <= (0 if resizes_bytes else 1)


def test_pixels_are_the_view_that_is_named(index):
    batch = next(iter(Loader(index, plan_for(index), 0, TRANSFORM)))
    whole = read_images(index, batch.ids.numpy())
    for n, view, image in zip(batch.ids.tolist(), batch.views.tolist(), batch.images, strict=True):
        _, height, width = whole[n].shape
        left, top, box_width, box_height, flip = view
        box = (round(top * height), round(left * width), round(box_height * height), round(box_width * width))
        seen = V.resized_crop(whole[n], *box, [16, 16], antialias=True)
        assert_same_pixels(image, V.horizontal_flip(seen) if flip else seen)


@given(st.integers(1, 90), st.integers(1, 90), st.data())
@settings(max_examples=80, deadline=None)
def test_views_equal_torchvisions_resized_crop(width, height, data):
    image = torch.from_numpy(np.array(picture(width * 100 + height, width, height))).permute(2, 0, 1)
    left, top = data.draw(st.integers(0, width - 1)), data.draw(st.integers(0, height - 1))
    view = View(
        left=left,
        top=top,
        width=data.draw(st.integers(1, width - left)),
        height=data.draw(st.integers(1, height - top)),
        flip=data.draw(st.booleans()),
        image_width=width,
        image_height=height,
    )
    size = data.draw(st.integers(1, 64))
    reference = V.resized_crop(image, top, left, view.height, view.width, [size, size], antialias=True)
    reference = V.horizontal_flip(reference) if view.flip else reference
    transform = TrainingTransform(size=size, seed=0, epoch=0)
    assert_same_pixels(transform.finish(image[view.box], view, 0).pixels, reference)


def test_waits_are_counted(index):
    loader = Loader(index, plan_for(index), 0, TRANSFORM)
    assert len(loader) == len(list(loader))
    assert loader.wait_seconds > 0


def test_reading_leaves_the_random_numbers_of_training_alone(index):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    assert len(list(Loader(index, plan_for(index, workers=1), 0, TRANSFORM))) > 0
    assert torch.equal(torch.get_rng_state(), before)


@dataclass(frozen=True, slots=True, kw_only=True)
class LongTransform(TrainingTransform):
    padding: bytes = bytes(300_000)


def test_persistent_workers_give_the_batches_of_each_epoch_and_live_on(index):
    """Also where a worker has nothing in an epoch, and where plans are longer than what a pipe holds."""
    workers, pids = LoaderWorkers(index, 3), []
    for epoch in range(4):
        visited = np.zeros(len(index.keys), bool)
        if epoch % 2:  # so little is left that only one worker has a stream
            visited[index.ids()[2:]] = True
        plan = plan_for(index, workers=3, epoch=epoch, visited=visited)
        transform = LongTransform(size=16, seed=1, epoch=epoch)
        found = list(Loader(index, plan, 0, transform, workers=workers))
        alone = plan_for(index, epoch=epoch, visited=visited)
        assert contents(found) == contents(list(Loader(index, alone, 0, transform)))
        assert ids_of(found) == planned(plan)
        pids.append({child.pid for child in multiprocessing.active_children()})
    assert len(pids[0]) == 3
    assert all(each == pids[0] for each in pids)
    workers.close()
    assert not multiprocessing.active_children()


def test_batches_are_the_same_after_a_trip_to_another_process(index):
    """Workers that are not forked get the dataset pickled."""
    batches = Batches(index, "given")
    batches.work = Work(stream=plan_for(index).streams[0][0], batch_size=4, transform=TRANSFORM)
    assert contents(list(pickle.loads(pickle.dumps(batches)))) == contents(list(batches))


class BreakingHandler(QuietHandler):
    """Breaks every second connection off after 5,000 bytes."""

    count = 0

    def copyfile(self, source, outputfile):
        BreakingHandler.count += 1
        if BreakingHandler.count % 2:
            outputfile.write(source.read(5000))
        else:
            super().copyfile(source, outputfile)


@pytest.mark.parametrize("handler", [QuietHandler, BreakingHandler])
def test_remote_shards_give_the_same_batches_even_over_connections_that_break(
    index, expected, handler, caplog
):
    folder = os.path.dirname(index.urls[0])
    with web_server(folder, handler) as address:
        urls = tuple(f"{address}/{name}" for name in index.shard_names)
        loader = Loader(replace(index, urls=urls), plan_for(index), 0, TRANSFORM)
        assert contents(list(loader)) == expected
    assert len(loader.bad.ids) == 0


def test_piped_shards_are_read_where_allowed(index, expected):
    piped = replace(index, urls=tuple(f"pipe:cat {url}" for url in index.urls))
    allowed = replace(piped, allow_pipe=True)
    assert contents(list(Loader(allowed, plan_for(index), 0, TRANSFORM))) == expected
    with pytest.raises(TooManyBadSamples, match="pipes are allowed"):
        list(Loader(piped, plan_for(index), 0, TRANSFORM))


def test_an_idle_rank_yields_nothing(index):
    plan = plan_for(index, world_size=20, workers=2)
    idle = [rank for rank in range(20) if plan.num_samples(rank) == 0]
    assert len(idle) == 20 - index.num_samples // 2
    assert not any(list(Loader(index, plan, rank, TRANSFORM)) for rank in idle)


# Evaluation.


@pytest.mark.parametrize(("world_size", "workers"), [(1, 0), (3, 0), (2, 2)])
@pytest.mark.parametrize(
    "transform", [EvaluationTransform(size=16), EvaluationTransform(size=16, resize="shorter", shorter=20)]
)
def test_evaluation_sees_every_image_once_over_all_ranks(index, transform, world_size, workers):
    plan = evaluation_plan(
        index.shard_sizes, index.rows_per_shard, batch_size=4, world_size=world_size, workers=workers
    )
    batches = [batch for rank in range(world_size) for batch in Loader(index, plan, rank, transform)]
    assert sorted(n for batch in batches for n in batch.ids.tolist()) == index.ids().tolist()


@pytest.mark.parametrize(("width", "height"), [(500, 375), (375, 500), (100, 333), (64, 64), (3, 400)])
def test_evaluation_views_equal_torchvisions_transforms(width, height):
    image = torch.from_numpy(np.array(picture(1, width, height))).permute(2, 0, 1)
    square = EvaluationTransform(size=48)(image, 0)
    assert_same_pixels(square.pixels, V.resize(image, [48, 48], antialias=True))
    assert square.view == (0, 0, 1, 1, 0)
    centre = EvaluationTransform(size=48, resize="shorter", shorter=56)(image, 0)
    resized = V.resize(image, [56], antialias=True)
    assert_same_pixels(centre.pixels, V.center_crop(resized, [48, 48]))
    left, top, box_width, box_height, _ = centre.view
    rows, columns = resized.shape[1:]
    assert np.allclose([box_width * columns, box_height * rows], 48)
    assert abs(left * columns - (columns - 48) / 2) <= 0.5
    assert abs(top * rows - (rows - 48) / 2) <= 0.5


@pytest.mark.parametrize("resize", ["square", "shorter"])
def test_bicubic_views_equal_torchvisions_transforms(resize):
    image = torch.from_numpy(np.array(picture(1, 200, 150))).permute(2, 0, 1)
    found = EvaluationTransform(size=48, resize=resize, shorter=56, interpolation="bicubic")(image, 0).pixels
    bicubic = {"interpolation": V.InterpolationMode.BICUBIC, "antialias": True}
    if resize == "square":
        expected = V.resize(image, [48, 48], **bicubic)
    else:
        expected = V.center_crop(V.resize(image, [56], **bicubic), [48, 48])
    assert torch.equal(found, expected)
    drawn = {"size": 32, "seed": 1, "epoch": 2}
    bilinear, other = (
        TrainingTransform(**drawn, interpolation=name)(image, 0) for name in ("bilinear", "bicubic")
    )
    assert bilinear.view == other.view
    assert not torch.equal(bilinear.pixels, other.pixels)


def test_a_centre_larger_than_the_image_is_refused():
    with pytest.raises(ValueError, match="shorter: 100, expected at least size 224"):
        EvaluationTransform(size=224, resize="shorter", shorter=100)


def test_normalising_gives_mean_zero_and_deviation_one():
    images = torch.randint(0, 256, (4, 3, 8, 8), dtype=torch.uint8).to(memory_format=torch.channels_last)
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    reference = V.normalize(V.to_dtype(images, torch.float32, scale=True), list(mean), list(std))
    found = normalize(images, mean, std)
    assert torch.allclose(found, reference, atol=1e-6)
    assert found.is_contiguous(memory_format=torch.channels_last)


# Bad input: skipped, counted, named; the epoch finishes.


def bomb() -> bytes:
    """A PNG of 40,000 x 40,000 pixels in a few bytes."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return (
            struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
        )

    header = struct.pack(">IIBBBBB", 40_000, 40_000, 8, 2, 0, 0, 0)
    pixels = zlib.compress(bytes(1000), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def large_jpeg() -> bytes:
    """A JPEG whose frame header states 65,000 x 65,000 pixels."""
    content = bytearray(jpeg(1))
    at = content.index(b"\xff\xc0") + 5
    content[at : at + 4] = struct.pack(">HH", 65_000, 65_000)
    return bytes(content)


BAD = {
    "cut.jpg": jpeg(1)[:400],
    "header.jpg": jpeg(1)[:20],
    "noise.jpg": b"\xff\xd8\xff" + bytes(range(256)) * 4,
    "empty.jpg": b"",
    "text.png": b"this is no image",
    "pickle.jpg": pickle.dumps({"a": 1}),
    "bomb.png": bomb(),
    "large.jpg": large_jpeg(),
    "postscript.jpg": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n",
}


@pytest.mark.parametrize("workers", [0, 2])
def test_unreadable_images_are_skipped_counted_and_named_and_the_epoch_finishes(tmp_path, caplog, workers):
    members = [member for n in range(20) for member in classed(f"good{n}", n, 0)]
    for name, content in BAD.items():
        members += [(name, content), (name.split(".")[0] + ".cls", b"1")]
    index, problems = scan(str(write_tar(tmp_path / "x.tar", members)))
    assert [problem.key for problem in problems] == ["empty"]
    plan = plan_for(index, workers=workers)
    bad = BadSamples(index, index.num_samples, max_share=0.5)
    loader = Loader(index, plan, 0, TRANSFORM, bad=bad)
    with caplog.at_level(logging.WARNING):
        batches = list(loader)
    assert len(batches) == plan.num_batches(0)
    assert sorted(n for batch in batches for n in batch.ids.tolist()) == list(range(20))
    assert [sorted(batch.ids.tolist() + batch.skipped.tolist()) for batch in batches] == [
        sorted(ids) for ids in planned(plan)
    ]
    assert {index.key(n) for n in loader.bad.ids} == {name.split(".")[0] for name in BAD}
    for name in BAD:
        assert f"skipped x.tar/{name.split('.')[0]}: " in caplog.text
    assert "1600000000 pixels" in caplog.text
    assert "65000 x 65000 pixels" in caplog.text


def test_a_batch_of_bad_images_is_empty_but_comes(tmp_path):
    members = [member for n in range(5) for member in ((f"k{n}.jpg", b"broken"), (f"k{n}.cls", b"0"))]
    index, _ = scan(str(write_tar(tmp_path / "x.tar", members)))
    bad = BadSamples(index, 5, max_share=1.0)
    transform = TrainingTransform(size=16, seed=1, epoch=2, erase=RandomErasing())
    batches = list(Loader(index, plan_for(index), 0, transform, bad=bad))
    assert [len(batch) for batch in batches] == [0, 0]
    assert batches[0].erased.shape == (0, 4)
    assert batches[0].images.shape == (0, 3, 16, 16)
    assert batches[0].views.shape == (0, 5)
    assert batches[0].labels.shape == (0, 1)
    assert sorted(bad.reasons) == [0, 1, 2, 3, 4]


def test_too_many_bad_samples_stop_the_run_with_the_list(tmp_path):
    members = [member for n in range(10) for member in classed(f"k{n}", n, 0)]
    members += [("bad1.jpg", b"broken"), ("bad1.cls", b"0"), ("bad2.jpg", b""), ("bad2.cls", b"0")]
    index, _ = scan(str(write_tar(tmp_path / "x.tar", members)))
    with pytest.raises(TooManyBadSamples, match=r"(?s)2 of 12 samples.*x\.tar/bad[12].*x\.tar/bad[12]"):
        list(Loader(index, plan_for(index), 0, TRANSFORM, bad=BadSamples(index, 12, max_share=0.1)))
    reasons = {5: "read before the interruption"}
    bad = BadSamples(index, 12, max_share=0.1, reasons=reasons)
    with pytest.raises(TooManyBadSamples, match="read before the interruption"):
        list(Loader(index, plan_for(index), 0, TRANSFORM, bad=bad))


def test_a_resumed_epoch_does_not_try_bad_samples_again(tmp_path):
    members = [member for n in range(10) for member in classed(f"k{n}", n, 0)]
    for n in range(3):
        members += [(f"bad{n}.jpg", b"broken"), (f"bad{n}.cls", b"0")]
    index, _ = scan(str(write_tar(tmp_path / "x.tar", members)))
    whole = list(Loader(index, plan_for(index), 0, TRANSFORM, bad=BadSamples(index, 13, max_share=1.0)))
    for steps in range(len(whole)):
        bad = BadSamples(index, 13, max_share=1.0)
        visited = np.zeros(13, dtype=bool)
        for batch in whole[:steps]:
            bad.record(batch)
            visited[batch.ids.numpy()] = True
        visited[bad.ids] = True
        rest = list(Loader(index, plan_for(index, visited=visited), 0, TRANSFORM, bad=bad))
        assert ids_of(rest) == ids_of(whole[steps:])


@pytest.mark.parametrize("suffix", ["tar", "tgz"])
def test_a_tar_truncated_after_it_was_indexed_loses_only_its_rest(tmp_path, monkeypatch, suffix):
    members = [member for n in range(10) for member in classed(f"k{n}", n, 0)]
    shard = write_tar(tmp_path / f"x.{suffix}", members, "w:gz" if suffix == "tgz" else "w")
    index, _ = scan(str(shard))
    cut = int(index.image_offsets[6]) + 10
    if suffix == "tgz":
        shard.write_bytes(gzip.compress(gzip.decompress(shard.read_bytes())[:cut]))
    else:
        os.truncate(shard, cut)
    monkeypatch.setattr("bigscl.data.loader.check_shards", lambda index: None)
    bad = BadSamples(index, 10, max_share=0.5)
    batches = list(Loader(index, plan_for(index), 0, TRANSFORM, bad=bad))
    assert sorted(n for batch in batches for n in batch.ids.tolist()) == [0, 1, 2, 3, 4, 5]
    assert sorted(bad.reasons) == [6, 7, 8, 9]


def test_a_missing_shard_is_named_at_the_start_and_skipped_if_it_vanishes_later(tmp_path, monkeypatch):
    shards = write_shards(tmp_path, [3, 4])
    index, _ = scan(shards)
    os.remove(shards[1])
    with pytest.raises(FileNotFoundError, match=r"train-000001\.tar"):
        Loader(index, plan_for(index), 0, TRANSFORM)
    monkeypatch.setattr("bigscl.data.loader.check_shards", lambda index: None)
    bad = BadSamples(index, 7, max_share=0.9)
    batches = list(Loader(index, plan_for(index), 0, TRANSFORM, bad=bad))
    assert sorted(n for batch in batches for n in batch.ids.tolist()) == [0, 1, 2]
    assert sorted(bad.reasons) == [4, 5, 6, 7]
    assert "cannot be opened" in bad.reasons[4]


def test_a_shard_replaced_by_another_of_the_same_length_is_not_taken_for_the_first(tmp_path):
    shard = write_tar(tmp_path / "x.tar", [member for n in range(3) for member in classed(f"k{n}", n, 0)])
    index, _ = scan(str(shard))
    write_tar(shard, [member for n in range(3) for member in classed(f"j{n}", n, 0)])
    bad = BadSamples(index, 3, max_share=1.0)
    assert sum(len(batch) for batch in Loader(index, plan_for(index), 0, TRANSFORM, bad=bad)) == 0
    assert "changed since it was indexed" in bad.reasons[0]


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


def test_pickled_members_are_never_decoded(tmp_path):
    evil = pickle.dumps(Evil(str(tmp_path / "ran")))
    members = [
        ("a.jpg", jpeg(1)),
        ("a.cls", b"0"),
        *((f"a.{kind}", evil) for kind in ("pkl", "pickle", "pyd", "pth")),
    ]
    index, problems = scan(str(write_tar(tmp_path / "x.tar", members)))
    assert problems == []
    assert sum(map(len, Loader(index, plan_for(index), 0, TRANSFORM))) == 1
    assert not (tmp_path / "ran").exists()


# Odd but good images.


@every_decoder
def test_odd_images_become_upright_rgb(decoder):
    base = picture(3)
    rgb = np.array(base).astype(int)
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = encoded(base.rotate(90, expand=True), quality=95, exif=exif)
    alpha = base.convert("RGBA")
    alpha.putalpha(128)
    palette = base.quantize(200)
    deep = Image.fromarray((np.array(base.convert("L")).astype(np.uint16)) * 257)
    odd = {
        "gray.jpg": (encoded(base.convert("L"), quality=95), np.array(base.convert("L").convert("RGB"))),
        "cmyk.jpg": (encoded(base.convert("CMYK"), quality=95), rgb),
        "progressive.jpg": (encoded(base, quality=95, progressive=True), rgb),
        "turned.jpg": (turned, rgb),
        "disguised.jpg": (encoded(base, "PNG"), rgb),
        "alpha.png": (encoded(alpha, "PNG"), rgb),
        "palette.png": (
            encoded(palette, "PNG", transparency=bytes(range(200))),
            np.array(palette.convert("RGB")),
        ),
        "deep.png": (encoded(deep, "PNG"), np.array(base.convert("L").convert("RGB"))),
        "turned.png": (encoded(base.rotate(90, expand=True), "PNG", exif=exif), rgb),
        "lossless.webp": (encoded(base, "WEBP", lossless=True), rgb),
    }
    for name, (content, reference) in odd.items():
        found = decoded(decoder, content).permute(1, 2, 0).numpy().astype(int)
        assert found.shape == reference.shape, name
        # Colours of a JPEG are not those that went in.
        assert np.abs(found - reference).mean() < 6, name


def test_erased_boxes_are_painted_and_named(index):
    transform = TrainingTransform(size=32, seed=1, epoch=2, erase=RandomErasing(probability=0.7))
    plain = TrainingTransform(size=32, seed=1, epoch=2)
    with_boxes = list(Loader(index, plan_for(index), 0, transform))
    without = list(Loader(index, plan_for(index), 0, plain))
    num_erased = 0
    for changed, original in zip(with_boxes, without, strict=True):
        assert torch.equal(changed.views, original.views)
        for image, before, box in zip(changed.images, original.images, changed.erased, strict=True):
            left, top, width, height = (32 * box).round().int().tolist()
            expected = before.clone()
            expected[:, top : top + height, left : left + width] = torch.tensor(RandomErasing.color)[
                :, None, None
            ]
            assert torch.equal(image, expected)
            num_erased += width > 0
    assert 15 <= num_erased <= 30


def test_colours_change_the_same_way_in_every_topology_and_move_nothing(index):
    for color in (ColorJitter(brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1), RandomColors()):
        transform = TrainingTransform(size=16, seed=1, epoch=2, color=color)
        one = list(Loader(index, plan_for(index), 0, transform))
        two = list(Loader(index, plan_for(index, workers=2), 0, transform))
        assert contents(one) == contents(two)
        plain = list(Loader(index, plan_for(index), 0, TRANSFORM))
        assert {n: view for n, view, _, _ in contents(one)} == {n: view for n, view, _, _ in contents(plain)}
        assert len(contents(one) & contents(plain)) < sum(SIZES) / 4


# Shards made by others.


def test_public_imagenet_layout_by_webdatasets_own_writer(tmp_path):
    with webdataset.ShardWriter(str(tmp_path / "imagenet1k-train-%04d.tar"), maxcount=5, verbose=0) as writer:
        for n in range(12):
            writer.write({"__key__": f"n01440764_{10026 + n}", "jpg": jpeg(n), "cls": n % 3})
    index, _ = scan(str(tmp_path), num_classes=1000)
    batches = list(Loader(index, plan_for(index, workers=2), 0, TRANSFORM))
    for batch in batches:
        for n, labels in zip(batch.ids.tolist(), batch.labels, strict=True):
            assert labels.eq(1).nonzero().item() == (int(index.key(n).split("_")[1]) - 10026) % 3
    assert sum(map(len, batches)) == 12


@real_data
def test_real_shards_are_read_whole():
    index, _ = scan(str(VOC / "val-*.tar"))
    plan = plan_for(index, batch_size=64, workers=2, shuffle_buffer=300)
    loader = Loader(index, plan, 0, TrainingTransform(size=64, seed=1, epoch=0), labels="full")
    batches = list(loader)
    assert sorted(n for batch in batches for n in batch.ids.tolist()) == index.ids().tolist()
    assert sum(int(batch.labels.sum()) for batch in batches) == len(index.full.values)
    assert len(loader.bad.ids) == 0


@real_data
def test_compressed_real_shards_are_read_whole():
    index, _ = scan(str(WDS / "sample.tgz"))
    batches = list(Loader(index, plan_for(index, shuffle_buffer=30), 0, TRANSFORM))
    assert sum(map(len, batches)) == 90


@every_decoder
@real_data
def test_real_images_of_others_decode_like_pillow(decoder):
    with tarfile.open(WDS / "cc12m-train-0000.tar") as tar:
        images = [tar.extractfile(info).read() for info in tar if info.name.endswith("jpg")]
    assert len(images) == 32
    for content in images:
        reference = np.array(Image.open(io.BytesIO(content)).convert("RGB"))
        found = decoded(decoder, content).permute(1, 2, 0).numpy().astype(int)
        assert np.abs(found - reference).max() <= 3


@real_data
def test_metadata_of_chosen_samples_is_read():
    index, _ = scan(str(VOC / "val-*.tar"))
    ids = np.array([index.ids()[-1], 7, 3])
    found = read_metadata(index, ids)
    assert list(found) == ids.tolist()
    with tarfile.open(index.urls[0]) as tar:
        assert found[7] == json.loads(tar.extractfile(f"{index.key(7)}.json").read())
    assert all(0 <= number <= 1 for box in found[3]["boxes"] for number in box[1:])


def test_a_few_images_are_read_in_the_order_asked_for_and_bad_ones_named(tmp_path):
    members = [*classed("a", 1, 0), ("b.jpg", b"broken"), ("b.cls", b"0"), *classed("c", 2, 0)]
    index, _ = scan(str(write_tar(tmp_path / "x.tar", members)))
    assert list(read_images(index, np.array([2, 0]))) == [2, 0]
    with pytest.raises(Unreadable, match=r"x\.tar/b: cannot be decoded"):
        read_images(index, np.array([0, 1]))


# Memory that workers share.


def test_images_that_are_kept_are_not_overwritten_and_slots_are_used_again(index):
    """Of three batches only an image is kept, so that there are too few slots for the others."""
    plan = plan_for(index, workers=2, batch_size=2)
    workers = LoaderWorkers(index, 2, prefetch_batches=1, held_batches=2)
    expected = {n: (view, image) for n, view, image, _ in contents(list(Loader(index, plan, 0, TRANSFORM)))}
    for kept_batches in (0, 1, 3, 100):
        kept = {}
        for number, batch in enumerate(Loader(index, plan, 0, TRANSFORM, workers=workers)):
            assert batch.images.is_contiguous(memory_format=torch.channels_last)
            if number < kept_batches:
                kept |= {int(n): image for n, image in zip(batch.ids, batch.images, strict=True)}
            for n, image in zip(batch.ids.tolist(), batch.images, strict=True):
                assert image.contiguous().numpy().tobytes() == expected[n][1]
        for n, image in kept.items():
            assert image.contiguous().numpy().tobytes() == expected[n][1]
    workers.close()


def outside_slots(workers: LoaderWorkers, batches) -> int:
    """Take the batches, and count those whose images are in memory of their own."""
    memory = workers._slots.memory.content
    first, last = memory.ctypes.data, memory.ctypes.data + memory.nbytes
    return sum(not first <= batch.images.data_ptr() < last for batch in batches)


def test_batches_that_are_not_kept_are_all_in_slots_also_after_epochs_that_were_not_finished(index):
    plan = plan_for(index, workers=2, batch_size=2)
    workers = LoaderWorkers(index, 2, prefetch_batches=1, held_batches=6)
    for last in (None, 4, 1, 5, None, 3, None):
        loader = Loader(index, plan, 0, TRANSFORM, workers=workers)
        batches = iter(loader)
        assert outside_slots(workers, itertools.islice(batches, last)) == 0
    # As many as there are, with one in preparation and three in use for each worker.
    assert len(workers._slots.memory.content) == 8 * workers._slots.memory.layout.num_bytes
    workers.close()


def test_labels_views_and_ids_may_be_kept_without_the_images(index):
    plan = plan_for(index, workers=1, batch_size=2)
    seen, kept = set(), []
    for batch in Loader(index, plan, 0, TRANSFORM):
        seen.add(batch.images.data_ptr())
        kept.append((batch.ids, batch.labels, batch.views))
    assert len(seen) < len(kept)
    ids, labels, views = (torch.cat(parts) for parts in zip(*kept, strict=True))
    alone = list(Loader(index, plan_for(index, batch_size=2), 0, TRANSFORM))
    assert torch.equal(ids, torch.cat([batch.ids for batch in alone]))
    assert torch.equal(labels, torch.cat([batch.labels for batch in alone]))
    assert torch.equal(views, torch.cat([batch.views for batch in alone]))


def test_batches_of_another_size_get_other_slots_and_workers(index):
    workers = LoaderWorkers(index, 2)
    for size, batch_size in ((16, 4), (24, 4), (24, 9), (16, 2)):
        transform = TrainingTransform(size=size, seed=1, epoch=2)
        plan = plan_for(index, workers=2, batch_size=batch_size)
        found = list(Loader(index, plan, 0, transform, workers=workers))
        assert contents(found) == contents(list(Loader(index, plan_for(index), 0, transform)))
        assert len(multiprocessing.active_children()) == 2
    workers.close()


def test_a_worker_that_dies_stops_the_epoch_with_an_error_within_seconds(index):
    plan = plan_for(index, workers=2, batch_size=2)
    workers = LoaderWorkers(index, 2, prefetch_batches=1)
    batches = iter(Loader(index, plan, 0, TRANSFORM, workers=workers))
    next(batches)
    started = time.monotonic()
    os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match="worker"):
        list(batches)
    assert time.monotonic() - started < 30
    workers.close()


@pytest.mark.parametrize("remote", [False, True])
def test_slots_are_shared_with_forks_and_with_workers_of_a_server_process(index, expected, remote):
    """Workers that read remote tars are no forks of this process."""
    with web_server(os.path.dirname(index.urls[0]), QuietHandler) as address:
        urls = tuple(f"{address}/{name}" for name in index.shard_names) if remote else index.urls
        workers = LoaderWorkers(replace(index, urls=urls), 2)
        kept = []
        for batch in Loader(index, plan_for(index, workers=2), 0, TRANSFORM, workers=workers):
            kept.append(batch._map(torch.clone))
            assert outside_slots(workers, [batch]) == 0
        assert contents(kept) == expected
        workers.close()


class FakeCuda:
    """CUDA's calls for page-locked memory; copies of the GPU are over when the test says so."""

    def __init__(self, monkeypatch, error=0):
        self.error, self.copies_are_over, self.locked = error, False, []
        monkeypatch.setattr(torch.cuda, "cudart", lambda: self)
        monkeypatch.setattr(torch.cuda, "Event", lambda: self)
        plain = torch.tensor
        monkeypatch.setattr(torch, "tensor", lambda *values, pin_memory=False, **kind: plain(*values, **kind))
        monkeypatch.setattr(Batch, "pin_memory", lambda batch: batch)

    def cudaHostRegister(self, address, num_bytes, flags):  # noqa: N802
        self.locked += [(address, num_bytes)] if not self.error else []
        return self.error

    def cudaHostUnregister(self, address):  # noqa: N802
        self.locked = [lock for lock in self.locked if lock[0] != address]

    def record(self):
        """An event."""

    def query(self):
        return self.copies_are_over


def test_a_slot_is_not_filled_while_the_gpu_may_still_copy_from_it(index, monkeypatch):
    cuda = FakeCuda(monkeypatch)
    plan = plan_for(index, workers=1, batch_size=2)
    workers = LoaderWorkers(index, 1, prefetch_batches=1, held_batches=2, pin_memory=True)
    slots = None
    for epoch in range(2):
        cuda.copies_are_over = epoch == 1
        batches = Loader(index, plan, 0, TRANSFORM, workers=workers)
        found = [batch.images.data_ptr() for batch in batches]
        (start, num_bytes), *others = cuda.locked
        assert not others  # locked once
        in_slots = [address for address in found if start <= address < start + num_bytes]
        if epoch == 0:
            assert len(set(in_slots)) == len(in_slots) == 3
            slots = set(in_slots)
        else:
            # The first batches are made before this process has looked at the copies.
            assert len(in_slots) > 3
            assert set(in_slots) <= slots
    workers.close()
    del workers
    gc.collect()
    assert not cuda.locked


def test_memory_that_cuda_cannot_lock_is_used_as_it_is(index, expected, monkeypatch, caplog):
    cuda = FakeCuda(monkeypatch, error=801)
    plan = plan_for(index, workers=1)
    assert contents(list(Loader(index, plan, 0, TRANSFORM, pin_memory=True))) == expected
    assert not cuda.locked
    assert "cannot be page-locked (CUDA error 801)" in caplog.text
