"""Rehearse a run, or check this machine or cluster."""

import json
import math
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bigscl.common.command_line import INTERRUPTED, AsJson, Settings, first_on_this_machine, start_is_over
from bigscl.common.failures import report_to_launcher
from bigscl.common.files import free_bytes
from bigscl.common.user_error import UserError
from bigscl.tools.shared.open_store import StorageFlags
from bigscl.tools.shared.terminal import plural, print_result, size, table

if TYPE_CHECKING:
    from bigscl.config import Config
    from bigscl.preflight.forecast import Forecast
    from bigscl.preflight.rehearsal import RehearsalTrainer
    from bigscl.preflight.rehearsal_plan import ScratchFolders
    from bigscl.store import StoreSpec

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


def command(
    config: Annotated[
        Path | None,
        typer.Argument(metavar="CONFIG", help="YAML file of the run. Default: check the environment only."),
    ] = None,
    settings: Settings = None,
    steps: Annotated[int, typer.Option(min=1, max=100_000, help="Timed steps of each type of epoch.")] = 40,
    processes: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=100_000,
            help="Processes of the run, for the end of an epoch. Default: as here.",
        ),
    ] = None,
    place: Annotated[
        str | None,
        typer.Option(help="Without a CONFIG: where the store will be, a path or s3://bucket/prefix."),
    ] = None,
    *,
    storage: StorageFlags,
    as_json: AsJson = False,
) -> None:
    """Rehearse a run: train a few dozen steps on this hardware, the run's own data and its storage.

    Without a config: check versions, devices, backends and free disk; under a launcher, that all processes
    share the place of the store.

    Prints images/s and what bounds them, peak memory, differences of this device from a CPU reference in each
    precision, and hours and bytes of the whole run. All of it happens in a folder beside the run's, which is
    removed; the run itself is not touched. Exit code 1 if there are problems.

    Start both as you will start the training:

    accelerate launch --config_file configs/accelerate/8gpu.yaml -m bigscl preflight CONFIG

    Example: bigscl preflight configs/quickstart_scl.yaml --steps 20
    """
    if config is None:
        if processes is not None:
            raise UserError("--processes: only with a CONFIG, whose epochs it is about")
        _check_environment(place, storage, as_json)
        return
    if place is not None or storage != StorageFlags():
        raise UserError("--place, --endpoint, --region, --anonymous: only without a CONFIG, which has them")
    from bigscl.config import load_config

    run = load_config(config, settings or [], to_train=True)
    facts = _rehearse(run, steps, processes)
    if facts is None:  # another rank reports
        return
    print_result(facts, _text(facts), as_json)
    if facts["problems"]:
        # Torch's launcher prints it as the last thing.
        report_to_launcher("bigscl preflight: problems found\n" + "\n".join(facts["problems"]))
        raise typer.Exit(1)


def _check_environment(place: str | None, storage: StorageFlags, as_json: bool) -> None:
    from bigscl.preflight.environment import check_environment, environment_text

    facts = check_environment(place, storage.options)
    if facts is not None:
        print_result(facts, environment_text(facts), as_json)
        if facts["problems"]:
            raise typer.Exit(1)


def _rehearse(config: "Config", steps: int, processes: int | None) -> Facts | None:
    """Return what was measured on rank 0, None on other ranks."""
    from bigscl.distributed.signals import Interrupts, Wording
    from bigscl.preflight.rehearsal import rehearsal
    from bigscl.preflight.rehearsal_plan import epoch_types
    from bigscl.train import Stopped

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
            mine: Facts = asdict(trainer.measure(epoch_types(config)))
            mine["storage"] = _storage_speed(config, trainer, folders)
            mine["units"] = _unit_costs(config, trainer)
            gathered = trainer.ranks.gather(json.dumps(mine).encode())
            if gathered is None:
                return None
            return _facts(config, trainer, [json.loads(one) for one in gathered], processes)
    except Stopped:
        raise typer.Exit(INTERRUPTED) from None


def _storage_speed(config: "Config", trainer: "RehearsalTrainer", folders: "ScratchFolders") -> list[Facts]:
    """Return bytes/s of the store's place for each layout, while all ranks measure at once."""
    from bigscl.preflight.forecast import layouts
    from bigscl.preflight.storage_speed import measure

    if config.store.kind != "disk":
        return []
    spec, found = _spec(trainer), []
    for group in layouts(config, spec):
        trainer.ranks.sum([0])  # all ranks start together
        with trainer.metrics.working(f"measuring the storage ({group.layout})"):
            speed = measure(folders.place, spec, group, config.store.io_threads, config.store.options())
        found.append({"layout": group.layout, "read": speed.read, "write": speed.write})
    return found


def _unit_costs(config: "Config", trainer: "RehearsalTrainer") -> Facts:
    """Return what the units of an epoch's end cost on this rank."""
    from bigscl.preflight.epoch_end import unit_costs

    data = trainer.data
    with trainer.metrics.working("measuring the end of an epoch"):
        num_classes, num_val = data.train.num_classes, _num_val(trainer)
        return asdict(unit_costs(trainer.state.evaluated, config, trainer.device, num_classes, num_val))


def _num_val(trainer: "RehearsalTrainer") -> int:
    return 0 if trainer.data.val is None else trainer.data.val.num_samples


def _spec(trainer: "RehearsalTrainer") -> "StoreSpec":
    from bigscl.store import spec_for

    return spec_for(trainer.data.annotations, trainer.heatmap_size, 0)


# What follows from the measurements of all ranks


def _facts(config: "Config", trainer: "RehearsalTrainer", ranks: list[Facts], processes: int | None) -> Facts:
    from bigscl.config.schedule import plan_epoch
    from bigscl.distributed.hardware import machine_ram_bytes
    from bigscl.preflight.epoch_end import epoch_end_facts
    from bigscl.preflight.forecast import forecast, warnings

    index, first = trainer.data.train, ranks[0]
    plan = plan_epoch(config, index.shard_sizes, index.rows_per_shard, epoch=0, world_size=len(ranks))
    needs = forecast(config, _spec(trainer), plan)
    free = free_bytes(config.store_url) if config.store.kind == "disk" else None
    loader = sum(one["loader_images_per_second"] for one in ranks)
    kinds = [_kind(config, needs, ranks, place, loader) for place in range(len(first["kinds"]))]
    checkpoints = first["checkpoint_bytes"] * (config.keep_checkpoints + 1)
    facts = {
        "run": str(config.run),
        "samples": index.num_samples,
        "world_size": len(ranks),
        "hosts": len({one["host"] for one in ranks}),
        "device": first["device"],
        "precision": first["precision"],
        "batch_size": config.data.batch_size,
        "workers": config.data.workers,
        "kinds": kinds,
        "loader_images_per_second": loader,
        "differences": _differences(ranks),
        "skipped": sum(one["skipped"] for one in ranks),
        "process_bytes": max(one["process_bytes"] for one in ranks),
        "worker_bytes": max(one["worker_bytes"] for one in ranks),
        "ram_bytes": machine_ram_bytes(),
        "gpu_bytes": max((one["gpu_bytes"] for one in ranks if one["gpu_bytes"]), default=None),
        "gpu_total_bytes": first["gpu_total_bytes"],
        "epoch_end": epoch_end_facts(
            config,
            _spec(trainer),
            needs.phases,
            _num_val(trainer),
            processes or len(ranks),
            ranks,
            kinds[-1],
        ),
        "hours": _hours(config, trainer, needs, kinds),
        "disk_bytes": needs.disk_bytes,
        "checkpoint_bytes": checkpoints,
        "free_bytes": free,
        "seconds": first["seconds"],
    }
    known = warnings(config, needs, free, facts["ram_bytes"])
    facts["problems"] = [*known, *_problems(facts)]
    return facts


def _kind(config: "Config", needs: "Forecast", ranks: list[Facts], place: int, loader: float) -> Facts:
    """Return the speeds of a kind of epochs over all ranks, and what bounds it."""
    ones = [one["kinds"][place] for one in ranks]
    first = ones[0]
    batch = first["images"] / first["steps"] / config.optimizer.accumulate
    step, compute = (max(one[name] for one in ones) for name in ("step_seconds", "compute_seconds"))
    stages = {"decode": loader, "step": batch / step}
    exchange = max(0.0, 1 - compute / step) if len(ranks) > 1 else 0.0
    image_bytes = {phase.group.layout: phase.image_bytes for phase in needs.phases}.get(first["layout"])
    speeds = [speed for one in ranks for speed in one["storage"] if speed["layout"] == first["layout"]]
    if image_bytes is not None and speeds:
        stages["heatmaps"] = sum(speed["read"] for speed in speeds) / image_bytes
        stages["writeback"] = sum(speed["write"] for speed in speeds) / image_bytes
    slowest = min(stages, key=stages.__getitem__)
    bound = "collectives" if slowest == "step" and exchange >= MOSTLY else slowest
    return {
        "first_epoch": first["first_epoch"],
        "last_epoch": first["last_epoch"],
        "is_warmup": first["is_warmup"],
        "layout": first["layout"],
        "steps": first["steps"],
        "images_per_second": first["images"] / first["seconds"],
        "step_seconds": first["seconds"] / first["steps"],
        "stages": stages,
        "exchange_share": exchange,
        "waits": {
            name.removeprefix("wait_"): max(one["waits"][name] for one in ones) for name in first["waits"]
        },
        "bound": bound,
        "advice": ADVICE[bound],
        "save_seconds": max(one["save_seconds"] for one in ones),
        "end_seconds": max(one["end_seconds"] for one in ones),
    }


def _differences(ranks: list[Facts]) -> list[Facts]:
    """Return the largest differences of all ranks and kinds of epochs."""
    from bigscl.preflight.device_check import Difference, worst

    found = [Difference(**one) for rank in ranks for one in rank["differences"]]
    return [
        # NaN is no JSON.
        {**asdict(one), "found": one.found if math.isfinite(one.found) else None, "ok": one.is_tolerated}
        for one in worst(found)
    ]


def _hours(config: "Config", trainer: "RehearsalTrainer", needs: "Forecast", kinds: list[Facts]) -> float:
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
        seconds += epochs * _saves_within(config, needs, epoch) * kind["save_seconds"]
    if trainer.data.val is not None:
        validations = config.schedule.epochs // config.validation.every_epochs
        seconds += validations * trainer.data.val.num_samples / kinds[-1]["stages"]["step"]
    return seconds / 3600


def _saves_within(config: "Config", needs: "Forecast", epoch_seconds: float) -> float:
    every = config.checkpoint
    by_steps = 0 if every.every_steps is None else (needs.num_steps - 1) // every.every_steps
    by_time = 0 if every.every_minutes is None else int(epoch_seconds / (60 * every.every_minutes))
    return max(by_steps, by_time)


def _problems(facts: Facts) -> Iterator[str]:
    for one in facts["differences"]:
        if not one["ok"] and one["precision"] in ("fp32", facts["precision"]):
            found = "NaN or infinite" if one["found"] is None else f"{one['found']:.2g}"
            yield (
                f"{one['quantity']} in {one['precision']}: differs from the CPU reference by {found}, "
                f"tolerated {one['tolerance']:g}. This device or its software computes something else"
            )
    for kind in facts["kinds"]:
        if kind["bound"] in ("heatmaps", "writeback"):
            yield (
                f"the storage of the store holds up the training in epochs {_epochs(kind)}: it sustains "
                f"{kind['stages'][kind['bound']]:,.0f} images/s. To change: {kind['advice']}"
            )
    if facts["skipped"]:
        yield f"{plural(facts['skipped'], 'image')} could not be read: `bigscl index` checks all shards"


# For people


def _text(facts: Facts) -> str:
    from bigscl.preflight.epoch_end import epoch_end_lines
    from bigscl.training.metrics_log import clock

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
        yield f"  {bound} bounds the speed. To change: {ADVICE[bound]}"


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
            one["precision"],
            one["quantity"],
            "NaN" if one["found"] is None else f"{one['found']:.1e}",
            f"{one['tolerance']:.0e}",
            "yes" if one["ok"] else "NO",
        ]
        for one in differences
    ]
    return table(("precision", "quantity", "difference", "tolerated", "ok"), rows, indent="    ")


def _epochs(kind: Facts) -> str:
    """Return the epochs of a kind, counted from 1 as in the log."""
    return f"{kind['first_epoch'] + 1} - {kind['last_epoch'] + 1}"
