"""Decoding in the training process, with nvImageCodec's decoder of the CPU in place of the GPU's."""

import numpy as np
import pytest
import torch

from bigscl.data import loader
from bigscl.data.augment import ColorJitter, RandomErasing
from bigscl.data.gpu_decoding import EncodedJpeg, GpuDecoder, check_decoder, gpu_decoder, open_encoded
from bigscl.data.jpeg_regions import _make_decoder, load_library
from bigscl.data.loader import BadSamples, Loader, LoaderWorkers
from bigscl.data.plan import training_plan
from bigscl.data.scan import scan
from bigscl.data.transforms import EvaluationTransform, TrainingTransform, _resize_in_float, resize
from bigscl.data.views import whole
from bigscl.user_error import UserError
from tests.decoders import needs_nvimgcodec
from tests.tars import encoded, jpeg, picture, write_shards, write_tar

CPU = torch.device("cpu")
TRANSFORMS = {
    "training": TrainingTransform(size=16, seed=1, epoch=2),
    "colours and erased boxes": TrainingTransform(
        size=16, seed=1, epoch=2, color=ColorJitter(brightness=0.5), erase=RandomErasing(probability=0.7)
    ),
    "evaluation": EvaluationTransform(size=16),
    "centre": EvaluationTransform(size=16, resize="shorter", shorter=20),
}


class Counting(GpuDecoder):
    """The real code over nvImageCodec's decoder of the CPU; counts calls and files."""

    def __init__(self):
        super().__init__(CPU, load_library(), _make_decoder(load_library()))
        self.calls, self.files = 0, 0

    def decode(self, files, views):
        self.calls, self.files = self.calls + 1, self.files + len(files)
        return super().decode(files, views)


class Failing(Counting):
    """One whose device gives up, in one of its ways."""

    def __init__(self, answer):
        super().__init__()
        self._decoder = self
        self.answer = answer

    def decode(self, files, views=None, cuda_stream=0):
        if views is not None:
            return super().decode(files, views)
        if isinstance(self.answer, Exception):
            raise self.answer
        return [self.answer for _ in files]


@pytest.fixture
def inject(monkeypatch):
    def use(decoder):
        monkeypatch.setattr(loader, "gpu_decoder", lambda device: decoder)
        return decoder

    return use


def load(index, decoder, transform, *, workers=0, **options):
    plan = training_plan(
        index.shard_sizes, index.rows_per_shard, seed=1, epoch=2, batch_size=4, workers=workers
    )
    return list(Loader(index, plan, 0, transform, decoder=decoder, **options))


def assert_same(one, other):
    assert torch.equal(one.ids, other.ids)
    assert torch.equal(one.views, other.views)
    assert torch.equal(one.labels, other.labels)
    assert torch.equal(one.skipped, other.skipped)
    assert one.reasons == other.reasons
    assert (one.erased is None and other.erased is None) or torch.equal(one.erased, other.erased)
    assert one.images.shape == other.images.shape
    assert (one.images.int() - other.images.int()).abs().max() <= 3
    assert other.images.is_contiguous(memory_format=torch.channels_last)
    assert other.encoded is None


def mixed_members():
    """JPEGs for the GPU, and between them files that workers decode or that cannot be read."""
    for number in range(9):
        content = jpeg(number, 50 + number, 40)
        if number in (2, 5):
            content = encoded(picture(number, 30, 44), "PNG")
        if number == 3:
            content = encoded(picture(3, 33, 44).convert("CMYK"), quality=90)
        if number == 6:
            content = content[:-200]
        yield (f"{number}.{'png' if number in (2, 5) else 'jpg'}", content)
        yield (f"{number}.cls", b"0")


@needs_nvimgcodec
@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_those_of_the_other_decoders(tmp_path, inject, name, workers):
    decoder = inject(Counting())
    index, _ = scan(write_shards(tmp_path, [7, 1, 12]))
    expected, found = (
        load(index, which, TRANSFORMS[name], workers=workers) for which in ("torchvision", "nvimgcodec_gpu")
    )
    for one, other in zip(expected, found, strict=True):
        assert_same(one, other)
    assert (decoder.calls, decoder.files) == (len(found), 20)


@needs_nvimgcodec
@pytest.mark.parametrize("name", TRANSFORMS)
def test_other_formats_are_decoded_by_workers_and_broken_files_skipped(tmp_path, inject, name):
    decoder = inject(Counting())
    index, _ = scan(str(write_tar(tmp_path / "x.tar", list(mixed_members()))))
    expected, found = (
        load(index, which, TRANSFORMS[name], bad=BadSamples(index, 9, max_share=1.0))
        for which in ("torchvision", "nvimgcodec_gpu")
    )
    for one, other in zip(expected, found, strict=True):
        assert_same(one, other)
    assert sum(len(batch) for batch in found) == 8
    assert decoder.files == 5


@needs_nvimgcodec
@pytest.mark.parametrize(
    "answer", [None, RuntimeError("no"), np.zeros((2, 2, 3), np.uint8), np.zeros((17, 23, 1), np.uint8)]
)
def test_what_the_gpu_cannot_decode_is_decoded_on_the_cpu(tmp_path, inject, answer):
    inject(Failing(answer))
    index, _ = scan(write_shards(tmp_path, [5]))
    transform = TRANSFORMS["training"]
    for one, other in zip(
        load(index, "torchvision", transform), load(index, "nvimgcodec_gpu", transform), strict=True
    ):
        assert_same(one, other)


@needs_nvimgcodec
def test_damage_that_only_decoding_finds_is_skipped_and_counted(tmp_path, inject):
    # Without its quantization tables, under another marker, it still looks like a plain JPEG.
    good = jpeg(1, 64, 64)
    broken = good.replace(b"\xff\xdb\0\x43", b"\xff\xfe\0\x43")
    assert broken != good
    assert isinstance(open_encoded(bytearray(broken)), EncodedJpeg)
    inject(Failing(None))
    members = [("a.jpg", broken), ("a.cls", b"0"), ("b.jpg", good), ("b.cls", b"0")]
    index, _ = scan(str(write_tar(tmp_path / "x.tar", members)))
    expected, found = (
        load(index, which, TRANSFORMS["training"], bad=BadSamples(index, 2, max_share=1.0))
        for which in ("torchvision", "nvimgcodec_gpu")
    )
    assert [batch.ids.tolist() for batch in found] == [batch.ids.tolist() for batch in expected] == [[1]]
    assert found[0].skipped.tolist() == [0]
    assert len(found[0].reasons) == 1
    assert len(found[0].labels) == len(found[0].views) == len(found[0].images) == 1


def test_without_a_gpu_the_decoder_is_refused_with_a_remedy(tmp_path):
    index, _ = scan(write_shards(tmp_path, [3]))
    with pytest.raises(UserError, match=r"nvimgcodec_gpu .* cpu.*data\.decoder: nvimgcodec"):
        gpu_decoder(CPU)
    with pytest.raises(UserError, match=r"data\.decoder: nvimgcodec"):
        LoaderWorkers(index, 0, decoder="nvimgcodec_gpu", device=CPU)


@needs_nvimgcodec
def test_a_device_that_decodes_nothing_is_refused_at_the_start():
    check_decoder(Counting())
    with pytest.raises(UserError, match=r"nvidia-nvimgcodec-cu13\[nvjpeg\]"):
        check_decoder(Failing(None))


@needs_nvimgcodec
def test_boxes_are_those_of_the_whole_image():
    decoder = Counting()
    files = [np.frombuffer(jpeg(number, 90 + number, 70), np.uint8) for number in range(5)]
    views = [TRANSFORMS["training"].seen(n, width=90 + n, height=70) for n in range(5)]
    entire = decoder.decode(files, [whole(90 + n, 70) for n in range(5)])
    for box, image, view in zip(decoder.decode(files, views), entire, views, strict=True):
        assert torch.equal(box, image[view.box])


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("size", [(16, 16), (80, 33)])
def test_resizing_in_float_is_that_of_uint8_up_to_rounding(size, interpolation):
    image = torch.from_numpy(np.array(picture(3, 57, 41))).permute(2, 0, 1)
    one, other = resize(image, *size, interpolation), _resize_in_float(image, *size, interpolation)
    assert other.dtype == torch.uint8
    assert (one.int() - other.int()).abs().max() <= 1
