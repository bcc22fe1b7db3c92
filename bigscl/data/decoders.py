"""The decoders that `data.decoder` names."""

from collections.abc import Callable

from bigscl.data.decode import decode, jpeg_decoder
from bigscl.data.jpeg_regions import load_library, open_regions
from bigscl.data.transforms import DecoderName, Image

Decode = Callable[[bytearray], Image]
"""Returns the upright RGB image of a file; raises Unreadable, here or where the image is indexed."""


def find_decoder(name: DecoderName) -> Decode:
    """Return a decoder with what it imports; UserError if that is not installed."""
    # Of both: nvImageCodec leaves some files to the other.
    jpeg_decoder()
    if name == "torchvision":
        return decode
    load_library()
    return open_regions
