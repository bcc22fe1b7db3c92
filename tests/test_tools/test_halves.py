"""Halves become floats as numpy makes them."""

import numpy as np

from bigscl.tools.shared.shard_passes import to_float32


def test_every_half_becomes_the_same_float_as_in_numpy():
    halves = np.arange(2**16, dtype=np.uint16).view(np.float16).reshape(256, 256)
    for some in (halves, halves[::2, ::3]):
        found = to_float32(some)
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found.view(np.uint32), some.astype(np.float32).view(np.uint32))
