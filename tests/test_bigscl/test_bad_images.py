"""Images made to exhaust memory or time: refused by their headers, before a pixel is allocated."""

import io
import struct
import tracemalloc

import numpy as np
import pytest
import torch
from PIL import Image

from bigscl.data import decode as decoding
from bigscl.data.decode import decode
from bigscl.data.headers import image_size
from bigscl.data.open_tar import Unreadable
from bigscl.data.transforms import EvaluationTransform, TrainingTransform
from bigscl.datasets.writer import ImageFile, Resize
from tests.builders import encoded, jpeg, picture
from tests.decoders import decoded, every_decoder

FRAME = b"\xff\xc0"


def frame_header(width: int, height: int, marker: bytes = FRAME) -> bytes:
    return marker + struct.pack(">HBHHB", 17, 8, height, width, 3) + bytes([1, 34, 0, 2, 17, 1, 3, 17, 1])


def sized(content: bytes, width: int, height: int, marker: bytes = FRAME) -> bytes:
    """The JPEG with another size in its frame header."""
    at = content.index(marker) + 5
    return content[:at] + struct.pack(">HH", height, width) + content[at + 4 :]


def before_frame(content: bytes, put: bytes, marker: bytes = FRAME) -> bytes:
    at = content.index(marker)
    return content[:at] + put + content[at:]


PLAIN = jpeg(1)
HUGE = sized(PLAIN, 20_000, 20_000)
PROGRESSIVE = encoded(picture(1), quality=90, progressive=True)


def webp(width: int, height: int) -> bytes:
    """A WebP whose extended header states a canvas of this size."""
    canvas = struct.pack("<I", width - 1)[:3] + struct.pack("<I", height - 1)[:3]
    chunks = b"VP8X" + struct.pack("<I", 10) + bytes(4) + canvas + encoded(picture(1), "WEBP")[12:]
    return b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WEBP" + chunks


def lossless_webp(width: int, height: int) -> bytes:
    bits = struct.pack("<I", (width - 1) | (height - 1) << 14)
    body = b"\x2f" + bits + bytes(32)
    chunk = b"VP8L" + struct.pack("<I", len(body)) + body + bytes(len(body) % 2)
    return b"RIFF" + struct.pack("<I", 4 + len(chunk)) + b"WEBP" + chunk


def gif(width: int, height: int) -> bytes:
    content = encoded(picture(1).convert("P"), "GIF")
    return content[:6] + struct.pack("<HH", width, height) + content[10:]


BOMBS = {
    "plain": HUGE,
    "junk byte": before_frame(HUGE, b"\x00"),
    "junk bytes": before_frame(HUGE, b"\x00\x01junk\xff\x00\xff\x00"),
    "fill bytes": before_frame(HUGE, b"\xff" * 9),
    "restart marker": before_frame(HUGE, b"\xff\xd3\xff\x01"),
    "thumbnail": before_frame(HUGE, b"\xff\xe1" + struct.pack(">H", 2 + len(PLAIN)) + PLAIN),
    "progressive": sized(PROGRESSIVE, 20_000, 20_000, b"\xff\xc2"),
    "progressive after junk": before_frame(
        sized(PROGRESSIVE, 20_000, 20_000, b"\xff\xc2"), b"\0", b"\xff\xc2"
    ),
    "two frames, the small one first": before_frame(HUGE, frame_header(40, 30)),
    "two frames, the large one first": before_frame(PLAIN, frame_header(20_000, 20_000)),
    "webp": webp(16_000, 16_000),
    "webp of 2 ** 48 pixels": webp(1 << 24, 1 << 24),
    "lossless webp": lossless_webp(16_000, 16_000),
    "gif called jpg": gif(60_000, 60_000),
    "bmp": b"BM" + struct.pack("<IHHIIiiHHIIiiII", 54, 0, 0, 54, 40, 60_000, 60_000, 1, 24, 0, 0, 0, 0, 0, 0),
}


@pytest.fixture
def no_large_allocation(monkeypatch):
    """Fails the test where a decoder is asked for pixels."""

    def refuse(*_):
        raise AssertionError("the decoder was reached")

    monkeypatch.setattr(decoding, "jpeg_decoder", lambda: refuse)
    monkeypatch.setattr(decoding, "_decode_box", refuse)
    monkeypatch.setattr(Image.core, "new", refuse)
    monkeypatch.setattr(Image.core, "fill", refuse)


@every_decoder
@pytest.mark.parametrize("name", BOMBS)
def test_the_reason_is_the_size(name, decoder, no_large_allocation):
    with pytest.raises(Unreadable, match=r"\d+ x \d+ pixels, more than the 89478485|\d+ pixels\) exceeds"):
        decoded(decoder, BOMBS[name])


@every_decoder
@pytest.mark.parametrize(
    "put", [b"\0", b"\0junk", b"\xff" * 5, b"\xff\xe1\x00\x06abcd", b"\xff\xfe\x00\x02", b"\xff\xd0"]
)
def test_small_images_with_odd_headers_are_still_decoded(put, decoder):
    assert torch.equal(decoded(decoder, before_frame(PLAIN, put)), decoded(decoder, PLAIN))


def scans(count: int) -> bytes:
    """A progressive JPEG that repeats its last scan."""
    last = PROGRESSIVE.rindex(b"\xff\xda")
    return PROGRESSIVE[:last] + PROGRESSIVE[last:-2] * count + b"\xff\xd9"


@every_decoder
def test_a_jpeg_of_thousands_of_scans_is_refused_before_it_is_decoded(decoder, no_large_allocation):
    with pytest.raises(Unreadable, match="5009 scans, more than the 100"):
        decoded(decoder, scans(5000))


@every_decoder
def test_a_jpeg_of_many_scans_is_decoded(decoder):
    assert decoded(decoder, PROGRESSIVE).shape == (3, 30, 40)


@every_decoder
@pytest.mark.parametrize("cut", range(2, 200, 7))
def test_a_truncated_header_is_unreadable(cut, decoder):
    with pytest.raises(Unreadable):
        decoded(decoder, PLAIN[:cut])


@pytest.mark.parametrize("size", [(65_000, 1), (1, 65_000)])
def test_a_thin_image_is_not_blown_up(size):
    image = torch.zeros((3, size[1], size[0]), dtype=torch.uint8)
    with pytest.raises(Unreadable, match=r"16640000 x 256|256 x 16640000"):
        EvaluationTransform(size=224, resize="shorter", shorter=256)(image, 0)
    assert TrainingTransform(size=16, seed=0, epoch=0)(image, 0).pixels.shape == (3, 16, 16)


def test_a_single_pixel_is_an_image():
    image = decode(bytearray(encoded(picture(1, 1, 1))))
    assert EvaluationTransform(size=16, resize="shorter", shorter=20)(image, 0).pixels.shape == (3, 16, 16)
    assert TrainingTransform(size=16, seed=0, epoch=0)(image, 0).pixels.shape == (3, 16, 16)


# On their way into shards.


@pytest.mark.parametrize("resize", [None, Resize(size=16, mode="square")])
@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_goes_into_its_shard_as_it_is(tmp_path, name, resize):
    (tmp_path / "x.jpg").write_bytes(BOMBS[name])
    tracemalloc.start()
    _, content = ImageFile(path=str(tmp_path / "x.jpg"), resize=resize).encoded()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert content == BOMBS[name]
    assert peak < 10_000_000


def test_a_file_of_a_kind_that_runs_programs_is_not_opened(tmp_path, monkeypatch):
    import PIL.EpsImagePlugin

    def refuse(*_):
        raise AssertionError("ghostscript was asked")

    monkeypatch.setattr(PIL.EpsImagePlugin, "Ghostscript", refuse)
    eps = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n"
    (tmp_path / "x.jpg").write_bytes(eps)
    image = ImageFile(path=str(tmp_path / "x.jpg"), resize=Resize(size=4, mode="square"))
    assert image.encoded() == ("jpg", eps)


@pytest.mark.parametrize("kind", ["BMP", "TIFF", "PPM", "GIF"])
def test_other_kinds_become_png(tmp_path, kind):
    (tmp_path / "x").write_bytes(encoded(picture(1), kind))
    extension, content = ImageFile(path=str(tmp_path / "x")).encoded()
    assert extension == "png"
    if kind != "GIF":
        assert np.array_equal(np.array(Image.open(io.BytesIO(content))), np.array(picture(1)))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_the_size_in_the_header_is_that_of_the_decoded_image(kind, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    content = bytearray(encoded(picture(1).resize((30, 20)), kind, exif=exif))
    width, height = image_size(content)
    assert decode(content).shape == (3, height, width)


def test_a_size_that_cannot_be_read_is_an_error():
    with pytest.raises(Unreadable, match="cannot be decoded"):
        image_size(bytearray(b"no image"))
