"""Trains as `bigscl.train` does, with the CPU's decoder in the place of the GPU's (`nvimgcodec_gpu`)."""

import sys
from functools import cache

import torch

from bigscl.data import loader
from bigscl.data.gpu_decoding import GpuDecoder
from bigscl.data.jpeg_regions import _make_decoder, load_library
from bigscl.train import main


@cache
def cpu_decoder(device: torch.device) -> GpuDecoder:
    assert device.type == "cpu"
    return GpuDecoder(device, load_library(), _make_decoder(load_library()))


if __name__ == "__main__":
    loader.gpu_decoder = cpu_decoder  # type: ignore[attr-defined]
    sys.exit(main(sys.argv[1:]))
