"""Estimate disk space, RAM and I/O of a run."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from bigscl.common.command_line import AsJson, Settings
from bigscl.common.files import free_bytes
from bigscl.common.user_error import UserError
from bigscl.tools.shared.terminal import plural, print_result, size, table

if TYPE_CHECKING:
    from bigscl.config import Config
    from bigscl.preflight.forecast import Forecast, MemoryPhase
    from bigscl.store import StoreSpec


def command(
    config: Annotated[
        Path, typer.Argument(metavar="CONFIG", help="YAML file of the run, or the name of a packaged one.")
    ],
    settings: Settings = None,
    processes: Annotated[
        int, typer.Option(min=1, max=100_000, help="Number of training processes on all nodes (GPUs).")
    ] = 1,
    images_per_second: Annotated[
        float,
        typer.Option(min=0.001, max=1e9, help="Training speed of one process, for the load on the store."),
    ] = 400,
    samples: Annotated[
        int | None,
        typer.Option(min=1, max=10**10, help="Number of images of a dataset that does not exist yet."),
    ] = None,
    classes: Annotated[
        int | None, typer.Option(min=1, max=10**7, help="With --samples: number of classes.")
    ] = None,
    per_shard: Annotated[
        int, typer.Option(min=1, max=10**7, help="With --samples: images per shard.")
    ] = 1000,
    probe: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Measure the speed of this place and compare it with the need."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Estimate disk space, MB/s, RAM and steps of a run, the balance of its shards, and likely problems.

    Exit code 1 if there are warnings, or if the probed place is too slow.

    Example: bigscl plan configs/imagenet_resnet50_scl.yaml --processes 8 --samples 1281167 --classes 1000
    """
    from bigscl.config import load_config

    run = load_config(config, settings or [])
    spec, mean_bytes = _data(run, samples, classes, per_shard)
    facts = _facts(run, spec, processes, images_per_second, mean_bytes)
    facts["expected"] = _expected(run, samples)
    if probe is not None:
        facts["probe"] = _probe(run, spec, facts, probe)
    print_result(facts, _text(facts), as_json)
    if facts["warnings"] or (probe is not None and not facts["probe"]["keeps_up"]):
        raise typer.Exit(1)


def _data(
    config: "Config", samples: int | None, classes: int | None, per_shard: int
) -> tuple["StoreSpec", float | None]:
    """Return the store's rows and the mean size of an image, of existing shards or of the given numbers."""
    from bigscl.data.index import load_index
    from bigscl.store import StoreSpec

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


def _expected(config: "Config", samples: int | None) -> dict[str, Any] | None:
    """Return how many positives the run expects; None if it needs no K, or the shards that say it."""
    from bigscl.selection.k import Expectation, expectation, positives_per_image
    from bigscl.training.run_folder import open_labels, open_val

    k = config.selection.K
    if not config.objective.needs_k or (samples is not None and k == "auto"):
        return None
    if samples is not None:
        # Of a dataset that does not exist yet: one label for each image.
        total = round(float(k) * samples)
        return asdict(
            Expectation(positives_per_image=float(k), annotated=samples, total=total, num_samples=samples)
        )
    labels = open_labels(config.data)
    found = positives_per_image(config, open_val(config.data) if k == "auto" else None)
    assert found is not None
    counts = labels.annotations.counts()
    return asdict(expectation(found, labels.counts(), labels.index.num_samples, counts))


def _heatmap_size(config: "Config", num_classes: int) -> int:
    from bigscl.models.spatial import build_model
    from bigscl.training.model_state import map_side

    return 2 * map_side(
        build_model(config.model.backbone, num_classes, args=config.model.args), config.data.size
    )


def _forecast(config: "Config", spec: "StoreSpec", processes: int) -> "Forecast":
    from bigscl.config.schedule import plan_epoch
    from bigscl.preflight.forecast import forecast

    sizes = np.asarray(spec.shard_sizes)
    plan = plan_epoch(config, sizes, spec.rows_per_shard, epoch=0, world_size=processes)
    return forecast(config, spec, plan)


def _facts(
    config: "Config", spec: "StoreSpec", processes: int, rate: float, mean_bytes: float | None
) -> dict[str, Any]:
    from bigscl.config import doubtful_settings
    from bigscl.distributed.hardware import machine_ram_bytes
    from bigscl.preflight.forecast import warnings

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
        "samples_per_rank": asdict(needs.samples_per_rank),
        "shards_per_rank": asdict(needs.shards_per_rank),
        "shards_per_worker": asdict(needs.shards_per_worker),
        "imbalance": needs.imbalance,
        "hours": spec.num_samples * config.schedule.epochs / (rate * processes) / 3600,
        "loader_bytes": _loader_bytes(config, mean_bytes),
        "store": config.store.kind,
        "store_url": config.store_url if config.store.kind == "disk" else None,
        "disk_bytes": needs.disk_bytes,
        "score_log_bytes": needs.score_log_bytes,
        "free_bytes": free,
        "phases": [_phase(phase, rate * processes) for phase in needs.phases],
        "warnings": [*doubtful_settings(config), *warnings(config, needs, free, machine_ram_bytes())],
    }


def _loader_bytes(config: "Config", mean_bytes: float | None) -> int | None:
    """Return the RAM of the encoded images in shuffle buffers and of prepared batches, per process."""
    if mean_bytes is None:
        return None
    workers = max(1, config.data.workers)
    batches = 2 * config.data.batch_size * 3 * config.data.size**2
    return int(workers * (config.data.shuffle_buffer * mean_bytes + batches))


def _phase(phase: "MemoryPhase", rate: float) -> dict[str, Any]:
    return {
        "first_epoch": phase.epochs.start,
        "last_epoch": phase.epochs.stop - 1,
        "layout": phase.group.layout,
        "top": phase.group.top,
        "slot_bytes": phase.slot_bytes,
        "versions": phase.versions,
        "disk_bytes": phase.disk_bytes,
        "bytes_per_second": 2 * phase.image_bytes * rate,
        "resident_bytes": phase.ram_bytes,
    }


def _probe(config: "Config", spec: "StoreSpec", facts: dict[str, Any], place: str) -> dict[str, Any]:
    """Measure whether a place reads and writes the bytes of the largest phase fast enough."""
    from bigscl.preflight.storage_speed import measure

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


def _text(facts: dict[str, Any]) -> str:
    one = facts
    data = f"{one['samples']:,} samples in {plural(one['shards'], 'shard')}, {one['classes']} classes"
    shards = f"{_span(one['shards_per_rank'])} per process, {_span(one['shards_per_worker'])} per worker"
    lines = [
        f"{one['run']}: {data}",
        f"  world size {one['processes']}, global batch {one['global_batch']}, "
        f"{one['steps_per_epoch']:,} steps per epoch, {one['epochs']} epochs; "
        f"{_hours(one['hours'])} at {one['images_per_second']:g} images/s per process",
        f"  shards: {shards}; the busiest process has {one['imbalance']:.1%} more samples than the mean",
    ]
    if one["expected"] is not None:
        lines.append(f"  {_expected_line(one['expected'])}")
    if one["loader_bytes"] is not None:
        lines.append(f"  loader: about {size(one['loader_bytes'])} RAM per process")
    lines += _store_lines(one)
    lines += _probe_lines(one["probe"]) if "probe" in one else []
    lines += [f"  warning: {warning}" for warning in one["warnings"]]
    return "\n".join(lines)


def _expected_line(expected: dict[str, Any]) -> str:
    from bigscl.selection.k import Expectation

    return str(Expectation(**expected))


def _store_lines(facts: dict[str, Any]) -> list[str]:
    if not facts["phases"]:
        return ["  store: none, this objective needs no memory"]
    side = facts["heatmap_size"]
    rows = [
        [
            f"{phase['first_epoch'] + 1} - {phase['last_epoch'] + 1}",
            phase["layout"] if phase["top"] is None else f"top {phase['top']}",
            size(phase["slot_bytes"]),
            phase["versions"],
            size(phase["disk_bytes"]),
            f"{size(phase['bytes_per_second'] / 2)}/s",
            size(phase["resident_bytes"]),
        ]
        for phase in facts["phases"]
    ]
    free = "" if facts["free_bytes"] is None else f", {size(facts['free_bytes'])} free there"
    where = facts["store_url"] or "in memory"
    epoch = size(facts["score_log_bytes"] / facts["epochs"])
    scores = f"  scores of all epochs: {size(facts['score_log_bytes'])} in {facts['run']}, {epoch} each"
    return [
        f"  store: {where}, heatmaps {side} x {side}; at most {size(facts['disk_bytes'])}{free}",
        table(
            ("epochs", "heatmaps", "a version", "kept", "on disk", "read and write, each", "RAM per process"),
            rows,
            indent="    ",
        ),
        *([scores] if facts["score_log_bytes"] else []),
    ]


def _probe_lines(probe: dict[str, Any]) -> list[str]:
    read, write = size(probe["read_bytes_per_second"]), size(probe["write_bytes_per_second"])
    times = probe["sustained_bytes_per_second"] / probe["needed_bytes_per_second"]
    verdict = "keeps up" if probe["keeps_up"] else "is too slow"
    return [
        f"  probe: {probe['place']} reads {read}/s, writes {write}/s; it {verdict}: "
        f"{times:.3g} times the {size(probe['needed_bytes_per_second'])}/s needed each way"
    ]


def _span(share: dict[str, int]) -> str:
    return str(share["most"]) if share["fewest"] == share["most"] else f"{share['fewest']} to {share['most']}"


def _hours(hours: float) -> str:
    return f"{hours * 60:.0f} min" if hours < 2 else f"{hours:.1f} h"
