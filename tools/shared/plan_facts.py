"""Figures of `bigscl plan`: the needs of a run, from its config and its shards or their numbers."""

from typing import Any

import numpy as np

from bigscl.common.files import free_bytes, machine_ram_bytes
from bigscl.common.user_error import UserError
from bigscl.config import Config, doubtful_settings
from bigscl.config.schedule import plan_epoch
from bigscl.data.index import load_index
from bigscl.models.spatial import build_model
from bigscl.preflight.forecast import Forecast, MemoryPhase, forecast, warnings
from bigscl.preflight.storage_speed import measure
from bigscl.selection.k import Expectation, expectation, positives_per_image
from bigscl.store import StoreSpec
from bigscl.training.model_state import map_side
from bigscl.training.run_folder import open_labels, open_val


def rows_of_run(
    config: Config, samples: int | None, classes: int | None, per_shard: int
) -> tuple[StoreSpec, float | None]:
    """Return the store's rows and the mean size of an image, of existing shards or of the given numbers."""
    if (samples is None) != (classes is None):
        raise UserError("--samples, --classes: give both, or neither to plan for the shards of the config")
    if samples is not None and classes is not None:
        full, rest = divmod(samples, per_shard)
        sizes = [per_shard] * full + [rest] * (rest > 0)
        mean_bytes = None
    else:
        try:
            index = load_index(config.data.train, config.data.train_index)
        except ValueError as error:
            raise UserError(
                f"{str(error).rstrip('.')}. To plan before there are shards, give --samples and --classes "
                f"(of ImageNet: --samples 1281167 --classes 1000)."
            ) from None
        sizes, classes = index.shard_sizes.tolist(), index.num_classes
        mean_bytes = float(index.image_bytes[index.ids()].mean())
    return (
        StoreSpec(
            fingerprint="",
            num_classes=classes,
            heatmap_size=_heatmap_size(config, classes),
            rows_per_shard=max(sizes),
            shard_sizes=tuple(sizes),
            top_scores=config.store.kept_scores(classes),
        ),
        mean_bytes,
    )


def expected_positives(config: Config, samples: int | None) -> Expectation | None:
    """Return how many positives the run expects; None if it needs no K, or the shards that say it."""
    k = config.selection.K
    if not config.objective.needs_k or (samples is not None and k == "auto"):
        return None
    if samples is not None:
        # Of a dataset that does not exist yet: one label for each image.
        total = round(float(k) * samples)
        return Expectation(positives_per_image=float(k), annotated=samples, total=total, num_samples=samples)
    labels = open_labels(config.data)
    k_of_run = positives_per_image(config, open_val(config.data) if k == "auto" else None)
    assert k_of_run is not None
    counts = labels.annotations.counts()
    return expectation(k_of_run, labels.counts(), labels.index.num_samples, counts)


def _heatmap_size(config: Config, num_classes: int) -> int:
    return 2 * map_side(
        build_model(config.model.backbone, num_classes, args=config.model.args), config.data.size
    )


def _forecast(config: Config, spec: StoreSpec, processes: int) -> Forecast:
    sizes = np.asarray(spec.shard_sizes)
    plan = plan_epoch(config, sizes, spec.rows_per_shard, epoch=0, world_size=processes)
    return forecast(config, spec, plan)


def needs_of_run(
    config: Config, spec: StoreSpec, processes: int, rate: float, mean_bytes: float | None
) -> dict[str, Any]:
    """Return disk space, RAM, MB/s and steps of a run, and likely problems, for `--json`."""
    needs = _forecast(config, spec, processes)
    free = free_bytes(config.store_url) if config.store.kind == "disk" else None
    return {
        "run": str(config.run),
        "samples": spec.num_samples,
        "shards": spec.num_shards,
        "classes": spec.num_classes,
        "heatmap_size": spec.heatmap_size,
        "processes": processes,
        "images_per_second": rate,
        "epochs": config.schedule.epochs,
        "steps_per_epoch": needs.num_steps,
        "global_batch": processes * config.data.batch_size * config.optimizer.accumulate,
        "busy_share": needs.busy_share,
        "hours": spec.num_samples * config.schedule.epochs / (rate * processes) / 3600,
        "loader_bytes": _loader_bytes(config, mean_bytes),
        "store": config.store.kind,
        "store_url": config.store_url if config.store.kind == "disk" else None,
        "disk_bytes": needs.disk_bytes,
        "score_log_bytes": needs.score_log_bytes,
        "free_bytes": free,
        "phases": [_phase(phase, spec, rate * processes) for phase in needs.phases],
        "warnings": [*doubtful_settings(config), *warnings(config, needs, free, machine_ram_bytes())],
    }


def _loader_bytes(config: Config, mean_bytes: float | None) -> int | None:
    """Return the RAM of the encoded images in shuffle buffers and of prepared batches, per process."""
    if mean_bytes is None:
        return None
    workers = max(1, config.data.workers)
    batches = 2 * config.data.batch_size * 3 * config.data.size**2
    return int(workers * (config.data.shuffle_buffer * mean_bytes + batches))


def _phase(phase: MemoryPhase, spec: StoreSpec, rate: float) -> dict[str, Any]:
    files = phase.shard_files * spec.num_shards
    return {
        "first_epoch": phase.epochs.start,
        "last_epoch": phase.epochs.stop - 1,
        "layout": phase.group.layout,
        "top": phase.group.top,
        "slot_bytes": phase.slot_bytes,
        "slot_files": files,
        "versions": phase.versions,
        "disk_bytes": phase.disk_bytes,
        "bytes_per_second": 2 * phase.image_bytes * rate,
        "creates_per_second": files * rate / spec.num_samples,
        "resident_bytes": phase.ram_bytes,
    }


def probe_facts(config: Config, spec: StoreSpec, facts: dict[str, Any], place: str) -> dict[str, Any]:
    """Measure whether a place reads and writes the bytes of the largest phase fast enough."""
    phases = _forecast(config, spec, 1).phases
    if not phases:
        raise UserError("--probe: has no effect with store.kind: none")
    heaviest = max(phases, key=lambda phase: phase.image_bytes)
    speed = measure(place, spec, heaviest.group, config.store.io_threads, config.store.options())
    needed = max(phase["bytes_per_second"] for phase in facts["phases"]) / 2
    return {
        "place": place,
        "read_bytes_per_second": speed.read,
        "write_bytes_per_second": speed.write,
        "sustained_bytes_per_second": speed.both,
        "needed_bytes_per_second": needed,
        "keeps_up": speed.both >= needed,
    }
