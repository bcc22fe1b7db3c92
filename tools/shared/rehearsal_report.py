"""The report of `bigscl preflight`: speed, bottleneck, memory, differences of devices, hours, problems."""

import json
import math
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import typer

from bigscl.common.command_line import INTERRUPTED, first_on_this_machine, start_is_over
from bigscl.common.files import free_bytes, machine_ram_bytes
from bigscl.config import Config
from bigscl.config.schedule import plan_epoch
from bigscl.distributed.signals import Interrupts, Wording
from bigscl.preflight.device_check import Difference, worst
from bigscl.preflight.forecast import Forecast, forecast, layouts, warnings
from bigscl.preflight.rehearsal import RehearsalTrainer, ScratchFolders, epoch_types, rehearsal
from bigscl.preflight.storage_speed import measure
from bigscl.store import StoreSpec, spec_for
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


def rehearse(config: Config, steps: int) -> Facts | None:
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
            gathered = trainer.ranks.gather(json.dumps(mine).encode())
            if gathered is None:
                return None
            return _facts(config, trainer, [json.loads(payload) for payload in gathered])
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


def _spec(trainer: RehearsalTrainer) -> StoreSpec:
    annotations = trainer.data.annotations
    kept = trainer.config.store.kept_scores(annotations.num_classes)
    return spec_for(annotations, trainer.heatmap_size, 0, kept)


# What follows from the measurements of all ranks


def _facts(config: Config, trainer: RehearsalTrainer, ranks: list[Facts]) -> Facts:
    index, first = trainer.data.train, ranks[0]
    plan = plan_epoch(config, index.shard_sizes, index.rows_per_shard, epoch=0, world_size=len(ranks))
    needs = forecast(config, _spec(trainer), plan)
    free = free_bytes(config.store_url) if config.store.kind == "disk" else None
    loader = sum(rank["loader_images_per_second"] for rank in ranks)
    kinds = [_kind(config, needs, ranks, number, loader) for number in range(len(first["kinds"]))]
    checkpoints = first["checkpoint_bytes"] * (config.keep_checkpoints + 1)
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


# For people


def rehearsal_text(facts: Facts) -> str:
    one = facts
    lines = [
        f"{one['run']}: world size {one['world_size']} on {plural(one['hosts'], 'host')}, "
        f"{one['device']}, {one['precision']}, batch {one['batch_size']} and "
        f"{plural(one['workers'], 'loader worker')} per process",
        *_speed_lines(one),
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
