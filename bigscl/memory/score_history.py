"""The scores of every epoch's end: those of each image's named classes and of its highest others.

One file per epoch, `scores/<labels>/epoch-0003.npy` in the folder of the run: for every sample, in the order
of ids, k pairs of class and score (51 MB an epoch for 1.28 million images and 10 classes). It is written
before the epoch is committed, from the scores that the selection reads anyway: every committed epoch has its
file, and an epoch that is trained again after a kill writes the same one again. `<labels>` are letters of the
fingerprint of the labels: scores of other labels are elsewhere. The file is a .npy, after which come the four
bytes of its CRC-32.
"""

# Shapes: n samples of a chunk, N samples, L classes, k kept classes.

import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bigscl.common.digests import read_array, write_array
from bigscl.common.files import BadFile
from bigscl.store import Annotations, KeptScores, Ranked, Transport, choose_classes, on_rank_zero

FOLDER = "scores"
WHAT, REMEDY = "scores of an epoch", "Delete it; `bigscl review list` does without that epoch."
LETTERS = 16


class ScoreLog:
    """Writes the scores of a run's epochs; every rank has one."""

    def __init__(self, run: Path, annotations: Annotations, ranks: Transport, num_kept: int) -> None:
        self._folder = log_folder(run, annotations)
        self._annotations, self._ranks = annotations, ranks
        self._num_kept = min(num_kept, annotations.num_classes)
        self._parts: list[tuple[NDArray[np.int64], NDArray[Any]]] = []

    def note(self, ids: NDArray[np.int64], scores: Ranked) -> None:
        """Note what is kept of the scores of some samples."""
        if isinstance(scores, KeptScores):
            rows = np.broadcast_to(ids[:, None], scores.classes.shape)
            named = self._annotations.is_given(rows, scores.classes)
            places = choose_classes(scores.values, named, self._num_kept)
            classes, values = (np.take_along_axis(one, places, 1) for one in (scores.classes, scores.values))
        else:
            classes = choose_classes(scores, self._annotations.of_rows(ids), self._num_kept)
            values = np.take_along_axis(scores, classes, axis=1)
        pairs = np.empty(classes.shape, pair_type(self._annotations.num_classes))
        pairs["class"], pairs["score"] = classes, values
        self._parts.append((ids, pairs))

    def write(self, epoch: int) -> None:
        """Write what all ranks have noted as the file of an epoch. All ranks call this."""
        parts, self._parts = self._parts, []
        sent = [self._ranks.gather(b"".join(part[kind].tobytes() for part in parts)) for kind in (0, 1)]

        def write() -> bytes:
            assert sent[0] is not None
            assert sent[1] is not None
            all_ids = np.frombuffer(b"".join(sent[0]), np.int64)
            kind = pair_type(self._annotations.num_classes)
            all_pairs = np.frombuffer(b"".join(sent[1]), kind).reshape(len(all_ids), self._num_kept)
            write_array(epoch_file(self._folder, epoch), in_order_of_ids(all_ids, all_pairs))
            return b""

        on_rank_zero(self._ranks, write)


def in_order_of_ids(ids: NDArray[np.int64], pairs: NDArray[Any]) -> NDArray[Any]:
    """Return the pairs [n,k] of samples in the order of their ids, 8 times as fast as pairs[argsort(ids)]."""
    # Ids come in runs, which a stable sort merges; a row that is one value is copied at once.
    rows = pairs.view(np.dtype((np.void, pairs.shape[1] * pairs.dtype.itemsize)))
    return rows[np.argsort(ids, kind="stable")].view(pairs.dtype)


def read_score_log(run: Path, annotations: Annotations, before_epoch: int) -> dict[int, NDArray[Any]]:
    """Return the kept pairs [N,k] of each epoch, mapped from disk; later ones are of a state that is gone."""
    found = {}
    folder = log_folder(run, annotations)
    for file in sorted(folder.glob("epoch-*.npy")):
        name = re.fullmatch(r"epoch-(\d+)", file.stem)
        if name is not None and int(name[1]) < before_epoch:
            found[int(name[1])] = _read(file, annotations)
    return dict(sorted(found.items()))


def _read(file: Path, annotations: Annotations) -> NDArray[Any]:
    pairs = read_array(file, WHAT, REMEDY)
    if pairs.dtype != pair_type(annotations.num_classes) or pairs.ndim != 2:
        raise BadFile(f"{file}: not {WHAT} ({pairs.dtype} {list(pairs.shape)}). {REMEDY}")
    if len(pairs) != annotations.num_samples:
        raise BadFile(f"{file}: has {len(pairs)} samples, expected {annotations.num_samples}. {REMEDY}")
    return pairs


def log_folder(run: Path, annotations: Annotations) -> Path:
    return run / FOLDER / annotations.fingerprint[:LETTERS]


def epoch_file(folder: Path, epoch: int) -> Path:
    return folder / f"epoch-{epoch:04d}.npy"


def pair_type(num_classes: int) -> np.dtype[Any]:
    return np.dtype([("class", "<u2" if num_classes <= 2**16 else "<u4"), ("score", "<f2")])


def epoch_bytes(num_samples: int, num_classes: int, num_kept: int) -> int:
    """Return the size of the file of an epoch, without its header."""
    return num_samples * min(num_kept, num_classes) * pair_type(num_classes).itemsize
