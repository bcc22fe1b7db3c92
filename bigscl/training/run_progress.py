"""Epoch, step and random state of a run, and the samples that its epoch has had, on one rank."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bigscl.data.loader import Batch
from bigscl.distributed.ranks import Ranks
from bigscl.training.checkpoint_folder import Checkpoint, Progress, Writer, check_ranks, write_state

FILE = "ranks.pt"
"""The part of a checkpoint that differs between ranks."""


class EpochProgress:
    """Epoch and step of a run, the samples that the epoch has had, and the random state of this rank."""

    def __init__(self, num_rows: int, ranks: Ranks) -> None:
        self._ranks = ranks
        self.current = Progress()
        self.visited: NDArray[np.bool_] = np.zeros(num_rows, bool)
        """Rows that the epoch has had: on this rank, or before the run was resumed."""
        self.skipped: list[int] = []
        """Those among them that could not be read."""

    @property
    def epoch(self) -> int:
        return self.current.epoch

    @property
    def step(self) -> int:
        return self.current.step

    def advance(self, **changes: Any) -> None:
        self.current = replace(self.current, **changes)

    def add(self, batch: Batch) -> None:
        """Note that the epoch has had these samples."""
        skipped = batch.skipped.cpu().numpy()
        self.visited[batch.ids.cpu().numpy()] = True
        self.visited[skipped] = True
        self.skipped += skipped.tolist()

    def begin_epoch(self, epoch: int) -> None:
        """Move on to an epoch that has had no samples yet."""
        self.visited[:] = False
        self.skipped.clear()
        self.advance(epoch=epoch)

    def all_skipped(self) -> list[int]:
        """Return the samples that no rank could read in this epoch, on rank 0; an empty list elsewhere."""
        parts = self._ranks.gather(np.array(self.skipped, np.int64).tobytes()) or []
        return sorted({int(n) for part in parts for n in np.frombuffer(part, np.int64)})

    # Saving and restoring

    def files(self) -> dict[str, Writer]:
        """Return the writers of a checkpoint's files on rank 0, none elsewhere. All ranks call it."""
        rngs = self._ranks.gather(rng_state())
        visited = self._ranks.gather(np.packbits(self.visited).tobytes())
        if rngs is None or visited is None:
            return {}
        on_any_rank = np.bitwise_or.reduce([np.frombuffer(each, np.uint8) for each in visited])
        return {FILE: write_state({"rng": rngs, "visited": torch.from_numpy(on_any_rank)})}

    def check(self, checkpoint: Checkpoint) -> None:
        """Read this part of a checkpoint; raise CheckpointError if it is damaged or does not fit."""
        check_ranks(checkpoint.path / FILE, checkpoint.state(FILE), len(self.visited))

    def restore(self, checkpoint: Checkpoint) -> None:
        """Load this part of a checkpoint that was checked."""
        self.current = checkpoint.progress
        saved = checkpoint.state(FILE)
        packed = saved["visited"].numpy()
        self.visited = np.unpackbits(packed, count=len(self.visited)).astype(bool)
        if self._ranks.rank < len(saved["rng"]):
            set_rng_state(saved["rng"][self._ranks.rank])

    def restore_samples(self, visited: NDArray[np.bool_], skipped: list[int]) -> None:
        """Take the samples that the epoch has had from the store, which has them exactly."""
        self.visited, self.skipped = visited, skipped


def rng_state() -> bytes:
    """Return the state of the generators of the CPU and, if there is one, of the current GPU."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_available():
        states.append(torch.cuda.get_rng_state())
    return b"".join(len(state).to_bytes(8, "little") + state.numpy().tobytes() for state in states)


def set_rng_state(packed: bytes) -> None:
    """Set the generators to a state that `rng_state` returned."""
    states: list[Tensor] = []
    while packed:
        length = int.from_bytes(packed[:8], "little")
        states.append(torch.frombuffer(bytearray(packed[8 : 8 + length]), dtype=torch.uint8))
        packed = packed[8 + length :]
    torch.set_rng_state(states[0])
    if len(states) > 1 and torch.cuda.is_available():
        torch.cuda.set_rng_state(states[1])
