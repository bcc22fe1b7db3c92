"""Validation during training: mAP and accuracy on fully labelled images, with plain and with map pooling."""

import json
from collections.abc import Callable, Iterable, Iterator

import torch

from bigscl.config import Config, ValidationConfig
from bigscl.data.epoch_plan import evaluation_plan
from bigscl.data.index import Index, true_labels
from bigscl.data.loader import BadSamples, Batch, Loader
from bigscl.distributed.ranks import Ranks
from bigscl.evaluation.inference import predict
from bigscl.evaluation.metrics import average_precision, best_classes, mean_ap, top_k_accuracy
from bigscl.memory.memory import ShowWork
from bigscl.models.spatial import SpatialClassifier

MAP_POOLED = "_with_map_pooling"
"""Ends the names of metrics of map pooling."""


def validate(
    model: SpatialClassifier,
    index: Index,
    config: Config,
    device: torch.device,
    ranks: Ranks,
    show_work: ShowWork,
) -> dict[str, float]:
    """Return the metrics over all validation images, the same on every rank."""
    plan = evaluation_plan(
        index.shard_sizes,
        index.rows_per_shard,
        batch_size=config.data.batch_size,
        world_size=ranks.world_size,
        workers=config.data.workers,
    )
    loader = Loader(
        index,
        plan,
        ranks.rank,
        config.data.evaluation_transform(),
        bad=BadSamples(index, plan.num_samples(ranks.rank), max_share=config.data.max_bad_share),
        decoder=config.data.decoder,
    )
    was_training = model.training
    model.eval()
    with show_work(f"validating on {index.num_samples:,} images, in batches", len(loader)) as show:
        batches = _counted(loader, show)
        found = predict(model, batches, device, mean=config.data.mean, std=config.data.std, transport=ranks)
    model.train(was_training)
    payload = None
    if found is not None:
        assert found.map_logits is not None
        labels = torch.from_numpy(true_labels(index, found.ids)[0])
        pooled = _metrics(torch.from_numpy(found.map_logits), labels)
        metrics = _metrics(torch.from_numpy(found.logits), labels)
        metrics |= {name + MAP_POOLED: value for name, value in pooled.items()}
        payload = json.dumps(metrics).encode()
    received: dict[str, float] = json.loads(ranks.broadcast(payload))
    return received


def best_metric(metrics: dict[str, float], config: ValidationConfig) -> float:
    """Return the metric that decides which epoch is the best."""
    return metrics[config.metric + (MAP_POOLED if config.pooling == "map" else "")]


def _counted(batches: Iterable[Batch], show: Callable[[int], None]) -> Iterator[Batch]:
    """Yield the batches; show how many are done when the next one is asked for."""
    for done, batch in enumerate(batches):
        show(done)
        yield batch


def _metrics(logits: torch.Tensor, targets: torch.Tensor) -> dict[str, float]:
    return {
        "map": mean_ap(average_precision(logits, targets)).present,
        "top1": top_k_accuracy(best_classes(logits, 1), targets, 1),
    }
