"""Validation during training: mAP and accuracy on fully labelled images, with plain and with map pooling.

Each rank predicts its images, then gets the logits of all images for its share of the classes: one exchange,
and no rank has all logits. Average precision is a figure of a class, so that the result has the same bits for
any number of ranks.
"""

# Shapes: N images of all ranks, n of this rank, L classes, l of them of a rank, P poolings.

import json
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from bigscl.config import Config, ValidationConfig
from bigscl.data.epoch_plan import evaluation_plan
from bigscl.data.index import Index, most_positives, true_labels
from bigscl.data.loader import BadSamples, Loader, LoaderWorkers
from bigscl.distributed.ranks import Ranks
from bigscl.evaluation.inference import (
    Arrays,
    check_any,
    concatenate,
    exchange_arrays,
    gather_arrays,
    predict_batches,
)
from bigscl.evaluation.metrics import average_precision, best_classes, mean_ap, top_k_counts
from bigscl.memory.memory import ShowWork
from bigscl.models.spatial import SpatialClassifier
from bigscl.selection.ranking import counted

MAP_POOLED = "_with_map_pooling"
"""Ends the names of metrics of map pooling."""
POOLINGS = {"logits": "", "map_logits": MAP_POOLED}
"""The logits of each pooling, and how the names of its metrics end."""


class Validation:
    """The validation of a run, on one rank; its loader workers live as long as it does."""

    def __init__(self, index: Index, config: Config, device: torch.device, ranks: Ranks) -> None:
        self._index, self._config, self._device, self._ranks = index, config, device, ranks
        self._plan = evaluation_plan(
            index.shard_sizes,
            index.rows_per_shard,
            batch_size=config.data.batch_size,
            world_size=ranks.world_size,
            workers=config.data.workers,
        )
        filled = sum(len(stream.ids) > 0 for stream in self._plan.streams[ranks.rank])
        self._workers = LoaderWorkers(
            index,
            min(self._plan.workers, filled),
            pin_memory=device.type == "cuda",
            decoder=config.data.decoder,
        )

    def run(self, model: SpatialClassifier, show_work: ShowWork) -> dict[str, float]:
        """Return the metrics over all validation images, the same on every rank."""
        ranks, world_size, index = self._ranks, self._ranks.world_size, self._index
        was_training = model.training
        model.eval()
        title = f"validating on {index.num_samples:,} images, in batches"
        with show_work(title, self._plan.num_batches(ranks.rank)) as show:
            parts = exchange_arrays(
                ranks, lambda: share_by_class(self._predictions(model, show), index, world_size)
            )
        model.train(was_training)
        shares = gather_arrays(ranks, lambda: metrics_of_share(parts, index, ranks.rank, world_size))
        payload = None if shares is None else json.dumps(merge(shares)).encode()
        received: dict[str, float] = json.loads(ranks.broadcast(payload))
        return received

    def close(self) -> None:
        self._workers.close()

    def _predictions(self, model: SpatialClassifier, show: Callable[[int], None]) -> Arrays:
        data = self._config.data
        batches = counted(self._loader(), show)
        return concatenate(predict_batches(model, batches, self._device, mean=data.mean, std=data.std))

    def _loader(self) -> Loader:
        rank, data = self._ranks.rank, self._config.data
        return Loader(
            self._index,
            self._plan,
            rank,
            data.evaluation_transform(),
            bad=BadSamples(self._index, self._plan.num_samples(rank), max_share=data.max_bad_share),
            workers=self._workers,
        )


def best_metric(metrics: dict[str, float], config: ValidationConfig) -> float:
    """Return the metric that decides which epoch is the best."""
    return metrics[config.metric + (MAP_POOLED if config.pooling == "map" else "")]


# Metrics of the logits that the ranks have: each step takes what a rank has, so that one process can be any


def share_by_class(own: Arrays, index: Index, world_size: int) -> list[Arrays]:
    """Return for each rank the logits [n,l] of this rank's images for the classes of that rank.

    With them go the ids, and this rank's images with a right first class, and those with a label, [1,P,2].
    """
    if not own:
        return [{}] * world_size
    labels = torch.from_numpy(true_labels(index, own["ids"])[0])
    best = [best_classes(torch.from_numpy(own[name]), 1) for name in POOLINGS]
    common = {"ids": own["ids"], "top1": np.array([[top_k_counts(each, labels, 1) for each in best]])}
    return [
        {**common, **{name: own[name][:, share.start : share.stop] for name in POOLINGS}}
        for share in class_shares(index.num_classes, world_size)
    ]


def class_shares(num_classes: int, world_size: int) -> list[range]:
    """Divide the classes over the ranks: consecutive, and in numbers that differ by at most one."""
    bounds = [num_classes * rank // world_size for rank in range(world_size + 1)]
    return [range(first, last) for first, last in pairwise(bounds)]


def metrics_of_share(parts: list[Arrays], index: Index, rank: int, world_size: int) -> Arrays:
    """Return the average precisions [l,P] of a rank's classes, and the counts of all images [1,P,2]."""
    received = concatenate(parts)
    check_any(received)
    ids: NDArray[np.int64] = received["ids"]
    classes = class_shares(index.num_classes, world_size)[rank]
    labels = torch.from_numpy(true_labels(index, ids, classes)[0])
    most = most_positives(index, ids)
    precisions = [
        average_precision(torch.from_numpy(received[name]), labels, most_positives=most).numpy()
        for name in POOLINGS
    ]
    return {"precisions": np.stack(precisions, axis=1), "top1": received["top1"].sum(0, keepdims=True)}


def merge(shares: list[Arrays]) -> dict[str, float]:
    """Return the metrics, from what `metrics_of_share` gave for every rank."""
    precisions, metrics = np.concatenate([share["precisions"] for share in shares]), {}
    for pooling, end in enumerate(POOLINGS.values()):
        num_right, num_evaluated = shares[0]["top1"][0, pooling].tolist()
        own = np.ascontiguousarray(precisions[:, pooling])
        metrics["map" + end] = mean_ap(torch.from_numpy(own)).present
        metrics["top1" + end] = num_right / num_evaluated if num_evaluated else float("nan")
    return metrics
