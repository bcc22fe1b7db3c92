"""The same for SCL+: corrected targets, spatial ranking, K of each class, pseudo-positives."""

import math

import numpy as np
import torch

from tests.integration.reference import Reference, to_image, to_view

HALF = 0.5


class ReferencePlus(Reference):
    """A run of ENP + corrected SCL, ranked by spatial evidence, with K of each class."""

    def __init__(self, config, index, world_size=1):
        super().__init__(config, index, world_size)
        self.looks = np.zeros((len(self.scores), *self.heatmaps.shape[2:]), int)
        self.pseudo_positives = np.zeros_like(self.annotated)
        self.ratios = [config.selection.K] * self.annotated.shape[1]
        self.cuts = []

    def look(self, batch, gamma):
        mean, std = (
            torch.tensor(each)[:, None, None] for each in (self.config.data.mean, self.config.data.std)
        )
        self.apply_cuts()
        for n, pixels, view in zip(batch.ids.tolist(), batch.images, batch.views.tolist(), strict=True):
            row = self.place[n]
            features = self.net.features(((pixels.float() / 255 - mean) / std).contiguous()[None])[0]
            logits = (
                torch.einsum("lc,cyx->lyx", self.net.fc.weight, features) + self.net.fc.bias[:, None, None]
            )
            maps, pooled = torch.sigmoid(logits), torch.sigmoid(logits.mean((1, 2)))
            side = maps.shape[-1]
            left = self.config.store.momentum ** self.looks[row].astype(np.float64)
            seen = np.where(
                self.looks[row] > 0, self.without_initial_value(row) / np.maximum(1 - left, 1e-6), 0
            )
            target = torch.from_numpy(to_view(np.minimum(seen, 1).astype(np.float32), view, side))
            trust = torch.from_numpy(to_view((1 - left).astype(np.float32)[None], view, side))
            annotated, pseudo_positives = self.annotated[row], self.pseudo_positives[row]
            positive = annotated | pseudo_positives
            negative = ~annotated & ~pseudo_positives & ~self.expected[row]
            enp = -(pooled.log()[positive].sum() + (1 - pooled).log()[negative].sum()) / len(pooled)
            scl = (trust * (maps - target).square()).mean()
            yield (
                enp + gamma * scl,
                lambda row=row, maps=maps, f=pooled, view=view: self.remember(row, maps, f, view),
            )

    def remember(self, row, maps, pooled, view):
        super().remember(row, maps, pooled, view)
        _, covered = to_image(maps.detach().numpy(), view, self.heatmaps.shape[-1])
        self.looks[row] += covered

    def without_initial_value(self, row):
        """What was seen since the start, [L,W,W]: annotated classes started at 1."""
        start = self.config.store.momentum ** self.looks[row].astype(np.float64)
        heat = self.heatmaps[row].astype(np.float64)
        return np.where(self.annotated[row][:, None, None], np.maximum(heat - start, 0), heat)

    def ranked_by(self, row):
        """sqrt(score * hottest cells), where there is a heatmap; the score elsewhere; 1 if annotated."""
        heat, annotated = self.without_initial_value(row), self.annotated[row]
        named = heat[annotated].max(0)
        discount = 1 - HALF * (named / named.max() if named.max() else named)
        count = max(1, round(0.04 * named.size))
        values = []
        for i, score in enumerate(self.scores[row].astype(np.float64)):
            hottest = sorted((heat[i] * discount).ravel(), reverse=True)[:count]
            value = math.sqrt(score * sum(hottest) / count) if self.kept[row, i] else score
            values.append(1.0 if annotated[i] else value)
        return np.array(values).astype(np.float16)

    def select(self):
        """The cuts of the next epoch, and K of each class for the selection after it."""
        values = np.array([self.ranked_by(row) for row in range(len(self.scores))])
        expected = np.zeros_like(self.annotated)
        self.cuts = []
        for i, ratio in enumerate(self.ratios):
            count = int(self.annotated[:, i].sum())
            number = round(ratio * count)
            fewer = count + round(self.config.selection.pseudo_positive_share * (number - count))
            order = sorted(range(len(values)), key=lambda row, i=i: (-values[row, i], row))
            expected[order[:number], i] = True
            worst = [
                (values[order[most - 1], i], order[most - 1]) if most else None for most in (number, fewer)
            ]
            self.cuts.append(worst)
        self.ratios = self.new_ratios(expected)
        return expected

    def new_ratios(self, expected):
        k, counts = self.config.selection.K, self.annotated.sum(0)
        positives = np.array(
            [expected[self.annotated[:, i]].sum() for i in range(len(counts))], float
        )  # annotated ones are expected
        extra = positives - counts
        if not extra.sum():
            return [k] * len(counts)
        return [
            1 + (e / c if c else 0.0) * (k - 1) * counts.sum() / extra.sum()
            for e, c in zip(extra, counts, strict=True)
        ]

    def apply_cuts(self):
        """Which classes are expected and pseudo-positive; once per epoch, before anything is learnt."""
        if not self.cuts:
            return
        values = np.array([self.ranked_by(row) for row in range(len(self.scores))])
        for i, worst in enumerate(self.cuts):
            for found, cut in zip((self.expected, self.pseudo_positives), worst, strict=True):
                for row in range(len(values)):
                    found[row, i] = cut is not None and (-values[row, i], row) <= (-cut[0], cut[1])
        self.cuts = []
