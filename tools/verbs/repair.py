"""Reset the damaged rows of a store."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

from bigscl.common.command_line import AsJson
from bigscl.common.digests import read_sealed, write_sealed
from bigscl.common.user_error import UserError
from bigscl.store import (
    MAX_COUNT,
    PACKED_NAME,
    Answered,
    Array,
    HeatmapStore,
    Problem,
    Rows,
    Snapshot,
    StoreSpec,
    answered_shard,
    initial_shard,
    read_holder,
    verify,
)
from bigscl.tools.shared.open_store import (
    Apply,
    DataFlags,
    StorageFlags,
    Store,
    checkpoints_by_snapshot,
    locate,
    open_store,
    run_folder,
)
from bigscl.tools.shared.shard_passes import pass_over
from bigscl.tools.shared.terminal import plural, print_result, ranges

MAX_LINES = 20


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Report:
    """The damage, and the snapshot from which the run resumes."""

    target: Snapshot
    checkpoints: dict[int, list[str]]
    """Names of the run's checkpoints by the snapshot they resume from."""
    damage: dict[int, dict[int, list[Problem]]]
    """Problems by snapshot and shard; intact snapshots have no shard."""

    @property
    def shards(self) -> dict[int, list[Problem]]:
        return self.damage[self.target.id]


def command(
    store: Store,
    run: Annotated[
        Path | None,
        typer.Option(help="Folder of the run that uses the store. Default: the folder that contains it."),
    ] = None,
    apply: Apply = False,
    *,
    source: DataFlags,
    storage: StorageFlags,
    as_json: AsJson = False,
) -> None:
    """Reset the rows in damaged chunks of the snapshot from which the newest checkpoint resumes.

    They get the values of an older snapshot if these are intact, otherwise their initial values; all other
    rows stay. The repaired state is a new snapshot, and the checkpoint refers to it. Exit code 1 if there is
    damage and --apply is not given.

    Example: bigscl repair runs/imagenet --apply
    """
    opened = open_store(store, None, storage)
    if run is not None and not (run / "checkpoints").is_dir():
        raise UserError(f"--run {run}: no folder `checkpoints` there. Give the folder of the store's run.")
    folder = run or run_folder(store)
    report = examine(store, storage, opened.snapshots(), checkpoints_by_snapshot(folder))
    facts = _facts(opened, report)
    if apply and report.shards:
        data = source.need("--apply", store, opened.spec)
        with HeatmapStore.open(
            locate(store),
            annotations=data.annotations,
            mode="w",
            snapshot=report.target.id,
            run=report.target.run,
            options=storage.options,
        ) as writer:
            facts |= {"applied": True, **repair(writer, report, folder)}
    print_result(facts, _text(facts), as_json)
    if facts["shards"] and not apply:
        raise typer.Exit(1)


def examine(
    store: str, storage: StorageFlags, snapshots: list[Snapshot], checkpoints: dict[int, list[str]]
) -> Report:
    """Read all versions that the snapshots name, each once."""
    there = {snapshot.id: snapshot for snapshot in snapshots}
    newest = _newest(store, list(there), checkpoints)
    known: dict[tuple[str, int, int], list[Problem]] = {}
    damage = {}
    for number in there:
        at = open_store(store, number, storage)
        _read_new(at, known)
        versions = {shard: (at.snapshot.group, slot, shard) for shard, slot in enumerate(at.snapshot.slots)}
        damage[number] = {shard: known[version] for shard, version in versions.items() if known.get(version)}
    return Report(target=there[newest], checkpoints=checkpoints, damage=damage)


def _newest(store: str, snapshots: list[int], checkpoints: dict[int, list[str]]) -> int:
    """Return the snapshot from which the newest checkpoint resumes; without checkpoints, the newest one."""
    newest = max(checkpoints, key=lambda number: max(checkpoints[number]), default=max(snapshots))
    if newest not in snapshots:
        raise UserError(
            f"{locate(store)}: checkpoint {max(checkpoints[newest])} needs snapshot {newest}, but the store "
            f"has {snapshots}. Resume from an older checkpoint, or restore the store from a copy."
        )
    return newest


def _read_new(store: HeatmapStore, known: dict[tuple[str, int, int], list[Problem]]) -> None:
    """Find the problems of the versions that no earlier snapshot named."""
    named = store.snapshot
    wanted = [
        shard
        for shard, slot in enumerate(named.slots)
        if slot >= 0 and (named.group, slot, shard) not in known
    ]
    work = partial(_problems, store)
    for shard, problems in pass_over(f"reading snapshot {named.id}", wanted, work):
        known[named.group, named.slots[shard], shard] = problems


def _problems(store: HeatmapStore, shard: int) -> list[Problem]:
    return [problem for _, problems in verify(store, [shard]) for problem in problems]


def repair(store: HeatmapStore, report: Report, folder: Path | None) -> dict[str, Any]:
    """Commit the repaired state, point the checkpoints of the damaged one to it, then drop the damaged one.

    If it is interrupted before a checkpoint is changed, the damaged snapshot still exists: run it again.
    """
    old = report.target
    kept = [number for number in report.damage if number != old.id]
    older = [
        snapshot for snapshot in store.snapshots() if snapshot.id < old.id and snapshot.group == old.group
    ]
    reset: dict[str, list[int]] = {}
    answered = Answered.at(old)
    for shard, problems in report.shards.items():
        sources = [
            Source(
                snapshot=snapshot,
                damaged=damaged_rows(store.spec, shard, report.damage[snapshot.id].get(shard, [])),
            )
            for snapshot in reversed(older)
            if snapshot.id in report.damage and snapshot.slots[shard] >= 0
        ]
        repaired = repaired_shard(store, old, shard, problems, sources, answered)
        store.save_shard(shard, repaired.rows)
        answered = repaired.answered
        for origin, samples in repaired.reset.items():
            reset.setdefault(origin, []).extend(samples)
    note = {"of": old.id, "samples": sorted(sample for samples in reset.values() for sample in samples)}
    attributes = {**old.attributes, **answered.attribute(), "repaired": note}
    new = store.commit(epoch=old.epoch, step=old.step, attributes=attributes)
    for name in report.checkpoints.get(old.id, []):
        assert folder is not None
        path = folder / "checkpoints" / name / "progress.json"
        write_sealed(path, {**read_sealed(path, "Nothing was changed in it."), "snapshot": new.id})
    store.drop_snapshots(keep=kept)
    return {"reset": reset, "repaired_as": new.id}


def _facts(store: HeatmapStore, report: Report) -> dict[str, Any]:
    target, holder = report.target, read_holder(store.backend)
    return {
        "url": store.backend.url,
        "snapshot": target.id,
        "checkpoints": report.checkpoints.get(target.id, []),
        "num_shards": store.spec.num_shards,
        "shards": {
            shard: [
                {name: getattr(each, name) for name in ("array", "samples", "reason")} for each in problems
            ]
            for shard, problems in report.shards.items()
        },
        "others": [
            {"snapshot": number, "checkpoints": report.checkpoints.get(number, []), "shards": sorted(shards)}
            for number, shards in report.damage.items()
            if number != target.id
        ],
        "holder": None if holder is None else str(holder),
        "applied": False,
    }


def _text(facts: dict[str, Any]) -> str:
    at = _named(facts["snapshot"], facts["checkpoints"])
    if not facts["shards"]:
        lines = [f"{facts['url']}: {at} is intact; nothing to repair"]
    else:
        damaged = plural(len(facts["shards"]), "damaged shard")
        lines = [f"{facts['url']}: {at} has {damaged} of {facts['num_shards']}", *_damage_lines(facts)]
    lines += _other_lines(facts)
    if facts["applied"]:
        lines += _done_lines(facts)
    elif facts["shards"]:
        held, advice = facts["holder"], "nothing was changed. Add --apply to reset these samples."
        lines.append(f"  {advice if held is None else f'in use by {held}'}")
    return "\n".join(lines)


def _named(snapshot: int, checkpoints: list[str]) -> str:
    names = f" (checkpoint {', '.join(checkpoints)})" if checkpoints else ""
    return f"snapshot {snapshot}{names}"


def _damage_lines(facts: dict[str, Any]) -> list[str]:
    lines = [
        f"  shard {shard}, {problem['array']}, samples {ranges(problem['samples'])}: {problem['reason']}"
        for shard, problems in facts["shards"].items()
        for problem in problems
    ]
    more = len(lines) - MAX_LINES
    return lines[:MAX_LINES] + ([f"  ... and {more} more; --json lists them all"] if more > 0 else [])


def _other_lines(facts: dict[str, Any]) -> Iterator[str]:
    for other in facts["others"]:
        at = _named(other["snapshot"], other["checkpoints"])
        if other["shards"]:
            yield f"  {at} is also damaged, in {plural(len(other['shards']), 'shard')}; it is not changed"
        elif facts["shards"] and other["checkpoints"] and not facts["applied"]:
            yield f"  {at} is intact: training can also resume from it, with --resume CHECKPOINT"


def _done_lines(facts: dict[str, Any]) -> list[str]:
    lines = [f"  samples {ranges(ids)}: reset to {origin}" for origin, ids in facts["reset"].items()]
    names = ", ".join(facts["checkpoints"])
    told = f"checkpoint {names} refers to it now. Resume the run with its usual command."
    alone = "no checkpoint referred to the damaged one. If the store has a run, give its folder with --run."
    lines.append(f"  repaired as snapshot {facts['repaired_as']}; {told if names else alone}")
    return lines


# Damaged rows

STAMPS = "last_epoch"
INITIAL = "their initial values"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Source:
    """An older version of a shard, with the rows that are damaged in it."""

    snapshot: Snapshot
    damaged: NDArray[np.bool_]


def damaged_rows(spec: StoreSpec, shard: int, problems: Sequence[Problem]) -> NDArray[np.bool_]:
    bad = np.zeros(spec.rows_per_shard, bool)
    for problem in problems:
        bad[np.asarray(problem.samples, np.int64) - shard * spec.rows_per_shard] = True
    return bad


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RepairedShard:
    """The rows of a shard that has no damage any more."""

    rows: Rows
    reset: dict[str, list[int]]
    """The reset samples by the origin of their values."""
    answered: Answered
    """The answers of the snapshot; `late` is that of the values which the rows have now."""


def repaired_shard(
    store: HeatmapStore,
    at: Snapshot,
    shard: int,
    problems: Sequence[Problem],
    sources: Sequence[Source],
    answered: Answered,
) -> RepairedShard:
    """Return the repaired rows of a shard, with all answers of people that the snapshot has.

    A damaged row is taken from the first source in which it is intact. It keeps its visit stamp, so that the
    current epoch does not visit it twice; a lost stamp becomes the snapshot's epoch for the same reason,
    and lost visits become one for each epoch so far.
    """
    spec = store.spec
    assert store.annotations is not None
    initial = dict(initial_shard(spec, store.group, store.annotations, shard))
    values = [problem for problem in problems if problem.array not in (STAMPS, PACKED_NAME)]
    lost = damaged_rows(spec, shard, values)
    origins = {INITIAL: lost.copy()}
    replacement = {name: array.copy() for name, array in initial.items()}
    for source in sources:
        name = f"their values of snapshot {source.snapshot.id}"
        origins[name] = origins[INITIAL] & ~source.damaged
        origins[INITIAL] &= source.damaged
        older = Rows(spec.num_classes, **_readable(store, source.snapshot, shard, initial))
        is_about = _is_about(answered, spec, shard, origins[name])
        since, changes = answered.since(
            Answered.at(source.snapshot), stored=is_about, heatmaps=store.group.layout != "scores"
        )
        answered = replace(answered, late=np.where(is_about, since.late, answered.late))
        older = answered_shard(older, shard, since.take(changes), store.annotations)
        _copy(dict(older), replacement, origins[name])
    # Initial values have the answers from their start.
    is_about = _is_about(answered, spec, shard, origins[INITIAL])
    answered = replace(answered, late=answered.late & ~is_about)
    rows = _readable(store, at, shard, initial)
    lost_visits, lost_stamps = (
        damaged_rows(spec, shard, [problem for problem in problems if problem.array == name])
        for name in (PACKED_NAME, STAMPS)
    )
    rows["sample_visits"][lost_visits] = min(at.epoch + 1, MAX_COUNT)
    lost_stamps |= lost_visits
    stamps = np.where(lost_stamps, at.epoch, rows[STAMPS]).astype(rows[STAMPS].dtype)
    _copy(replacement, rows, lost)
    rows[STAMPS] = stamps
    beyond = np.arange(spec.rows_per_shard) >= spec.shard_sizes[shard]
    _copy(initial, rows, beyond)
    origins["stamps of the snapshot's epoch"] = lost_stamps & ~lost
    reset = {
        name: (shard * spec.rows_per_shard + np.flatnonzero(rows_reset)).tolist()
        for name, rows_reset in origins.items()
        if rows_reset.any()
    }
    return RepairedShard(rows=Rows(spec.num_classes, **rows), reset=reset, answered=answered)


def _is_about(answered: Answered, spec: StoreSpec, shard: int, rows: NDArray[np.bool_]) -> NDArray[np.bool_]:
    in_shard: NDArray[np.bool_] = answered.rows // spec.rows_per_shard == shard
    return in_shard & rows[answered.rows % spec.rows_per_shard]


def _copy(source: dict[str, Array], target: dict[str, Array], rows: NDArray[np.bool_]) -> None:
    for name, array in target.items():
        array[rows] = source[name][rows]


def _readable(store: HeatmapStore, at: Snapshot, shard: int, initial: dict[str, Array]) -> dict[str, Array]:
    """Return the arrays of a version, with initial values where a chunk cannot be read.

    `verify` has named the rows of those chunks, and they are reset.
    """
    assert at.group == store.group.name
    return store.arrays.readable(shard, at.slots[shard], initial)
