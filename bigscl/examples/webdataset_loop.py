"""The memory in a webdataset trainer: `python -m bigscl.examples.webdataset_loop [FOLDER] [--planned]`.

Three things are new in the pipeline: ids, crops that report their views, and both in the batch. With
--planned the shards come in the memory's order and views are drawn by id: then the trainer with
`data.shuffle_buffer: 1` gives the same weights and the same store, bit for bit.
"""

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path
from typing import Any

import torch
import webdataset as wds
from torch import Tensor

import bigscl
from bigscl.data.index import Index
from bigscl.data.loader import normalize
from bigscl.data.transforms import MEAN, STD
from bigscl.examples.scene_shards import SIDE, scene_shards

SEED, BATCH_SIZE = 0, 8
Sample = dict[str, Any]


class Crop:
    """Crops the image of a sample, and adds the view."""

    def __init__(self, epoch: int, planned: bool) -> None:
        self._random = bigscl.RandomResizedCropWithView(SIDE)
        self._by_id = bigscl.TrainingTransform(size=SIDE, seed=SEED, epoch=epoch)
        self._planned = planned

    def __call__(self, sample: Sample) -> Sample:
        """Return the sample with `image` and `view`."""
        if self._planned:
            by_id = self._by_id(sample["png"], sample["__id__"])
            return {"__id__": sample["__id__"], "image": by_id.pixels, "view": torch.tensor(by_id.view)}
        image, view = self._random(sample["png"])
        return {"__id__": sample["__id__"], "image": image, "view": view}


def pipeline(index: Index, memory: bigscl.Memory, planned: bool) -> wds.WebDataset:
    """Return the batches of an epoch: each sample once."""
    urls = list(index.urls)
    if planned:
        plan = memory.plan(batch_size=BATCH_SIZE, seed=SEED)
        urls = [index.urls[shard] for shard in plan.streams[0][0].shards]
    # Not resampled: a sample comes at most once per epoch. `split_by_node` gives each shard to one rank.
    dataset = wds.WebDataset(urls, shardshuffle=0 if planned else 100, nodesplitter=wds.split_by_node)
    dataset = dataset.shuffle(0 if planned else 40).map(bigscl.SampleIds(index)).decode("torchrgb8")
    return dataset.map(Crop(memory.epoch, planned)).batched(BATCH_SIZE, collation_fn=collate)


def collate(samples: list[Sample]) -> dict[str, Tensor]:
    """Return a batch with `ids` and `views`."""
    return {
        "ids": torch.tensor([sample["__id__"] for sample in samples]),
        "views": torch.stack([sample["view"] for sample in samples]),
        "images": torch.stack([sample["image"] for sample in samples]),
    }


def train(folder: Path, epochs: int = 3, planned: bool = False) -> None:
    """Train a small network with EN + SCL on scenes of digits, and save its weights."""
    index = scene_shards(folder / "shards")
    torch.manual_seed(SEED)
    model = bigscl.build_model("bigscl.models.smallnet:small_resnet", index.num_classes)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, weight_decay=1e-4)
    objective = bigscl.objective("en", "scl")
    settings = bigscl.StoreConfig(url=str(folder / "store"), top=4, compact_after=1)
    with bigscl.Memory(index.annotations(), settings, heatmap_size=12, positives_per_image=2.5) as memory:
        memory.reset()
        num_steps = -(-index.num_samples // BATCH_SIZE)
        for epoch in range(epochs):
            batches = memory.prefetch(pipeline(index, memory, planned))
            for step, (batch, stored) in enumerate(batches):
                labels = torch.from_numpy(index.labels_of(batch["ids"].numpy()))
                prediction = model(normalize(batch["images"], MEAN, STD).contiguous())
                maps = prediction.logit_map.sigmoid()
                gamma = objective.gamma.at(epoch + step / num_steps)
                inputs = stored.inputs(prediction.logits, labels, maps)
                loss: Any = objective(inputs, gamma=gamma).total.mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                memory.update(stored, logits=prediction.logits, maps=maps)
                print(f"epoch {epoch} step {step} loss {loss.item():.6f}")
            memory.end_epoch()
    torch.save(model.network.state_dict(), folder / "weights.pt")


if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("runs/webdataset_loop"))
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--planned", action="store_true")
    train(**vars(parser.parse_args()))
