"""Selects over gloo groups of 1 to 4 forked processes; each rank writes down what it got."""

import json
import os
from pathlib import Path

import numpy as np
import torch.distributed as dist

from bigscl.distributed.ranks import process_group
from bigscl.selection.ranking import select

WORLD_SIZES = (1, 2, 3, 4)
NUM_SAMPLES, NUM_CLASSES = 600, 7
NUM_EXPECTED = np.array([0, 1, 40, 250, 599, 600, 2000])


def cases():
    """Scores [N,L] by name, and the ids of their rows: with gaps, in no order."""
    rng = np.random.default_rng(11)
    shape = (NUM_SAMPLES, NUM_CLASSES)
    scores = {
        "random": rng.random(shape),
        "all equal": np.full(shape, 0.3),
        "all zero": np.zeros(shape),
        "two values": rng.integers(0, 2, shape) * 0.5,
        "ten values": rng.integers(0, 10, shape) / 10,
        "rising": np.repeat(np.linspace(0, 1, NUM_SAMPLES)[:, None], NUM_CLASSES, 1),
    }
    ids = rng.permutation(5 * NUM_SAMPLES)[:NUM_SAMPLES]
    return ids, {name: values.astype(np.float16) for name, values in scores.items()}


def share(rank, world_size):
    """The rows of a rank: uneven, and none at all for the last of three."""
    if world_size == 3:
        return np.arange(NUM_SAMPLES)[rank::2] if rank < 2 else np.arange(0)
    bounds = NUM_SAMPLES * np.arange(world_size + 1) ** 2 // world_size**2
    return np.arange(bounds[rank], bounds[rank + 1])


def select_all(rank, world_size):
    """The cuts of every case, with the last keys gathered, and with all bits found by sums."""
    ids, scores = cases()
    rows = share(rank, world_size)
    found = {}
    for name, values in scores.items():
        for gather_keys in (2**17, 0):
            chunks = [(ids[part], values[part]) for part in np.array_split(rows, 3 + rank)]
            selection = select(chunks, NUM_EXPECTED, process_group(), gather_keys=gather_keys)
            found[f"{name}, {gather_keys} keys"] = selection.to_json()
    return found


def main(place):
    folder = Path(place)
    rank = int(os.environ["RANK"])
    for world_size in WORLD_SIZES:
        if rank < world_size:
            group = f"file://{folder}/group{world_size}"
            dist.init_process_group("gloo", init_method=group, rank=rank, world_size=world_size)
            found = select_all(rank, world_size)
            (folder / f"cuts-{rank}-of-{world_size}.json").write_text(json.dumps(found))
            dist.destroy_process_group()
