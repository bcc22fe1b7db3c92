"""The paper's equations on real photographs, without the trainer: what a run of it should come to.

    python -m tests.benchmarks.equations shards/voc12 --methods an en scl bce

One process, all rows in memory, and nothing of bigscl in what is computed: tars by tarfile, crops by
torchvision, heatmaps through views by grid_sample, metrics by scikit-learn. The blocks that never train see
each view once, and what they say is kept in --cache (2 GB a seed): a run takes five minutes on one core, so a
question to the method is asked three times as fast as with the trainer. `--folds 5 --fold 0` holds a fifth
of train and val together out, instead of val. Settings are those of configs/voc12_lite0_*.yaml.
"""

# Shapes: N images, B batch, L classes, G side of the score map, W side of the heatmap.

import argparse
import io
import json
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from sklearn.metrics import average_precision_score
from torch import Tensor, nn
from torchvision.transforms.v2.functional import resize, resized_crop

from bigscl.models.lite0 import pretrained
from bigscl.training.accelerator import keep_freed_memory

L, G, W = 20, 5, 10
SIZE, BATCH = 160, 32
HEAD_EPOCHS, MAIN_EPOCHS = 4, 5
FROZEN_BLOCKS = 11
MOMENTUM, GAMMA, K = 0.8, 1.0, 1.5


class Images:
    """All images of train and val, their labels, and the frozen features of a seed's views."""

    def __init__(self, shards: Path, cache: Path, seed: int) -> None:
        found = [sample for tar in sorted(shards.glob("*.tar")) for sample in read_tar(tar)]
        self.pixels = [image for image, _, _ in found]
        self.labels = np.zeros((len(found), L), bool)
        for row, (_, labels, _) in enumerate(found):
            self.labels[row, labels] = True
        self.is_train = np.array([is_train for _, _, is_train in found])
        self.cache, self.seed = cache, seed
        cache.mkdir(parents=True, exist_ok=True)
        self.network = pretrained(L).eval().to(memory_format=torch.channels_last)

    def views(self, epoch: int) -> np.ndarray:
        """Crop (left, top, side) in pixels of 256, and flip, of every image in an epoch, [N,4]."""
        random = np.random.default_rng([self.seed, epoch])
        side = np.round(256 * np.sqrt(random.uniform(0.25, 1, len(self.pixels))))
        left, top = (np.floor(random.uniform(0, 1, len(side)) * (257 - side)) for _ in range(2))
        return np.stack([left, top, side, random.random(len(side)) < 0.5], 1).astype(int)

    def features(self, epoch: int | None, deep: bool) -> np.ndarray:
        """What the frozen blocks (all if `deep`) say of the epoch's views, or of whole images."""
        what = "whole" if epoch is None else f"{'deep' if deep else 'mid'}-{self.seed}-{epoch}"
        name = f"{len(self.pixels)}-{what}.npy"
        if not (self.cache / name).exists():
            parts = list(self._compute(epoch, deep))
            np.save(self.cache / name, np.concatenate(parts))
        return np.load(self.cache / name, mmap_mode="r")

    @torch.no_grad()
    def _compute(self, epoch: int | None, deep: bool) -> Iterator[np.ndarray]:
        views = None if epoch is None else self.views(epoch)
        for start in range(0, len(self.pixels), BATCH):
            looks = [
                self._look(row, None if views is None else views[row])
                for row in range(start, min(start + BATCH, len(self.pixels)))
            ]
            batch = ((torch.stack(looks).float() - 127) / 128).contiguous(memory_format=torch.channels_last)
            features = early(self.network, batch)
            yield (late(self.network, features) if deep else features).half().numpy()

    def _look(self, row: int, view: np.ndarray | None) -> Tensor:
        image = torch.from_numpy(self.pixels[row]).permute(2, 0, 1)
        if view is None:
            return resize(image, [SIZE, SIZE], antialias=True)
        left, top, side, flip = view
        look = resized_crop(image, top, left, side, side, [SIZE, SIZE], antialias=True)
        return look.flip(-1) if flip else look


def read_tar(path: Path) -> Iterator[tuple[np.ndarray, list[int], bool]]:
    """(pixels, labels, whether of the train split) of each image."""
    with tarfile.open(path) as tar:
        members = {member.name: member for member in tar.getmembers()}
        for name in members:
            if name.endswith(".jpg"):
                image = Image.open(io.BytesIO(tar.extractfile(members[name]).read())).convert("RGB")
                about = json.load(tar.extractfile(members[name.replace(".jpg", ".json")]))
                yield np.array(image), about["labels"], path.name.startswith("train")


def early(network: nn.Module, images: Tensor) -> Tensor:
    features = network._swish(network._bn0(network._conv_stem(images)))
    for block in network._blocks[:FROZEN_BLOCKS]:
        features = block(features)
    return features


def late(network: nn.Module, features: Tensor) -> Tensor:
    rate, count = network._global_params.drop_connect_rate, len(network._blocks)
    for place in range(FROZEN_BLOCKS, count):
        features = network._blocks[place](features, drop_connect_rate=rate * place / count)
    return network._swish(network._bn1(network._conv_head(features)))


def logit_map(network: nn.Module, features: Tensor) -> Tensor:
    features = F.dropout2d(features, network._dropout.p, network.training)
    return F.conv2d(features, network._fc.weight[:, :, None, None], network._fc.bias)


def seen_through(maps: Tensor, views: Tensor, size: int, *, back: bool) -> tuple[Tensor, Tensor]:
    """Maps [B,L,S,S] of images through views, or of views `back` in their images; and what they cover."""
    left, top, side = (views[:, place, None].float() / 256 for place in range(3))
    centres = (torch.arange(size) + 0.5) / size
    x, y = ((centres - left) / side, (centres - top) / side) if back else (centres * side, centres * side)
    mirrored = views[:, 3, None] == 1
    if back:
        covered = ((x >= 0) & (x < 1))[:, None, :] & ((y >= 0) & (y < 1))[:, :, None]
        x = torch.where(mirrored, 1 - x, x)
    else:
        covered = torch.ones(len(maps), size, size, dtype=torch.bool)
        x, y = left + torch.where(mirrored, side - x, x), top + y
    grid = torch.stack(torch.broadcast_tensors(x[:, None, :], y[:, :, None]), -1) * 2 - 1
    return F.grid_sample(maps.float(), grid, padding_mode="border", align_corners=False), covered


class Run:
    """One training of a method, and what it remembers."""

    def __init__(self, images: Images, method: str, options: argparse.Namespace) -> None:
        self.images, self.method, self.options = images, method, options
        self.train_rows, self.held_rows = split(images, options.folds, options.fold)
        random = np.random.default_rng([options.seed, 77])
        truth = images.labels
        given = np.zeros_like(truth)
        for row, labels in enumerate(truth):
            given[row, random.choice(np.flatnonzero(labels))] = True
        self.known = torch.from_numpy(truth if method == "bce" else given)
        self.scores = self.known.half()
        self.heatmaps = self.known.half()[:, :, None, None].repeat(1, 1, W, W)
        self.expected = torch.zeros_like(self.known)
        torch.manual_seed(options.seed)
        self.network = pretrained(L).to(memory_format=torch.channels_last)

    def train(self) -> float:
        """Validation mAP after the last epoch."""
        for epoch in range(HEAD_EPOCHS + MAIN_EPOCHS):
            self._begin(epoch)
            order = np.random.default_rng([self.options.seed, 1000 + epoch]).permutation(self.train_rows)
            features = self.images.features(epoch, deep=epoch < HEAD_EPOCHS)
            views = torch.from_numpy(self.images.views(epoch))
            batches = np.array_split(order, -(-len(order) // BATCH))
            for place, rows in enumerate(batches):
                self._step(
                    epoch + place / len(batches), torch.from_numpy(features[rows]).float(), rows, views
                )
            self._select()
        return self._evaluate()

    def _begin(self, epoch: int) -> None:
        if epoch in (0, HEAD_EPOCHS):
            network = self.network
            late_modules = [*network._blocks[FROZEN_BLOCKS:], network._conv_head, network._bn1]
            trained = [network._fc, *(late_modules if epoch else [])]
            self.optimizer = torch.optim.Adam([p for module in trained for p in module.parameters()])
        self.network.train()
        for module in self.network.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.train(self.options.batch_statistics)

    def _step(self, epoch: float, features: Tensor, rows: np.ndarray, views: Tensor) -> None:
        main = epoch >= HEAD_EPOCHS
        done = (epoch - HEAD_EPOCHS) / MAIN_EPOCHS
        self.optimizer.param_groups[0]["lr"] = 1e-4 * (1 + np.cos(np.pi * done)) / 2 if main else 1e-3
        maps = logit_map(self.network, late(self.network, features) if main else features)
        logits, places = maps.mean((2, 3)), torch.from_numpy(rows)
        known, scores = self.known[places], self.scores[places].float()
        negative = ~known & ~self.expected[places] if self.method in ("en", "cl", "scl") else ~known
        loss = -(F.logsigmoid(logits) * known + F.logsigmoid(-logits) * negative).mean()
        gamma = self.options.gamma * min(1, epoch / HEAD_EPOCHS)
        view = views[places]
        if self.method == "cl":
            loss = loss + gamma * (logits.sigmoid() - scores).square().mean()
        if self.method == "scl":
            target, _ = seen_through(self.heatmaps[places], view, G, back=False)
            loss = loss + gamma * (maps.sigmoid() - target).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self._remember(places, maps.detach().sigmoid(), logits.detach().sigmoid(), view)

    def _remember(self, places: Tensor, maps: Tensor, pooled: Tensor, view: Tensor) -> None:
        mu, before = self.options.momentum, self.heatmaps[places].float()
        self.scores[places] = (mu * self.scores[places].float() + (1 - mu) * pooled).half()
        seen, covered = seen_through(maps, view, W, back=True)
        self.heatmaps[places] = torch.where(covered[:, None], mu * before + (1 - mu) * seen, before).half()

    def _select(self) -> None:
        """The round(K * count) training images of highest score of each class."""
        self.expected[:] = False
        scores = self.scores[self.train_rows].float().numpy()
        for label in range(L):
            number = round(K * int(self.known[self.train_rows, label].sum()))
            best = np.argsort(-scores[:, label], kind="stable")[:number]
            self.expected[self.train_rows[best], label] = True

    @torch.no_grad()
    def _evaluate(self) -> float:
        self.network.eval()
        features = self.images.features(None, deep=False)
        parts = np.array_split(self.held_rows, -(-len(self.held_rows) // BATCH))
        maps = [
            logit_map(self.network, late(self.network, torch.from_numpy(features[rows]).float()))
            for rows in parts
        ]
        logits = torch.cat([each.mean((2, 3)) for each in maps]).numpy()
        return float(average_precision_score(self.images.labels[self.held_rows], logits))


def split(images: Images, folds: int | None, fold: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows to train on and rows held out: the official split, or one of so many folds of all."""
    if folds is None:
        return np.flatnonzero(images.is_train), np.flatnonzero(~images.is_train)
    held = np.array_split(np.random.default_rng(77).permutation(len(images.pixels)), folds)[fold]
    return np.setdiff1d(np.arange(len(images.pixels)), held), held


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shards", type=Path, help="folder with VOC's train-*.tar and val-*.tar, 256 x 256")
    parser.add_argument(
        "--methods", nargs="+", default=["an", "en", "scl"], choices=["an", "en", "cl", "scl", "bce"]
    )
    parser.add_argument("--seed", type=int, default=0, help="of views, given labels and weights")
    parser.add_argument("--folds", type=int, help="hold out one of so many parts, not the val split")
    parser.add_argument("--fold", type=int, default=0, help="which of them")
    parser.add_argument("--batch-statistics", action="store_true", help="batch normalisation as in training")
    parser.add_argument("--gamma", type=float, default=GAMMA)
    parser.add_argument("--momentum", type=float, default=MOMENTUM)
    parser.add_argument("--cache", type=Path, default=Path("runs/equations"))
    options = parser.parse_args()
    keep_freed_memory()
    images = Images(options.shards, options.cache, options.seed)
    for method in options.methods:
        started = time.monotonic()
        found = Run(images, method, options).train()
        print(f"{method}: mAP {100 * found:.2f}, {(time.monotonic() - started) / 60:.1f} minutes", flush=True)


if __name__ == "__main__":
    main()
