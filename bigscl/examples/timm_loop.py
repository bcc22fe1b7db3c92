"""The memory with a plain timm network: `python -m bigscl.examples.timm_loop [FOLDER] [--name NAME]`.

The only change to the network is that its linear layer is applied before the pooling, which commutes. The
trainer with `model.backbone: timm:NAME` gives the same weights, bit for bit.
"""

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor

import bigscl
from bigscl.data.loader import normalize
from bigscl.data.transforms import MEAN, STD
from bigscl.examples.scene_shards import SIDE, scene_shards

SEED, BATCH_SIZE = 0, 8


def logit_maps(network: Any, images: Tensor) -> Tensor:
    """Return a logit for every class in every cell of the last feature map, [B,L,G,G]."""
    features: Tensor = network.forward_features(images)
    logits: Tensor = network.get_classifier()(features.movedim(1, -1))
    return logits.movedim(-1, 1)


def train(folder: Path, name: str = "resnet10t", epochs: int = 2) -> None:
    """Train a network of timm with EN + SCL on scenes of digits, and save its weights."""
    index = scene_shards(folder / "shards")
    torch.manual_seed(SEED)
    network = timm.create_model(name, num_classes=index.num_classes)
    optimizer = torch.optim.Adam(network.parameters(), lr=2e-3, weight_decay=1e-4)
    objective = bigscl.objective("en", "scl")
    side = logit_maps(network.eval(), torch.zeros(1, 3, SIDE, SIDE)).shape[-1]
    settings = bigscl.StoreConfig(url=str(folder / "store"))
    with bigscl.Memory(
        index.annotations(), settings, heatmap_size=2 * side, positives_per_image=2.5
    ) as memory:
        memory.reset()
        network.train()
        for epoch in range(epochs):
            plan = memory.plan(batch_size=BATCH_SIZE, seed=SEED, shuffle_buffer=40)
            loader = bigscl.Loader(
                index, plan, 0, bigscl.TrainingTransform(size=SIDE, seed=SEED, epoch=epoch)
            )
            for step, (batch, stored) in enumerate(memory.prefetch(loader)):
                logit_map = logit_maps(network, normalize(batch.images, MEAN, STD).contiguous())
                logits, maps = logit_map.mean((2, 3)), logit_map.sigmoid()
                gamma = objective.gamma.at(epoch + step / plan.num_steps)
                inputs = stored.inputs(logits, batch.labels, maps)
                loss: Any = objective(inputs, gamma=gamma).total.mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                memory.update(stored, logits=logits, maps=maps)
                print(f"epoch {epoch} step {step} loss {loss.item():.6f}")
            memory.end_epoch()
    torch.save(network.state_dict(), folder / "weights.pt")


if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("runs/timm_loop"))
    parser.add_argument("--name", default="resnet10t")
    parser.add_argument("--epochs", type=int, default=2)
    train(**vars(parser.parse_args()))
