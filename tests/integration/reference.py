"""The paper's equations, written down plainly: one process, all rows in memory, loops over samples and cells.

Only the data comes from the project (its order, its pixels, its views); nothing that learns or remembers.
Scores and heatmaps are kept in float16 and computed in float32, as the paper has it.
"""

# N samples, L classes, G side of the score map, W = 2G side of the heatmap.

import math
from collections.abc import Iterator
from itertools import zip_longest

import numpy as np
import torch

from bigscl.config import Config
from bigscl.data.epoch_plan import training_plan
from bigscl.data.index import Index
from bigscl.data.loader import Batch, Loader
from tests.integration.tiny import TinyNet
from tests.test_store.rounding_reference import slowly_rounded


class Reference:
    """A run of EN + SCL with a warm-up of the head, then top-k; every epoch leaves its state in `epochs`."""

    def __init__(self, config: Config, index: Index, world_size: int = 1) -> None:
        self.config, self.index, self.world_size = config, index, world_size
        self.place = {int(n): place for place, n in enumerate(index.ids())}
        self.annotated = index.labels_of(index.ids()) == 1
        torch.manual_seed(config.seed)
        self.net = TinyNet(index.num_classes)
        side = 2 * config.data.size // 8
        self.scores = self.annotated.astype(np.float16)
        self.heatmaps = np.ones((side, side), np.float16) * self.scores[:, :, None, None]
        self.kept = np.ones_like(self.annotated)
        self.expected = np.zeros_like(self.annotated)
        self.epochs: list[dict] = []

    def train(self) -> "Reference":
        schedule = self.config.schedule
        for epoch in range(schedule.warmup.epochs + schedule.main.epochs):
            self.epoch = epoch
            if epoch in (0, schedule.warmup.epochs):
                self.begin_phase(head_only=epoch < schedule.warmup.epochs)
            steps = list(self.steps(epoch))
            for place, batches in enumerate(steps):
                self.step(epoch, place, len(steps), [batch for batch in batches if batch is not None])
            self.expected = self.select()
            if epoch + 1 == schedule.warmup.epochs:
                self.kept = self.top_classes(self.config.store.top)
                self.heatmaps[~self.kept] = 0
            self.epochs.append(
                {
                    "scores": self.scores.copy(),
                    "heatmaps": self.heatmaps.copy(),
                    "kept": self.kept.copy(),
                    "expected": self.expected.copy(),
                    "weights": {name: value.clone() for name, value in self.net.state_dict().items()},
                }
            )
        return self

    def steps(self, epoch: int) -> Iterator[tuple[Batch | None, ...]]:
        """The batches of all ranks, step by step."""
        data, index = self.config.data, self.index
        plan = training_plan(
            index.shard_sizes,
            index.rows_per_shard,
            seed=self.config.seed,
            epoch=epoch,
            batch_size=data.batch_size,
            world_size=self.world_size,
            shuffle_buffer=data.shuffle_buffer,
        )
        transform = data.training_transform(self.config.seed, epoch)
        return zip_longest(*(Loader(index, plan, rank, transform) for rank in range(self.world_size)))

    def begin_phase(self, head_only: bool) -> None:
        self.net.features.requires_grad_(not head_only)
        trained = [parameter for parameter in self.net.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.Adam(trained, weight_decay=self.config.optimizer.weight_decay)

    def step(self, epoch: int, place: int, num_steps: int, batches: list[Batch]) -> None:
        self.optimizer.param_groups[0]["lr"] = self.learning_rate(epoch, place, num_steps)
        ramp = self.config.objective.gamma
        gamma = ramp.peak * min(1.0, (epoch + place / num_steps) / ramp.epochs)
        count = sum(len(batch.ids) for batch in batches)
        looks = [look for batch in batches for look in self.look(batch, gamma)]
        self.optimizer.zero_grad()
        (sum(loss for loss, _ in looks) / count).backward()
        self.optimizer.step()
        for _, remember in looks:
            remember()

    def learning_rate(self, epoch: int, place: int, num_steps: int) -> float:
        warmup, main = self.config.schedule.warmup, self.config.schedule.main
        if epoch < warmup.epochs:
            return warmup.learning_rate
        done = ((epoch - warmup.epochs) * num_steps + place) / (main.epochs * num_steps)
        return main.learning_rate * (1 + math.cos(math.pi * done)) / 2

    def look(self, batch: Batch, gamma: float) -> Iterator[tuple]:
        """(loss, what to call to remember this look) for each image."""
        mean, std = (
            torch.tensor(each)[:, None, None] for each in (self.config.data.mean, self.config.data.std)
        )
        for n, pixels, view in zip(batch.ids.tolist(), batch.images, batch.views.tolist(), strict=True):
            row = self.place[n]
            image = (pixels.float() / 255 - mean) / std
            features = self.net.features(image.contiguous()[None])[0]
            logits = (
                torch.einsum("lc,cyx->lyx", self.net.fc.weight, features) + self.net.fc.bias[:, None, None]
            )
            maps, pooled = torch.sigmoid(logits), torch.sigmoid(logits.mean((1, 2)))
            target = torch.from_numpy(to_view(self.heatmaps[row].astype(np.float32), view, maps.shape[-1]))
            # Eq. 8: annotated positives, and the negatives that are not expected to be positive.
            positive, negative = self.annotated[row], ~self.annotated[row] & ~self.expected[row]
            en = -(pooled.log()[positive].sum() + (1 - pooled).log()[negative].sum()) / len(pooled)
            scl = (maps - target).square().mean()
            yield (
                en + gamma * scl,
                lambda row=row, maps=maps, f=pooled, view=view: self.remember(row, maps, f, view),
            )

    def remember(self, row: int, maps: torch.Tensor, pooled: torch.Tensor, view: list[float]) -> None:
        """The running averages, for classes that have a heatmap and cells that the view covers."""
        mu = np.float32(self.config.store.momentum)
        new = pooled.detach().numpy()
        self.scores[row] = (mu * self.scores[row].astype(np.float32) + (1 - mu) * new).astype(np.float16)
        seen, covered = to_image(maps.detach().numpy(), view, self.heatmaps.shape[-1])
        old = self.heatmaps[row].astype(np.float32)
        updated = (mu * old + (1 - mu) * seen).astype(np.float16)
        change = covered[None] & self.kept[row][:, None, None]
        self.heatmaps[row] = np.where(change, updated, self.heatmaps[row])
        if self.config.store.codec == "uint8":
            kept, sample = self.kept[row], int(self.index.ids()[row])
            self.heatmaps[row][kept] = slowly_rounded(self.heatmaps[row][kept], sample, self.epoch)

    def select(self) -> np.ndarray:
        """The round(K * count) images of highest score of each class, ties by lowest id."""
        expected = np.zeros_like(self.annotated)
        for i in range(expected.shape[1]):
            number = round(self.config.selection.K * int(self.annotated[:, i].sum()))
            best_first = sorted(range(len(expected)), key=lambda row, i=i: (-self.scores[row, i], row))
            expected[best_first[:number], i] = True
        return expected

    def top_classes(self, top: int) -> np.ndarray:
        """The classes of highest score of each image; annotated ones before all, ties by lowest class."""
        kept = np.zeros_like(self.annotated)
        for row, scores in enumerate(self.scores):
            order = sorted(
                range(len(scores)), key=lambda i, row=row: (~self.annotated[row, i], -scores[i], i)
            )
            kept[row, order[:top]] = True
        return kept


def to_view(heatmaps: np.ndarray, view: list[float], size: int) -> np.ndarray:
    """Each cell of the view takes the heatmap's value at its centre."""
    left, top, width, height, flip = view
    seen = np.empty((len(heatmaps), size, size), np.float32)
    for y in range(size):
        for x in range(size):
            column = size - 1 - x if flip else x
            seen[:, y, x] = at(
                heatmaps, top + height * (y + 0.5) / size, left + width * (column + 0.5) / size
            )
    return seen


def to_image(maps: np.ndarray, view: list[float], size: int) -> tuple[np.ndarray, np.ndarray]:
    """Each cell of the image whose centre is in the view takes the map's value there; and which do."""
    left, top, width, height, flip = view
    seen, covered = np.zeros((len(maps), size, size), np.float32), np.zeros((size, size), bool)
    for y in range(size):
        for x in range(size):
            row, column = (y + 0.5) / size, (x + 0.5) / size
            if top <= row < top + height and left <= column < left + width:
                across = (column - left) / width
                seen[:, y, x] = at(maps, (row - top) / height, 1 - across if flip else across)
                covered[y, x] = True
    return seen, covered


def at(maps: np.ndarray, y: float, x: float) -> np.ndarray:
    """Maps [L,S,S] at a point of the unit square, between the centres of the nearest cells."""
    side = maps.shape[-1]
    y, x = (min(max(position * side - 0.5, 0.0), side - 1.0) for position in (y, x))
    above, before = int(y), int(x)
    below, after = min(above + 1, side - 1), min(before + 1, side - 1)
    down, right = np.float32(y - above), np.float32(x - before)
    upper = (1 - right) * maps[:, above, before] + right * maps[:, above, after]
    lower = (1 - right) * maps[:, below, before] + right * maps[:, below, after]
    return (1 - down) * upper + down * lower
