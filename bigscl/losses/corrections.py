"""LL-Cp's corrections: one bit for each class of every training image, set when its label is corrected."""

# Shapes: B batch, L classes, N samples; 8 classes share a byte.

from collections.abc import Callable

import torch
from torch import Tensor

from bigscl.losses.sample_rows import SampleRows, check_bytes


class LabelCorrections(SampleRows):
    """Which unknown labels of every sample were corrected to positives, for the rest of the run."""

    def __init__(self, num_rows: int, num_classes: int) -> None:
        num_bytes = -(-num_classes // 8)
        sum_of = f"a bit for each of {num_rows:,} images x {num_classes:,} classes"
        check_bytes("ll_cp", num_rows * num_bytes, sum_of)
        super().__init__({"bits": torch.zeros(num_rows, num_bytes, dtype=torch.uint8)})
        self._num_classes = num_classes

    def of(self, ids: Tensor, device: torch.device) -> Tensor:
        """Return the corrections of some samples, bool [B,L]."""
        return unpack(self.rows_of("bits", ids, device), self._num_classes)

    def add(self, ids: Tensor, bits: Tensor, ready: Callable[[], object] = lambda: None) -> None:
        """Add corrections of these samples, packed and on the host, valid once `ready` returns."""

        def update() -> None:
            self.tables["bits"][ids] |= bits

        self.update_later(ids, ready, update)


def pack(flags: Tensor) -> Tensor:
    """Return bool [B,L] as bits, uint8 [B, L/8 rounded up]."""
    padded = torch.nn.functional.pad(flags.to(torch.uint8), (0, -flags.shape[1] % 8))
    bits = padded.reshape(len(flags), padded.shape[1] // 8, 8) << _places(flags.device)
    return bits.sum(2, dtype=torch.uint8)


def unpack(bits: Tensor, num_classes: int) -> Tensor:
    """Return what `pack` was given."""
    flags = (bits[:, :, None] >> _places(bits.device)) & 1
    return flags.flatten(1)[:, :num_classes].bool()


def _places(device: torch.device) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)
