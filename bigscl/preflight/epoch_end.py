"""The end of an epoch at full size, from costs that are measured in a second and the sizes of the run."""

# Shapes: N images, L classes.

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from bigscl.config import Config
from bigscl.data.loader import normalize
from bigscl.evaluation.inference import NETWORK_BATCH
from bigscl.evaluation.metrics import average_precision
from bigscl.memory.score_history import epoch_bytes
from bigscl.models.spatial import SpatialClassifier, map_pooled
from bigscl.preflight.forecast import MemoryPhase
from bigscl.selection.ranking import select
from bigscl.store import SingleProcess, StoreSpec

MOST_SCORES = 2**22
"""Scores that are ranked to measure the ranking, and the metrics."""
POOLINGS = 2
CLASSES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitCosts:
    """Seconds on one rank, each measured alone."""

    rank_score: float
    """To rank a score in the selection."""
    predict_image: float
    """To predict a validation image that is there already."""
    measure_class: float
    """For the metrics of a class over all validation images, of both poolings."""


@torch.inference_mode()
def unit_costs(
    model: SpatialClassifier, config: Config, device: torch.device, num_classes: int, num_val: int
) -> UnitCosts:
    """Measure the costs with random values of the run's shapes."""
    random = np.random.default_rng(0)
    rows = max(1, MOST_SCORES // num_classes)
    scores = random.random((rows, num_classes), np.float32).astype(np.float16)
    chunks = [(ids, scores[ids]) for ids in np.array_split(np.arange(rows), min(4, rows))]
    # As many as in the mean over classes and images.
    expected = np.full(num_classes, math.ceil(rows / num_classes))
    ranking = _seconds(lambda: select(chunks, expected, SingleProcess()))
    images = torch.zeros((NETWORK_BATCH, 3, config.data.size, config.data.size), dtype=torch.uint8)

    def predict() -> None:
        found = model(normalize(images.to(device), config.data.mean, config.data.std), maps=True)
        map_pooled(found).cpu()

    was_training = model.training
    model.eval()
    prediction = _seconds(predict)
    model.train(was_training)
    logits = torch.from_numpy(random.random((num_val, CLASSES), np.float32))
    labels = torch.from_numpy((random.random((num_val, CLASSES)) < 1 / CLASSES).astype(np.int8))
    metrics = _seconds(lambda: average_precision(logits, labels)) if num_val else 0.0
    return UnitCosts(
        rank_score=ranking / (rows * num_classes),
        predict_image=prediction / NETWORK_BATCH,
        measure_class=POOLINGS * metrics / CLASSES,
    )


def _seconds(action: Callable[[], object]) -> float:
    """Return the seconds of the second call: the first one makes threads and chooses kernels."""
    action()
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochEnd:
    """The end of an epoch, with validation, while all GPUs wait."""

    processes: int
    stages: dict[str, float]
    """Seconds on the rank that takes longest."""
    seconds: float
    longest: str
    idle_share: float
    """Share of the time of an epoch and its end."""
    requests_per_second: float
    """Reads and writes of the store's files by all ranks, in the mean over an epoch."""
    creates_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Speeds of one process that the rehearsal has measured."""

    images_per_second: float
    loader_images_per_second: float
    read_bytes_per_second: float | None
    """Of the store's place; None without a store on disk."""
    write_bytes_per_second: float | None
    save_seconds: float
    """A commit, and the copy of a checkpoint."""


def epoch_end(
    config: Config,
    spec: StoreSpec,
    phase: MemoryPhase | None,
    num_val: int,
    processes: int,
    units: UnitCosts,
    rates: Rates,
) -> EpochEnd:
    """Return what the end of an epoch takes with so many processes like those that were measured."""
    shards = math.ceil(spec.num_shards / processes)
    scores = shards * spec.rows_per_shard * spec.num_classes
    val_images = math.ceil(num_val / processes)
    stages = {"commit and copy of the checkpoint": rates.save_seconds}
    if phase is not None and config.objective.needs_k:
        stages["selection"] = scores * units.rank_score
        if rates.read_bytes_per_second is not None:
            stages["reading of scores"] = 2 * scores / rates.read_bytes_per_second
    if rates.write_bytes_per_second is not None and config.log.score_classes:
        logged = epoch_bytes(spec.num_samples, spec.num_classes, config.log.score_classes)
        stages["log of scores"] = logged / rates.write_bytes_per_second
    if num_val:
        stages["validation: images"] = val_images / rates.loader_images_per_second
        stages["validation: network"] = val_images * units.predict_image
        # Each rank has a share of the classes.
        stages["validation: metrics"] = math.ceil(spec.num_classes / processes) * units.measure_class
    seconds = sum(stages.values())
    # Images are decoded while the network predicts those before.
    seconds -= min(stages.get("validation: images", 0.0), stages.get("validation: network", 0.0))
    training = spec.num_samples / (processes * rates.images_per_second)
    creates = 0.0 if phase is None else spec.num_shards * phase.shard_files / (training + seconds)
    return EpochEnd(
        processes=processes,
        stages=stages,
        seconds=seconds,
        longest=max(stages, key=stages.__getitem__),
        idle_share=seconds / (training + seconds),
        requests_per_second=2 * creates,
        creates_per_second=creates,
    )


def epoch_end_facts(
    config: Config,
    spec: StoreSpec,
    phases: tuple[MemoryPhase, ...],
    num_val: int,
    processes: int,
    ranks: list[dict[str, Any]],
    kind: dict[str, Any],
) -> dict[str, Any]:
    """Return the end of the epochs of a kind, from the slowest rank's measurements, for `preflight`."""
    phase = next((phase for phase in phases if phase.group.layout == kind["layout"]), None)
    speeds = [speed for one in ranks for speed in one["storage"] if speed["layout"] == kind["layout"]]
    rates = Rates(
        images_per_second=kind["images_per_second"] / len(ranks),
        loader_images_per_second=min(one["loader_images_per_second"] for one in ranks),
        read_bytes_per_second=min((speed["read"] for speed in speeds), default=None),
        write_bytes_per_second=min((speed["write"] for speed in speeds), default=None),
        save_seconds=kind["save_seconds"],
    )
    names = ranks[0]["units"]
    units = UnitCosts(**{name: max(one["units"][name] for one in ranks) for name in names})
    return asdict(epoch_end(config, spec, phase, num_val, processes, units, rates))


def epoch_end_lines(facts: dict[str, Any]) -> list[str]:
    """Return these facts for people."""
    stages = sorted(facts["stages"].items(), key=lambda stage: -stage[1])
    return [
        f"  end of an epoch with {facts['processes']} processes: {facts['seconds']:.2g} s with validation, "
        f"{facts['idle_share']:.0%} of the time; {facts['longest']} takes longest",
        "    " + ", ".join(f"{name} {seconds:.2g} s" for name, seconds in stages),
        f"  storage of the store: {facts['requests_per_second']:.3g} requests/s, "
        f"{facts['creates_per_second']:.3g} of them create a file",
    ]
