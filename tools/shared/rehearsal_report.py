"""The report of `bigscl preflight`: speed, bottleneck, memory, differences of devices, hours, problems."""

import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
import typer

from bigscl.common.command_line import INTERRUPTED, first_on_this_machine, start_is_over
from bigscl.common.files import free_bytes, machine_ram_bytes
from bigscl.config import Config
from bigscl.config.schedule import plan_epoch
from bigscl.data.loader import normalize
from bigscl.distributed.signals import Interrupts, Wording
from bigscl.evaluation.inference import NETWORK_BATCH
from bigscl.evaluation.metrics import average_precision
from bigscl.memory.score_history import epoch_bytes
from bigscl.models.spatial import SpatialClassifier, map_pooled
from bigscl.preflight.device_check import Difference, worst
from bigscl.preflight.forecast import Forecast, MemoryPhase, forecast, layouts, warnings
from bigscl.preflight.rehearsal import RehearsalTrainer, ScratchFolders, epoch_types, rehearsal
from bigscl.preflight.storage_speed import measure
from bigscl.selection.ranking import select
from bigscl.store import SingleProcess, StoreSpec, spec_for
from bigscl.tools.shared.terminal import plural, size, table
from bigscl.train import Stopped
from bigscl.training.metrics_log import clock

Facts = dict[str, Any]

ADVICE = {
    "decode": "raise data.workers if there are idle cores, put the shards on faster storage, or write "
    "smaller images",
    "step": "on a GPU try hardware.precision: bf16, hardware.channels_last, hardware.compile and a larger "
    "data.batch_size",
    "heatmaps": "put the store on faster storage, or raise store.io_threads",
    "writeback": "put the store on faster storage, raise store.io_threads, or use store.codec",
    "collectives": "raise data.batch_size or optimizer.accumulate, or use a faster network between the nodes",
}
"""By what bounds the speed."""
MOSTLY = 0.5
"""From this share of a step on, the exchange of gradients bounds it."""


def rehearse(config: Config, steps: int, processes: int | None) -> Facts | None:
    """Return what was measured on rank 0, None on other ranks."""
    wording = Wording(
        program="bigscl preflight",
        first="stopping after this step. Press Ctrl-C again to end at once.",
        second="ended.",
        launcher_gone="",
        too_early="before training began.",
    )
    try:
        with (
            Interrupts(prints=first_on_this_machine(), wording=wording) as interrupts,
            rehearsal(config, steps, interrupts.clean_up_with) as (trainer, folders),
        ):
            start_is_over()
            interrupts.stop_with(trainer.stop_soon)
            mine = trainer.measure(epoch_types(config))
            mine["storage"] = _storage_speed(config, trainer, folders)
            with trainer.metrics.working("measuring the end of an epoch"):
                num_classes, num_val = trainer.data.train.num_classes, _num_val(trainer)
                network = trainer.state.evaluated
                mine["units"] = unit_costs(network, config, trainer.device, num_classes, num_val)
            gathered = trainer.ranks.gather(json.dumps(mine).encode())
            if gathered is None:
                return None
            return _facts(config, trainer, [json.loads(payload) for payload in gathered], processes)
    except Stopped:
        raise typer.Exit(INTERRUPTED) from None


def _storage_speed(config: Config, trainer: RehearsalTrainer, folders: ScratchFolders) -> list[Facts]:
    """Return bytes/s of the store's place for each layout, while all ranks measure at once."""
    if config.store.kind != "disk":
        return []
    spec, speeds = _spec(trainer), []
    for group in layouts(config, spec):
        trainer.ranks.sum([0])  # all ranks start together
        with trainer.metrics.working(f"measuring the storage ({group.layout})"):
            speed = measure(folders.place, spec, group, config.store.io_threads, config.store.options())
        speeds.append({"layout": group.layout, "read": speed.read, "write": speed.write})
    return speeds


def _num_val(trainer: RehearsalTrainer) -> int:
    return 0 if trainer.data.val is None else trainer.data.val.num_samples


def _spec(trainer: RehearsalTrainer) -> StoreSpec:
    annotations = trainer.data.annotations
    kept = trainer.config.store.kept_scores(annotations.num_classes)
    return spec_for(annotations, trainer.heatmap_size, 0, kept)


# What follows from the measurements of all ranks


def _facts(config: Config, trainer: RehearsalTrainer, ranks: list[Facts], processes: int | None) -> Facts:
    index, first = trainer.data.train, ranks[0]
    plan = plan_epoch(config, index.shard_sizes, index.rows_per_shard, epoch=0, world_size=len(ranks))
    needs = forecast(config, _spec(trainer), plan)
    free = free_bytes(config.store_url) if config.store.kind == "disk" else None
    loader = sum(rank["loader_images_per_second"] for rank in ranks)
    kinds = [_kind(config, needs, ranks, number, loader) for number in range(len(first["kinds"]))]
    checkpoints = first["checkpoint_bytes"] * (config.keep_checkpoints + 1)
    num_val, count = _num_val(trainer), processes or len(ranks)
    end = epoch_end_facts(config, _spec(trainer), needs.phases, num_val, count, ranks, kinds[-1])
    facts = {
        "run": str(config.run),
        "samples": index.num_samples,
        "world_size": len(ranks),
        "hosts": len({rank["host"] for rank in ranks}),
        "device": first["device"],
        "precision": first["precision"],
        "batch_size": config.data.batch_size,
        "workers": config.data.workers,
        "kinds": kinds,
        "loader_images_per_second": loader,
        "differences": _differences(ranks),
        "skipped": sum(rank["skipped"] for rank in ranks),
        "process_bytes": max(rank["process_bytes"] for rank in ranks),
        "worker_bytes": max(rank["worker_bytes"] for rank in ranks),
        "ram_bytes": machine_ram_bytes(),
        "gpu_bytes": max((rank["gpu_bytes"] for rank in ranks if rank["gpu_bytes"]), default=None),
        "gpu_total_bytes": first["gpu_total_bytes"],
        "epoch_end": end,
        "hours": _hours(config, trainer, needs, kinds),
        "disk_bytes": needs.disk_bytes,
        "checkpoint_bytes": checkpoints,
        "free_bytes": free,
        "seconds": first["seconds"],
    }
    known = warnings(config, needs, free, facts["ram_bytes"])
    facts["problems"] = [*known, *_problems(facts)]
    return facts


def _kind(config: Config, needs: Forecast, ranks: list[Facts], place: int, loader: float) -> Facts:
    """Return the speeds of a kind of epochs over all ranks, and what bounds it."""
    ones = [rank["kinds"][place] for rank in ranks]
    first = ones[0]
    batch = first["images"] / first["steps"] / config.optimizer.accumulate
    step, compute = (max(kind[name] for kind in ones) for name in ("step_seconds", "compute_seconds"))
    stages = {"decode": loader, "step": batch / step}
    exchange = max(0.0, 1 - compute / step) if len(ranks) > 1 else 0.0
    image_bytes = {phase.group.layout: phase.image_bytes for phase in needs.phases}.get(first["layout"])
    speeds = [speed for rank in ranks for speed in rank["storage"] if speed["layout"] == first["layout"]]
    if image_bytes is not None and speeds:
        stages["heatmaps"] = sum(speed["read"] for speed in speeds) / image_bytes
        stages["writeback"] = sum(speed["write"] for speed in speeds) / image_bytes
    slowest = min(stages, key=stages.__getitem__)
    bound = "collectives" if slowest == "step" and exchange >= MOSTLY else slowest
    return {
        **{name: first[name] for name in ("first_epoch", "last_epoch", "is_warmup", "layout", "steps")},
        "images_per_second": first["images"] / first["seconds"],
        "step_seconds": first["seconds"] / first["steps"],
        "stages": stages,
        "exchange_share": exchange,
        "waits": {
            name.removeprefix("wait_"): max(kind["waits"][name] for kind in ones) for name in first["waits"]
        },
        "bound": bound,
        "advice": ADVICE[bound],
        "save_seconds": max(kind["save_seconds"] for kind in ones),
        "end_seconds": max(kind["end_seconds"] for kind in ones),
    }


def _differences(ranks: list[Facts]) -> list[Facts]:
    return [
        # NaN is no JSON.
        {
            **asdict(difference),
            "found": difference.found if math.isfinite(difference.found) else None,
            "ok": difference.is_tolerated,
        }
        for difference in worst([Difference(**values) for rank in ranks for values in rank["differences"]])
    ]


def _hours(config: Config, trainer: RehearsalTrainer, needs: Forecast, kinds: list[Facts]) -> float:
    """Return the hours of the whole run: its steps, ends of epochs, saves within them, and validations.

    The samples of a later kind of epochs were in the cache of the file system, those of the loader alone were
    not: the slower of the two speeds counts. Validation is taken to be as fast as the training step alone.
    """
    seconds = 0.0
    for kind in kinds:
        epochs = kind["last_epoch"] - kind["first_epoch"] + 1
        slowdown = max(1.0, kind["images_per_second"] / kind["stages"]["decode"])
        epoch = needs.num_steps * kind["step_seconds"] * slowdown
        seconds += epochs * (epoch + kind["end_seconds"])
        every = config.checkpoint
        by_steps = 0 if every.every_steps is None else (needs.num_steps - 1) // every.every_steps
        by_time = 0 if every.every_minutes is None else int(epoch / (60 * every.every_minutes))
        seconds += epochs * max(by_steps, by_time) * kind["save_seconds"]
    if trainer.data.val is not None:
        validations = config.schedule.epochs // config.validation.every_epochs
        seconds += validations * trainer.data.val.num_samples / kinds[-1]["stages"]["step"]
    return seconds / 3600


def _problems(facts: Facts) -> Iterator[str]:
    for difference in facts["differences"]:
        if not difference["ok"] and difference["precision"] in ("fp32", facts["precision"]):
            amount = "NaN or infinite" if difference["found"] is None else f"{difference['found']:.2g}"
            yield (
                f"{difference['quantity']} in {difference['precision']}: differs from the CPU reference by "
                f"{amount}, tolerated {difference['tolerance']:g}. This device or its software computes "
                f"something else"
            )
    for kind in facts["kinds"]:
        if kind["bound"] in ("heatmaps", "writeback"):
            yield (
                f"the storage of the store holds up the training in epochs {_epochs(kind)}: it sustains "
                f"{kind['stages'][kind['bound']]:,.0f} images/s. Try: {kind['advice']}"
            )
    if facts["skipped"]:
        yield f"{plural(facts['skipped'], 'image')} could not be read: `bigscl index` checks all shards"


# The end of an epoch at full size, from costs that are measured in a second and the sizes of the run

MOST_SCORES = 2**22
"""Scores that are ranked to measure the ranking, and the metrics."""
POOLINGS = 2
CLASSES = 16


@torch.inference_mode()
def unit_costs(
    model: SpatialClassifier, config: Config, device: torch.device, num_classes: int, num_val: int
) -> dict[str, float]:
    """Return seconds on one rank, each measured alone with random values of the run's shapes.

    To rank a score in the selection, to predict a validation image that is there already, and for the metrics
    of a class over all validation images, of both poolings.
    """
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
    return {
        "rank_score": ranking / (rows * num_classes),
        "predict_image": prediction / NETWORK_BATCH,
        "measure_class": POOLINGS * metrics / CLASSES,
    }


def _seconds(action: Callable[[], object]) -> float:
    """Return the seconds of the second call: the first one makes threads and chooses kernels."""
    action()
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def epoch_end_facts(
    config: Config,
    spec: StoreSpec,
    phases: tuple[MemoryPhase, ...],
    num_val: int,
    processes: int,
    ranks: list[dict[str, Any]],
    kind: dict[str, Any],
) -> dict[str, Any]:
    """Return what the end of the epochs of a kind takes, with validation, while all GPUs wait.

    It is that of so many processes like the slowest of the `ranks` that were measured. `stages` has seconds
    on the rank that takes longest; requests are reads and writes of the store's files by all ranks.
    """
    phase = next((phase for phase in phases if phase.group.layout == kind["layout"]), None)
    speeds = [speed for one in ranks for speed in one["storage"] if speed["layout"] == kind["layout"]]
    units = {name: max(one["units"][name] for one in ranks) for name in ranks[0]["units"]}
    scores = math.ceil(spec.num_shards / processes) * spec.rows_per_shard * spec.num_classes
    stages: dict[str, float] = {"commit and copy of the checkpoint": kind["save_seconds"]}
    if phase is not None and config.objective.needs_k:
        stages["selection"] = scores * units["rank_score"]
        if speeds:
            stages["reading of scores"] = 2 * scores / min(speed["read"] for speed in speeds)
    if speeds and config.log.score_classes:
        logged = epoch_bytes(spec.num_samples, spec.num_classes, config.log.score_classes)
        stages["log of scores"] = logged / min(speed["write"] for speed in speeds)
    if num_val:
        images = math.ceil(num_val / processes)
        stages["validation: images"] = images / min(one["loader_images_per_second"] for one in ranks)
        stages["validation: network"] = images * units["predict_image"]
        # Each rank has a share of the classes.
        stages["validation: metrics"] = math.ceil(spec.num_classes / processes) * units["measure_class"]
    # Images are decoded while the network predicts those before.
    hidden = min(stages.get("validation: images", 0.0), stages.get("validation: network", 0.0))
    seconds = sum(stages.values()) - hidden
    training = spec.num_samples * len(ranks) / (processes * kind["images_per_second"])
    creates = 0.0 if phase is None else spec.num_shards * phase.shard_files / (training + seconds)
    return {
        "processes": processes,
        "stages": stages,
        "seconds": seconds,
        "longest": max(stages, key=stages.__getitem__),
        "idle_share": seconds / (training + seconds),
        "requests_per_second": 2 * creates,
        "creates_per_second": creates,
    }


# For people


def rehearsal_text(facts: Facts) -> str:
    one = facts
    lines = [
        f"{one['run']}: world size {one['world_size']} on {plural(one['hosts'], 'host')}, "
        f"{one['device']}, {one['precision']}, batch {one['batch_size']} and "
        f"{plural(one['workers'], 'loader worker')} per process",
        *_speed_lines(one),
        *epoch_end_lines(one["epoch_end"]),
        *_memory_lines(one),
        "  this device against the CPU in float64, differences at the worst image:",
        _difference_table(one["differences"]),
        f"  whole run: {clock(3600 * one['hours'])}; store at most {size(one['disk_bytes'])}, checkpoints "
        f"{size(one['checkpoint_bytes'])}"
        + ("" if one["free_bytes"] is None else f"; {size(one['free_bytes'])} free"),
        *(f"  problem: {problem}" for problem in one["problems"]),
    ]
    return "\n".join(lines if one["problems"] else [*lines, "  all is well"])


def _speed_lines(facts: Facts) -> Iterator[str]:
    stages = list(facts["kinds"][-1]["stages"])
    rows = [
        [
            _epochs(kind),
            "head" if kind["is_warmup"] else "network",
            kind["layout"],
            kind["steps"],
            f"{kind['images_per_second']:,.0f}",
            *(f"{kind['stages'][stage]:,.0f}" if stage in kind["stages"] else "-" for stage in stages),
            kind["bound"],
        ]
        for kind in facts["kinds"]
    ]
    alone = [f"{stage} alone" for stage in stages]
    heads = ("epochs", "trains", "heatmaps", "steps", "images/s", *alone, "bound by")
    yield table(heads, rows, indent="    ")
    for kind in facts["kinds"]:
        waits = ", ".join(f"{name} {share:.0%}" for name, share in kind["waits"].items())
        if facts["world_size"] > 1:
            waits += f"; the exchange of gradients is {kind['exchange_share']:.0%} of a step"
        yield (
            f"  epochs {_epochs(kind)}: the step waits for {waits}; a save takes "
            f"{kind['save_seconds']:.2g} s, the end of an epoch {kind['end_seconds']:.2g} s"
        )
    for bound in dict.fromkeys(kind["bound"] for kind in facts["kinds"]):
        yield f"  bottleneck: {bound}. Try: {ADVICE[bound]}"


def _memory_lines(facts: Facts) -> Iterator[str]:
    yield (
        f"  peak memory: {size(facts['process_bytes'])} in a process, {size(facts['worker_bytes'])} in a "
        f"loader worker (with what it shares with the process), {size(facts['ram_bytes'])} RAM here"
    )
    if facts["gpu_bytes"] is not None:
        yield f"  peak memory of the GPU: {size(facts['gpu_bytes'])} of {size(facts['gpu_total_bytes'])}"


def _difference_table(differences: list[Facts]) -> str:
    rows = [
        [
            difference["precision"],
            difference["quantity"],
            "NaN" if difference["found"] is None else f"{difference['found']:.1e}",
            f"{difference['tolerance']:.0e}",
            "yes" if difference["ok"] else "NO",
        ]
        for difference in differences
    ]
    return table(("precision", "quantity", "difference", "tolerated", "ok"), rows, indent="    ")


def _epochs(kind: Facts) -> str:
    """Return the epochs of a kind, counted from 1 as in the log."""
    return f"{kind['first_epoch'] + 1} - {kind['last_epoch'] + 1}"


def epoch_end_lines(facts: dict[str, Any]) -> list[str]:
    stages = sorted(facts["stages"].items(), key=lambda stage: -stage[1])
    return [
        f"  end of an epoch with {facts['processes']} processes: {facts['seconds']:.2g} s with validation, "
        f"{facts['idle_share']:.0%} of the time; {facts['longest']} takes longest",
        "    " + ", ".join(f"{name} {seconds:.2g} s" for name, seconds in stages),
        f"  storage of the store: {facts['requests_per_second']:.3g} requests/s, "
        f"{facts['creates_per_second']:.3g} of them create a file",
    ]
