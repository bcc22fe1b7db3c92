"""The memory in an own loop: `python -m bigscl.examples.own_loop [FOLDER]`.

`accelerate launch -m bigscl.examples.own_loop` trains on several processes. Run it again to resume. On
one process the trainer gives the same weights and the same store, bit for bit.
"""

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.nn.parallel import DistributedDataParallel

import bigscl
from bigscl.common.files import atomic_write
from bigscl.data.loader import normalize
from bigscl.data.transforms import MEAN, STD
from bigscl.examples.scene_shards import SIDE, scene_shards

SEED, BATCH_SIZE = 0, 8


def train(folder: Path, epochs: int = 3) -> None:
    """Train a small network with EN + SCL on scenes of digits."""
    accelerator = Accelerator()
    with accelerator.main_process_first():
        index = scene_shards(folder / "shards")
    set_seed(SEED)
    model: Any = bigscl.build_model("bigscl.models.smallnet:small_resnet", index.num_classes)
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=2e-3, weight_decay=1e-4)
    model, optimizer = accelerator.prepare(model, optimizer)
    objective = bigscl.objective("en", "scl")
    with bigscl.Memory(
        index.annotations(),
        bigscl.StoreConfig(url=str(folder / "store"), top=4, compact_after=1),
        heatmap_size=12,  # twice the side of the score maps
        positives_per_image=2.5,
        device=accelerator.device,
    ) as memory:
        load(folder / "checkpoint.pt", accelerator.unwrap_model(model), optimizer, memory)
        for epoch in range(memory.epoch, epochs):
            plan = memory.plan(batch_size=BATCH_SIZE, seed=SEED, shuffle_buffer=40)
            transform = bigscl.TrainingTransform(size=SIDE, seed=SEED, epoch=epoch)
            loader = bigscl.Loader(index, plan, accelerator.process_index, transform)
            with uneven_batches(model):
                for step, (batch, stored) in enumerate(memory.prefetch(loader)):
                    images = normalize(batch.images.to(accelerator.device), MEAN, STD).contiguous()
                    labels = batch.labels.to(accelerator.device)
                    prediction = model(images)
                    maps = prediction.logit_map.float().sigmoid()
                    gamma = objective.gamma.at(epoch + step / plan.num_steps)
                    loss = objective(stored.inputs(prediction.logits, labels, maps), gamma=gamma)
                    optimizer.zero_grad()
                    accelerator.backward(loss.total.mean())
                    optimizer.step()
                    memory.update(stored, logits=prediction.logits, maps=maps)
                    accelerator.print(f"epoch {epoch} step {step} loss {loss.total.mean().item():.6f}")
            memory.end_epoch()
            if accelerator.is_main_process:
                save(folder / "checkpoint.pt", accelerator.unwrap_model(model), optimizer, memory)
    accelerator.end_training()


def uneven_batches(model: Any) -> AbstractContextManager[Any]:
    """Let ranks with fewer batches take part in the others' steps."""
    return model.join() if isinstance(model, DistributedDataParallel) else nullcontext()


def save(path: Path, model: Any, optimizer: Any, memory: bigscl.Memory) -> None:
    """Write a checkpoint: it names the snapshot of the store that belongs to it."""
    parts = {"model": model, "optimizer": optimizer, "memory": memory}
    with atomic_write(path) as partial:
        torch.save({name: part.state_dict() for name, part in parts.items()}, partial)


def load(path: Path, model: Any, optimizer: Any, memory: bigscl.Memory) -> None:
    """Return to the checkpoint if there is one, else to the beginning."""
    if not path.exists():
        memory.reset()
        return
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    memory.load_state_dict(state["memory"])


if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("runs/own_loop"))
    parser.add_argument("--epochs", type=int, default=3)
    train(**vars(parser.parse_args()))
