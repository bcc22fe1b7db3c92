"""The decoders that tests of images run with: all that are installed."""

from importlib.util import find_spec

import pytest
from torch import Tensor

from bigscl.data.decode import find_decoder


def has_nvimgcodec() -> bool:
    return find_spec("nvidia") is not None and find_spec("nvidia.nvimgcodec") is not None


needs_nvimgcodec = pytest.mark.skipif(not has_nvimgcodec(), reason="without the extra fast-input")
DECODERS = ["torchvision", pytest.param("nvimgcodec", marks=needs_nvimgcodec)]
every_decoder = pytest.mark.parametrize("decoder", DECODERS)


def decoded(decoder: str, content: bytes) -> Tensor:
    """All pixels of an image file."""
    return find_decoder(decoder)(bytearray(content))[:, :, :]
