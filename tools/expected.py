"""Expected positives by the cuts that a snapshot keeps."""

import numpy as np
from numpy.typing import NDArray

from store import Snapshot
from store.spec import Array


def expected_positives(snapshot: Snapshot, scores: Array, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
    """`[n,L]`: of which classes each sample is an expected positive; none before the first selection.

    The same cut as `bigscl.selection.Selection.expected`, without torch, which takes seconds to import.
    """
    cuts = snapshot.attributes.get("selection")
    if cuts is None:
        return np.zeros(scores.shape, dtype=bool)
    tau = np.asarray(cuts["tau"], np.float16)
    last_id = np.asarray(cuts["last_id"], np.int64)
    expected: NDArray[np.bool_] = (scores > tau) | ((scores == tau) & (ids[:, None] <= last_id))
    return expected
