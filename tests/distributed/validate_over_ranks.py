"""Validates over gloo groups of 1 to 4 forked processes; each rank writes down what it got."""

import json
import os
from pathlib import Path

import torch
import torch.distributed as dist

from bigscl.config import make_config
from bigscl.data.index import load_index
from bigscl.distributed.ranks import process_group
from bigscl.evaluation.validation import Validation
from bigscl.memory.memory import show_nothing
from bigscl.models.spatial import build_model

WORLD_SIZES = (1, 2, 3, 4)
BACKBONE, NUM_CLASSES = "bigscl.models.smallnet:small_resnet", 3


def config_of(folder):
    data = {"train": "t", "val": "v", "size": 48, "resize": "square", "workers": 1, "batch_size": 7}
    data["max_bad_share"] = 0.5
    return make_config({"run": str(folder), "data": data, "model": {"backbone": BACKBONE}})


def network():
    torch.manual_seed(0)
    return build_model(BACKBONE, NUM_CLASSES)


def exchange_bytes():
    """What this rank receives if each sends the others as many bytes as both their numbers say."""
    ranks = process_group()
    sent = [bytes([ranks.rank]) * (other * ranks.rank) for other in range(ranks.world_size)]
    return [list(received) for received in ranks.exchange(sent)]


def main(place):
    folder = Path(place)
    rank = int(os.environ["RANK"])
    # As the expected metrics are computed.
    torch.set_num_threads(1)
    index = load_index(str(folder / "val-*.tar"))
    for world_size in WORLD_SIZES:
        if rank < world_size:
            group = f"file://{folder}/group{world_size}"
            dist.init_process_group("gloo", init_method=group, rank=rank, world_size=world_size)
            model = network()
            validation = Validation(index, config_of(folder), torch.device("cpu"), process_group())
            # The second time with the workers of the first.
            found = [validation.run(model, show_nothing) for _ in range(2)]
            validation.close()
            told = {"metrics": found, "bytes": exchange_bytes()}
            (folder / f"found-{rank}-of-{world_size}.json").write_text(json.dumps(told))
            dist.destroy_process_group()
