"""Decode JPEGs on the GPU, a batch at a time, in the training process.

Loader workers only read plain JPEGs, and decode all other files. What fails on the GPU is decoded on the CPU
here, and skipped if it is broken.
"""

# Shapes: B samples of the batch, S side of the views, h and w of a box.

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from bigscl.data.batch import Batch, EncodedImages
from bigscl.data.decode import decode
from bigscl.data.headers import plain_jpeg_size
from bigscl.data.jpeg_regions import load_library
from bigscl.data.sources import Unreadable
from bigscl.data.transforms import Transform
from bigscl.data.views import View, whole
from bigscl.user_error import UserError

# Fancy upsampling of the colours, as libjpeg does by default.
OPTIONS = ":fancy_upsampling=1"
GPU_THREADS = 2
"""Threads of the host that help the GPU, with Huffman codes above all."""


@dataclass(frozen=True, slots=True, eq=False)
class EncodedJpeg:
    """A plain JPEG that waits for the GPU."""

    data: bytearray
    shape: tuple[int, int, int]
    """(3, H, W)."""


def open_encoded(data: bytearray) -> Tensor | EncodedJpeg:
    """Return a plain JPEG as it is, any other image decoded; raise Unreadable for broken headers."""
    size = plain_jpeg_size(data)
    return decode(data) if size is None else EncodedJpeg(data, (3, size[1], size[0]))


def pack(waiting: dict[int, EncodedJpeg], empty: Callable[[tuple[int]], Tensor]) -> EncodedImages:
    """Return the JPEGs at these places of a batch, in one tensor that `empty` makes."""
    ends = np.cumsum([len(one.data) for one in waiting.values()]).tolist()
    files = empty((ends[-1],))
    for one, end in zip(waiting.values(), ends, strict=True):
        files[end - len(one.data) : end] = torch.frombuffer(one.data, dtype=torch.uint8)
    sizes = tuple((one.shape[2], one.shape[1]) for one in waiting.values())
    return EncodedImages(places=tuple(waiting), files=files, ends=tuple(ends), sizes=sizes)


class GpuDecoder:
    """Decodes boxes of JPEGs on a device, many at a time."""

    def __init__(self, device: torch.device, library: Any, decoder: Any) -> None:
        self.device, self._library, self._decoder = device, library, decoder

    def decode(self, files: Sequence[NDArray[np.uint8]], views: Sequence[View]) -> list[Tensor | None]:
        """Return the box of each view, uint8 [3,h,w] on the device; None where that failed."""
        streams = [self._stream(file, view) for file, view in zip(files, views, strict=True)]
        known = [stream for stream in streams if stream is not None]
        # Its work is ordered with that of torch: nothing has to wait on the host.
        stream = torch.cuda.current_stream(self.device).cuda_stream if self.device.type == "cuda" else 0
        try:
            found = iter(self._decoder.decode(known, cuda_stream=stream) if known else [])
        except RuntimeError:
            return [None] * len(files)
        return [
            None if stream is None else self._pixels(next(found), view)
            for stream, view in zip(streams, views, strict=True)
        ]

    def _stream(self, file: NDArray[np.uint8], view: View) -> Any:
        region = self._library.Region(view.top, view.left, view.top + view.height, view.left + view.width)
        try:
            return self._library.CodeStream(file).get_sub_code_stream(region=region)
        except RuntimeError:
            return None

    def _pixels(self, image: Any, view: View) -> Tensor | None:
        if image is None or tuple(image.shape) != (view.height, view.width, 3):
            return None
        # Of pixels on the host it has no DLPack without a driver.
        on_gpu = self.device.type == "cuda"
        pixels: Tensor = from_dlpack(image) if on_gpu else torch.from_numpy(np.asarray(image))
        return pixels.permute(2, 0, 1)


@cache
def gpu_decoder(device: torch.device) -> GpuDecoder:
    """Return the decoder of a GPU; UserError if there is none, or nvJPEG is missing."""
    if device.type != "cuda":
        raise UserError(
            f"data.decoder: nvimgcodec_gpu decodes on a GPU, but this process computes on {device.type}. "
            f"Choose data.decoder: nvimgcodec, which decodes the same boxes on the CPU."
        )
    library = load_library()
    kind = library.BackendKind
    # Without those of the CPU: they would take over silently, in this process.
    backends = [library.Backend(each) for each in (kind.HW_GPU_ONLY, kind.GPU_ONLY, kind.HYBRID_CPU_GPU)]
    index = torch.cuda.current_device() if device.index is None else device.index
    made = library.Decoder(
        device_id=index, max_num_cpu_threads=GPU_THREADS, backends=backends, options=OPTIONS
    )
    decoder = GpuDecoder(torch.device("cuda", index), library, made)
    check_decoder(decoder)
    return decoder


def check_decoder(decoder: GpuDecoder) -> None:
    """Decode a small image; UserError if that fails: then every image would be decoded by this process."""
    file = io.BytesIO()
    Image.new("RGB", (64, 64)).save(file, "JPEG")
    if decoder.decode([np.frombuffer(file.getvalue(), np.uint8)], [whole(64, 64)])[0] is None:
        raise UserError(
            "data.decoder: nvimgcodec_gpu: nvImageCodec decodes no JPEG on this GPU, probably because nvJPEG "
            "is missing. Install it for torch's version of CUDA (pip install "
            "'nvidia-nvimgcodec-cu13[nvjpeg]', or cu12), or choose data.decoder: nvimgcodec."
        )


def decode_batch(batch: Batch, transform: Transform, decoder: GpuDecoder) -> Batch:
    """Return the batch with all its images on the decoder's device; broken ones are skipped."""
    encoded, device = batch.encoded, decoder.device
    given = batch.images.to(device, non_blocking=True)
    if encoded is None:
        return replace(batch, images=given)
    ids = batch.ids.tolist()
    files = [encoded.file(number) for number in range(len(encoded.places))]
    views = [
        transform.seen(ids[place], width=width, height=height)
        for place, (width, height) in zip(encoded.places, encoded.sizes, strict=True)
    ]
    images = _all_images(batch, given, transform.size)
    seen, erased = batch.views.clone(), None if batch.erased is None else batch.erased.clone()
    skipped: dict[int, str] = {}
    boxes = decoder.decode(files, views)
    for place, file, view, box in zip(encoded.places, files, views, boxes, strict=True):
        try:
            pixels = decode(bytearray(file))[view.box].to(device) if box is None else box
            found = transform.finish(pixels, view, ids[place])
        except Unreadable as error:
            skipped[place] = str(error)
            continue
        images[place] = found.pixels
        seen[place] = torch.tensor(found.view)
        if erased is not None:
            erased[place] = torch.tensor(found.erased)
    decoded = replace(batch, images=images, views=seen, erased=erased, encoded=None)
    return decoded.without(skipped) if skipped else decoded


def _all_images(batch: Batch, given: Tensor, size: int) -> Tensor:
    """Return uint8 [B,3,S,S], channels last, with those images that the workers have decoded."""
    assert batch.encoded is not None
    images = torch.empty((len(batch), size, size, 3), dtype=torch.uint8, device=given.device)
    images = images.permute(0, 3, 1, 2)
    waiting = set(batch.encoded.places)
    for place, one in zip((n for n in range(len(batch)) if n not in waiting), given, strict=True):
        images[place] = one
    return images
