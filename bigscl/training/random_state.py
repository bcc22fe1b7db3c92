"""The state of torch's random generators on this rank, as bytes that a checkpoint can hold."""

import torch
from torch import Tensor


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
