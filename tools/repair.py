"""`bigscl repair`: reset what is damaged in a store, so that its run can resume."""

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from bigscl.files import read_json_object, write_text
from bigscl.store import (
    HeatmapStore,
    Problem,
    Snapshot,
    StorageOptions,
    read_holder,
    verify,
)
from bigscl.tools.damage import Source, damaged_rows, repaired_shard
from bigscl.tools.opening import (
    Anonymous,
    Apply,
    AsJson,
    Endpoint,
    IndexFile,
    Region,
    Shards,
    Store,
    checkpoints_by_snapshot,
    locate,
    need_data,
    open_store,
    options,
    run_folder,
)
from bigscl.tools.progress import progress
from bigscl.tools.text import counted, spans, tell

THREADS = min(4, os.cpu_count() or 1)
MAX_LINES = 20


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Report:
    """What is damaged, and the snapshot that must be whole for the run to resume."""

    target: Snapshot
    checkpoints: dict[int, list[str]]
    """Names of the run's checkpoints by the snapshot they resume from."""
    damage: dict[int, dict[int, list[Problem]]]
    """By snapshot and shard; whole snapshots have no shard."""

    @property
    def shards(self) -> dict[int, list[Problem]]:
        """The damaged shards of the target."""
        return self.damage[self.target.id]


def command(
    store: Store,
    run: Annotated[
        Path | None,
        typer.Option(help="Folder of the run that resumes from the store. Default: the one it lies in."),
    ] = None,
    apply: Apply = False,
    shards: Shards = None,
    index: IndexFile = None,
    endpoint: Endpoint = None,
    region: Region = None,
    anonymous: Anonymous = False,
    as_json: AsJson = False,
) -> None:
    """Reset the rows in damaged chunks of the snapshot that the newest checkpoint resumes from.

    They get their values of an older snapshot where that is whole, else their initial values; all other rows
    stay. The repaired state is a new snapshot, and the checkpoint names it. Exit code 1 if damage is found
    and --apply is not given.

    Example: bigscl repair runs/imagenet --apply
    """
    reach = options(endpoint, region, anonymous)
    opened = open_store(store, None, reach)
    folder = _run_folder(store, run)
    report = examine(store, reach, opened.snapshots(), checkpoints_by_snapshot(folder))
    facts = _facts(opened, report)
    if apply and report.shards:
        data = need_data("--apply", store, opened.spec.fingerprint, shards, index)
        with HeatmapStore.open(
            locate(store),
            annotations=data.annotations,
            mode="w",
            snapshot=report.target.id,
            run=report.target.run,
            options=reach,
        ) as writer:
            facts |= {"applied": True, **repair(writer, report, folder)}
    tell(facts, _text(facts), as_json)
    if facts["shards"] and not apply:
        raise typer.Exit(1)


def _run_folder(store: str, run: Path | None) -> Path | None:
    if run is not None and not (run / "checkpoints").is_dir():
        raise ValueError(f"--run {run}: no folder `checkpoints` there. Give the folder of the store's run.")
    return run or run_folder(store)


def examine(
    store: str, reach: StorageOptions, snapshots: list[Snapshot], checkpoints: dict[int, list[str]]
) -> Report:
    """Read all that retained snapshots name, what they share once."""
    there = {one.id: one for one in snapshots}
    newest = max(checkpoints, key=lambda number: max(checkpoints[number]), default=max(there))
    if newest not in there:
        raise ValueError(
            f"{locate(store)}: checkpoint {max(checkpoints[newest])} names snapshot {newest}, retained are "
            f"{list(there)}. Resume from an older checkpoint, or restore the store from a copy."
        )
    known: dict[tuple[str, int, int], list[Problem]] = {}
    damage = {}
    for number in there:
        at = open_store(store, number, reach)
        _read_new(at, known)
        versions = {shard: (at.snapshot.group, slot, shard) for shard, slot in enumerate(at.snapshot.slots)}
        damage[number] = {shard: known[one] for shard, one in versions.items() if known.get(one)}
    return Report(target=there[newest], checkpoints=checkpoints, damage=damage)


def _read_new(store: HeatmapStore, known: dict[tuple[str, int, int], list[Problem]]) -> None:
    """Find the problems of the versions that no snapshot before named."""
    named = store.snapshot
    wanted = [
        shard
        for shard, slot in enumerate(named.slots)
        if slot >= 0 and (named.group, slot, shard) not in known
    ]
    with (
        progress(f"reading snapshot {named.id}", len(wanted), "shards") as advance,
        ThreadPoolExecutor(THREADS, thread_name_prefix="repair") as pool,
    ):
        for found in pool.map(lambda shard: list(verify(store, [shard])), wanted):
            for shard, problems in found:
                known[named.group, named.slots[shard], shard] = problems
                advance(1, f"shard {shard}")


def repair(store: HeatmapStore, report: Report, folder: Path | None) -> dict[str, Any]:
    """Commit the repaired state, let the checkpoints of the damaged one name it, then drop that one.

    Interrupted before the checkpoint names the new snapshot, the damaged one is still there: run it again.
    """
    old = report.target
    kept = [number for number in report.damage if number != old.id]
    older = [one for one in store.snapshots() if one.id < old.id and one.group == old.group]
    reset: dict[str, list[int]] = {}
    for shard, problems in report.shards.items():
        sources = [
            Source(
                snapshot=one, damaged=damaged_rows(store.spec, shard, report.damage[one.id].get(shard, []))
            )
            for one in reversed(older)
            if one.id in report.damage and one.slots[shard] >= 0
        ]
        rows, origins = repaired_shard(store, old, shard, problems, sources)
        store.save_shard(shard, rows)
        for origin, samples in origins.items():
            reset.setdefault(origin, []).extend(samples)
    note = {"of": old.id, "samples": sorted(sample for samples in reset.values() for sample in samples)}
    attributes = {**old.attributes, "repaired": note}
    new = store.commit(epoch=old.epoch, step=old.step, attributes=attributes)
    for name in report.checkpoints.get(old.id, ()):
        assert folder is not None
        _name_snapshot(folder / "checkpoints" / name / "progress.json", new.id)
    store.drop_snapshots(keep=kept)
    return {"reset": reset, "repaired_as": new.id}


def _name_snapshot(path: Path, snapshot: int) -> None:
    """Let a checkpoint resume from another snapshot; the file is replaced whole, or stays as it was."""
    values = {**(read_json_object(path) or {}), "snapshot": snapshot}
    write_text(path, json.dumps(values, indent=1))


def _facts(store: HeatmapStore, report: Report) -> dict[str, Any]:
    target, holder = report.target, read_holder(store.backend)
    return {
        "url": store.backend.url,
        "snapshot": target.id,
        "checkpoints": report.checkpoints.get(target.id, []),
        "num_shards": store.spec.num_shards,
        "shards": {
            shard: [
                {"array": one.array, "samples": list(one.samples), "reason": one.reason} for one in problems
            ]
            for shard, problems in report.shards.items()
        },
        "others": [
            {"snapshot": number, "checkpoints": report.checkpoints.get(number, []), "shards": sorted(found)}
            for number, found in report.damage.items()
            if number != target.id
        ],
        "holder": None if holder is None else str(holder),
        "applied": False,
    }


def _text(facts: dict[str, Any]) -> str:
    at = _named(facts["snapshot"], facts["checkpoints"])
    if not facts["shards"]:
        lines = [f"{facts['url']}: {at} is whole; nothing to repair"]
    else:
        found = counted(len(facts["shards"]), "damaged shard")
        lines = [f"{facts['url']}: {at} has {found} of {facts['num_shards']}", *_damage_lines(facts)]
    lines += _other_lines(facts)
    if facts["applied"]:
        lines += _done_lines(facts)
    elif facts["shards"]:
        held = facts["holder"]
        advice = (
            "nothing was changed; add --apply to reset these samples" if held is None else f"in use by {held}"
        )
        lines.append(f"  {advice}")
    return "\n".join(lines)


def _named(snapshot: int, checkpoints: list[str]) -> str:
    names = f" (checkpoint {', '.join(checkpoints)})" if checkpoints else ""
    return f"snapshot {snapshot}{names}"


def _damage_lines(facts: dict[str, Any]) -> list[str]:
    lines = [
        f"  shard {shard}, {one['array']}, samples {spans(one['samples'])}: {one['reason']}"
        for shard, problems in facts["shards"].items()
        for one in problems
    ]
    more = len(lines) - MAX_LINES
    return lines[:MAX_LINES] + ([f"  ... and {more} more; --json lists them all"] if more > 0 else [])


def _other_lines(facts: dict[str, Any]) -> Iterator[str]:
    for one in facts["others"]:
        at = _named(one["snapshot"], one["checkpoints"])
        if one["shards"]:
            yield f"  {at} is damaged too, in {counted(len(one['shards']), 'shard')}; it stays as it is"
        elif facts["shards"] and one["checkpoints"] and not facts["applied"]:
            yield f"  {at} is whole: training can also be resumed from it, with --resume CHECKPOINT"


def _done_lines(facts: dict[str, Any]) -> list[str]:
    lines = [f"  samples {spans(ids)}: reset to {origin}" for origin, ids in facts["reset"].items()]
    names = ", ".join(facts["checkpoints"])
    told = f"checkpoint {names} names it now. Resume the run with its usual command."
    alone = "no checkpoint named the damaged one. Give the run's folder with --run if it has one."
    lines.append(f"  repaired as snapshot {facts['repaired_as']}; {told if names else alone}")
    return lines
