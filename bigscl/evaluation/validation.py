"""Validation during training: mAP and accuracy on fully labelled images."""

import json
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import nn

from bigscl.config import Config
from bigscl.data.batch import Batch
from bigscl.data.index import Index
from bigscl.data.loader import Loader
from bigscl.data.plan import evaluation_plan
from bigscl.evaluation.inference import predict
from bigscl.evaluation.metrics import average_precision, best_classes, mean_ap, top_k_accuracy
from bigscl.evaluation.predictions import true_labels
from bigscl.processes.ranks import Ranks
from bigscl.training.memory import ShowWork


def validate(
    model: nn.Module,
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
        index, plan, ranks.rank, config.data.evaluation_transform(), allow_pipe=config.data.allow_pipe
    )
    was_training = model.training
    model.eval()
    with show_work(f"validating on {index.num_samples:,} images, in batches", len(loader)) as show:
        batches = _counted(loader, show)
        found = predict(model, batches, device, mean=config.data.mean, std=config.data.std, transport=ranks)
    model.train(was_training)
    payload = None
    if found is not None:
        logits = torch.from_numpy(found.logits)
        labels, _ = true_labels(index, found.ids)
        payload = json.dumps(_metrics(logits, torch.from_numpy(labels))).encode()
    metrics: dict[str, float] = json.loads(ranks.broadcast(payload))
    return metrics


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
