"""The memory in a Lightning module: `python -m bigscl.examples.lightning_loop [FOLDER]`.

For one process. Run it again to resume. The trainer gives the same weights and the same store, bit for bit.
"""

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

import bigscl
from bigscl.data.index import Index
from bigscl.data.loader import normalize
from bigscl.data.transforms import MEAN, STD
from bigscl.examples.scene_shards import SIDE, scene_shards

SEED, BATCH_SIZE = 0, 8


class SceneClassifier(lightning.LightningModule):
    """Trains a small network with EN + SCL."""

    def __init__(self, index: Index, memory: bigscl.Memory) -> None:
        super().__init__()
        self.model = bigscl.build_model("bigscl.models.smallnet:small_resnet", index.num_classes)
        self.objective = bigscl.objective("en", "scl")
        self.index, self.memory = index, memory

    def configure_optimizers(self) -> Any:
        """Return the trainer's default optimizer."""
        return torch.optim.Adam(self.model.parameters(), lr=2e-3, weight_decay=1e-4)

    def train_dataloader(self) -> Any:
        """Return the batches of this epoch."""
        self.plan = self.memory.plan(batch_size=BATCH_SIZE, seed=SEED, shuffle_buffer=40)
        transform = bigscl.TrainingTransform(size=SIDE, seed=SEED, epoch=self.memory.epoch)
        return bigscl.Loader(self.index, self.plan, 0, transform)

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Leave the batch as it is: the step moves what it needs."""
        return batch

    def training_step(self, batch: Any, place: int) -> Tensor:
        """Return the loss of a batch, and learn from its prediction."""
        # Not prefetch: Lightning starts its iterator twice in an epoch, and drops what one of them read.
        stored = self.memory.lookup(batch.ids, batch.views)
        prediction = self.model(normalize(batch.images.to(self.device), MEAN, STD).contiguous())
        maps = prediction.logit_map.float().sigmoid()
        gamma = self.objective.gamma.at(self.memory.epoch + place / self.plan.num_steps)
        inputs = stored.inputs(prediction.logits, batch.labels.to(self.device), maps)
        loss = self.objective(inputs, gamma=gamma).total.mean()
        self.memory.update(stored, logits=prediction.logits, maps=maps)
        print(f"epoch {self.memory.epoch} step {place} loss {loss.item():.6f}")
        return loss

    def on_train_epoch_end(self) -> None:
        """Select and commit, before Lightning saves its checkpoint."""
        self.memory.end_epoch(step=self.global_step)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Name the snapshot of the store that belongs to the checkpoint."""
        checkpoint["memory"] = self.memory.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Return to the snapshot that the checkpoint names."""
        self.memory.load_state_dict(checkpoint["memory"])


def train(folder: Path, epochs: int = 3) -> None:
    """Train on scenes of digits, from the newest checkpoint if there is one."""
    index = scene_shards(folder / "shards")
    last = folder / "last.ckpt"
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        reload_dataloaders_every_n_epochs=1,  # each epoch has its own plan
        callbacks=ModelCheckpoint(folder, save_top_k=0, save_last=True),
        logger=False,
        enable_progress_bar=False,
    )
    settings = bigscl.StoreConfig(url=str(folder / "store"), top=4, compact_after=1)
    with bigscl.Memory(index.annotations(), settings, heatmap_size=12, positives_per_image=2.5) as memory:
        if not last.exists():
            memory.reset()
        lightning.seed_everything(SEED)
        trainer.fit(SceneClassifier(index, memory), ckpt_path=str(last) if last.exists() else None)


if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("runs/lightning_loop"))
    parser.add_argument("--epochs", type=int, default=3)
    train(**vars(parser.parse_args()))
