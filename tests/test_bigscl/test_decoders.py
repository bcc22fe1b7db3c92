"""Every decoder gives what `decode` gives, of whole images and of boxes, good files and bad ones."""

import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from bigscl.common.user_error import UserError
from bigscl.data import decode as decoding
from bigscl.data.build_index import scan
from bigscl.data.decode import JpegRegions, decode, find_decoder, open_regions
from bigscl.data.epoch_plan import training_plan
from bigscl.data.headers import plain_jpeg_size
from bigscl.data.loader import BadSamples, Batch, Loader
from bigscl.data.open_tar import Unreadable
from bigscl.data.transforms import EvaluationTransform, TrainingTransform
from tests.builders import encoded, jpeg, picture, write_shards, write_tar
from tests.decoders import needs_nvimgcodec
from tests.fuzz import fuzzed, mutated

PHOTO = picture(5, 93, 71)


def turned(orientation: int, image: Image.Image = PHOTO) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(image, quality=90, exif=exif)


PLAIN = {
    "4:2:0": encoded(PHOTO, quality=90),
    "4:4:4": encoded(PHOTO, quality=95, subsampling=0),
    "4:2:2": encoded(PHOTO, quality=80, subsampling=1),
    "gray": encoded(PHOTO.convert("L"), quality=90),
    "progressive": encoded(PHOTO, quality=90, progressive=True),
    "restarts": encoded(PHOTO, quality=90, restart_marker_blocks=3),
    "RGB": encoded(PHOTO, quality=90, keep_rgb=True),
    "upright by Exif": turned(1),
}
THUMBNAIL = jpeg(1)
PLAIN["a thumbnail inside"] = (
    PLAIN["4:2:0"][:2] + b"\xff\xe1" + struct.pack(">H", 2 + len(THUMBNAIL)) + THUMBNAIL + PLAIN["4:2:0"][2:]
)
OTHERS = {
    **{f"orientation {n}": turned(n) for n in range(2, 9)},
    "CMYK": encoded(PHOTO.convert("CMYK"), quality=90),
    "PNG": encoded(PHOTO, "PNG"),
    "WebP": encoded(PHOTO, "WEBP"),
    "trailing bytes": PLAIN["4:2:0"] + b"\0\0",
    "fill bytes at the end": PLAIN["4:2:0"][:-2] + b"\xff\xff\xd9",
}


def boxes(image: torch.Tensor):
    _, height, width = image.shape
    for top, left, bottom, right in (
        (0, 0, height, width),
        (0, 0, 1, 1),
        (height - 1, width - 1, height, width),
        (height // 3, width // 4, height // 3 + 17, width // 4 + 23),
        (1, 0, height, width - 3),
    ):
        yield slice(None), slice(top, bottom), slice(left, right)


# Which files are plain: no decoder is needed to say so.


@pytest.mark.parametrize("name", PLAIN)
def test_plain_jpegs_have_the_size_that_decode_finds(name):
    assert plain_jpeg_size(PLAIN[name]) == decode(bytearray(PLAIN[name])).shape[:0:-1]


@pytest.mark.parametrize("name", OTHERS)
def test_other_files_are_not_plain_and_are_decoded_whole(name):
    assert plain_jpeg_size(OTHERS[name]) is None
    assert torch.equal(open_regions(bytearray(OTHERS[name]))[:, :, :], decode(bytearray(OTHERS[name])))


def test_a_file_that_is_cut_off_is_not_plain():
    assert {plain_jpeg_size(PLAIN["4:2:0"][:cut]) for cut in range(0, 600, 7)} == {None}


TIFF = turned(6).index(b"Exif") + 6


@pytest.mark.parametrize(
    ("at", "value"),
    [(0, b"XX"), (4, b"\xff\xff\xff\xff"), (8, b"\xff\xff"), (12, b"\0\4"), (14, b"\0\0\0\2")],
    ids=["byte order", "far table", "many entries", "a long", "two values"],
)
def test_an_orientation_that_cannot_be_understood_is_left_to_the_other_decoder(at, value):
    content = bytearray(turned(1))
    assert content[TIFF : TIFF + 2] == b"MM"
    content[TIFF + at : TIFF + at + len(value)] = value
    assert plain_jpeg_size(bytes(content)) is None


@needs_nvimgcodec
@pytest.mark.parametrize("orientation", [0, 1, 9])
def test_only_the_turning_orientations_turn(orientation):
    whole = decode(bytearray(turned(orientation)))
    assert torch.equal(whole, decode(bytearray(turned(1))))
    assert torch.equal(open_regions(bytearray(turned(orientation)))[:, :, :], whole)


# What nvImageCodec gives.


@needs_nvimgcodec
@pytest.mark.parametrize("name", PLAIN)
def test_a_box_is_that_of_the_whole_image(name):
    image, whole = open_regions(bytearray(PLAIN[name])), decode(bytearray(PLAIN[name]))
    assert isinstance(image, JpegRegions)
    assert image.shape == whole.shape
    for box in boxes(whole):
        found = decoding._decode_box(
            bytearray(PLAIN[name]), box[2].start, box[1].start, box[2].stop, box[1].stop
        )
        assert found is not None
        # Libraries may differ in the last bits; the versions that were tried here do not.
        assert (found.int() - whole[box].int()).abs().max() <= 3
        assert found.shape == whole[box].shape
        assert found.permute(1, 2, 0).is_contiguous()


@needs_nvimgcodec
@pytest.mark.parametrize(
    "box", [(slice(None), slice(None), slice(None)), (slice(None), slice(16), slice(16))]
)
@fuzzed(60)
@given(content=mutated(*PLAIN.values()))
def test_damaged_jpegs_are_readable_to_both_decoders_or_to_none_wherever_the_box_is(box, content):
    answers = []
    for decoder in ("torchvision", "nvimgcodec"):
        try:
            answers.append(tuple(find_decoder(decoder)(bytearray(content))[box].shape))
        except Unreadable:
            answers.append(None)
    assert answers[0] == answers[1]


@needs_nvimgcodec
@given(st.integers(0, 10_000), st.sampled_from(["4:2:0", "4:4:4", "gray", "progressive"]))
def test_transforms_give_the_same_views_and_pixels(sample_id, name):
    content = bytearray(PLAIN[name])
    for transform in (
        TrainingTransform(size=24, seed=1, epoch=3),
        EvaluationTransform(size=24),
        EvaluationTransform(size=24, resize="shorter", shorter=30),
    ):
        one, other = transform(decode(content), sample_id), transform(open_regions(content), sample_id)
        assert one.view == other.view
        assert (one.pixels.int() - other.pixels.int()).abs().max() <= 3


def load(index, decoder, workers=0, **options) -> list[Batch]:
    plan = training_plan(
        index.shard_sizes, index.rows_per_shard, seed=1, epoch=2, batch_size=4, workers=workers
    )
    transform = TrainingTransform(size=16, seed=1, epoch=2)
    return list(Loader(index, plan, 0, transform, decoder=decoder, **options))


@needs_nvimgcodec
@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_the_same_in_forked_workers_too(tmp_path, workers):
    index, _ = scan(write_shards(tmp_path, [7, 1, 12]))
    for one, other in zip(
        load(index, "torchvision", workers), load(index, "nvimgcodec", workers), strict=True
    ):
        assert torch.equal(one.ids, other.ids)
        assert torch.equal(one.views, other.views)
        assert (one.images.int() - other.images.int()).abs().max() <= 3


@needs_nvimgcodec
def test_a_cut_off_image_is_skipped_wherever_the_view_is(tmp_path):
    whole = jpeg(1, 400, 300)
    members = [("a.jpg", whole[:-300]), ("a.cls", b"0"), ("b.jpg", whole), ("b.cls", b"0")]
    index, _ = scan(str(write_tar(tmp_path / "x.tar", members)))
    for seed in range(8):
        plan = training_plan(index.shard_sizes, index.rows_per_shard, seed=seed, epoch=0, batch_size=2)
        bad = BadSamples(index, 2, max_share=1.0)
        transform = TrainingTransform(size=16, seed=seed, epoch=0)
        batches = list(Loader(index, plan, 0, transform, bad=bad, decoder="nvimgcodec"))
        assert [batch.ids.tolist() for batch in batches] == [[1]]
        assert "truncated" in bad.reasons[0]


# Without nvImageCodec, or with one that fails.


class Failing:
    """An nvImageCodec that decodes nothing, in one of its ways."""

    def __init__(self, answer):
        self.answer = answer
        self.asked = 0

    def CodeStream(self, data):  # noqa: N802
        return self

    def Region(self, *box):  # noqa: N802
        return box

    def get_sub_code_stream(self, region):
        return self

    def decode(self, stream):
        self.asked += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.mark.parametrize(
    "answer", [None, RuntimeError("no"), np.zeros((2, 2, 3), np.uint8), np.zeros((17, 23, 1), np.uint8)]
)
def test_a_box_that_cannot_be_decoded_alone_is_cut_out_of_the_whole(monkeypatch, answer):
    library = Failing(answer)
    monkeypatch.setattr(decoding, "load_library", lambda: library)
    monkeypatch.setattr(decoding, "_decoder", lambda process: library)
    box = (slice(None), slice(10, 27), slice(20, 43))
    found = open_regions(bytearray(PLAIN["4:2:0"]))[box]
    assert torch.equal(found, decode(bytearray(PLAIN["4:2:0"]))[box])
    assert library.asked == 1


def test_a_missing_library_is_named_with_its_remedy(tmp_path, monkeypatch):
    def refuse(name):
        raise ImportError(f"No module named {name!r}")

    index, _ = scan(write_shards(tmp_path, [3]))
    monkeypatch.setattr(decoding, "import_module", refuse)
    decoding.load_library.cache_clear()
    try:
        with pytest.raises(UserError, match=r"data\.decoder: nvimgcodec .* 'bigscl\[fast-input\]'"):
            load(index, "nvimgcodec")
    finally:
        decoding.load_library.cache_clear()
    assert sum(map(len, load(index, "torchvision"))) == 3
