"""Estimate disk space, RAM and I/O of a run."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from bigscl.common.command_line import AsJson, Settings
from bigscl.tools.shared.terminal import plural, print_result, size, table


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
    """Estimate disk space, MB/s, RAM and steps of a run, and likely problems.

    Exit code 1 if there are warnings, or if the probed place is too slow.

    Example: bigscl plan configs/imagenet_resnet50_scl.yaml --processes 8 --samples 1281167 --classes 1000
    """
    from bigscl.config import load_config
    from bigscl.tools.shared import plan_facts

    run = load_config(config, settings or [])
    spec, mean_bytes = plan_facts.rows_of_run(run, samples, classes, per_shard)
    facts = plan_facts.needs_of_run(run, spec, processes, images_per_second, mean_bytes)
    expected = plan_facts.expected_positives(run, samples)
    facts["expected"] = None if expected is None else asdict(expected)
    if probe is not None:
        facts["probe"] = plan_facts.probe_facts(run, spec, facts, probe)
    print_result(facts, _text(facts, expected), as_json)
    if facts["warnings"] or (probe is not None and not facts["probe"]["keeps_up"]):
        raise typer.Exit(1)


def _text(facts: dict[str, Any], expected: object) -> str:
    one = facts
    data = f"{one['samples']:,} samples in {plural(one['shards'], 'shard')}, {one['classes']} classes"
    lines = [
        f"{one['run']}: {data}",
        f"  world size {one['processes']}, global batch {one['global_batch']}, "
        f"{one['steps_per_epoch']:,} steps per epoch, {one['busy_share']:.1%} full, {one['epochs']} epochs; "
        f"{_hours(one['hours'])} at {one['images_per_second']:g} images/s per process",
    ]
    if expected is not None:
        lines.append(f"  {expected}")
    if one["loader_bytes"] is not None:
        lines.append(f"  loader: about {size(one['loader_bytes'])} RAM per process")
    lines += _store_lines(one)
    lines += _probe_lines(one["probe"]) if "probe" in one else []
    lines += [f"  warning: {warning}" for warning in one["warnings"]]
    return "\n".join(lines)


def _store_lines(facts: dict[str, Any]) -> list[str]:
    if not facts["phases"]:
        return ["  store: none, this objective needs no memory"]
    side = facts["heatmap_size"]
    rows = [
        [
            f"{phase['first_epoch'] + 1} - {phase['last_epoch'] + 1}",
            phase["layout"] if phase["top"] is None else f"top {phase['top']}",
            size(phase["slot_bytes"]),
            f"{phase['slot_files']:,}",
            phase["versions"],
            size(phase["disk_bytes"]),
            f"{size(phase['bytes_per_second'] / 2)}/s",
            f"{phase['creates_per_second']:.2g}/s",
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
            (
                *("epochs", "heatmaps", "a version", "files", "kept", "on disk"),
                *("read and write, each", "creates", "RAM per process"),
            ),
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


def _hours(hours: float) -> str:
    return f"{hours * 60:.0f} min" if hours < 2 else f"{hours:.1f} h"
