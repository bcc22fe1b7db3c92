"""Make a store smaller."""

from dataclasses import replace
from typing import Annotated, Any

import typer

from bigscl.common.command_line import AsJson
from bigscl.common.user_error import UserError
from bigscl.store import Codec, GroupSpec, HeatmapStore, by_version, read_holder, stored_bytes, versions_of
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
from bigscl.tools.shared.terminal import plural, print_result, progress, size


def command(
    store: Store,
    top: Annotated[
        int | None,
        typer.Option(min=1, max=10**7, help="Number of classes per image whose heatmaps are kept."),
    ] = None,
    slots: Annotated[
        int | None, typer.Option(min=2, max=1000, help="Number of versions kept of each shard.")
    ] = None,
    codec: Annotated[Codec | None, typer.Option(help="Compression of the chunks.")] = None,
    keep: Annotated[
        list[int] | None,
        typer.Option(help="Snapshot to keep, besides the newest; may be repeated. Others are dropped."),
    ] = None,
    apply: Apply = False,
    *,
    source: DataFlags,
    storage: StorageFlags,
    as_json: AsJson = False,
) -> None:
    """Drop all snapshots but the newest and free their space; --top, --slots and --codec rewrite it.

    If it is interrupted, the store is in its old or its new state: run the command again.

    Example: bigscl compact runs/imagenet/store --top 10 --apply
    """
    opened = open_store(store, None, storage)
    there = [snapshot.id for snapshot in opened.snapshots()]
    if missing := sorted(set(keep or ()) - set(there)):
        raise UserError(f"--keep {missing[0]}: no such snapshot. Snapshots of this store: {there}")
    group = _new_group(opened, top, slots, codec)
    # In addition to the newest, which a rewriting makes.
    stays = {*(keep or ()), *([opened.snapshot.id] if group is None else [])}
    facts = _forecast(opened, group, stays, checkpoints_by_snapshot(run_folder(store)))
    if apply:
        data = source.need("--apply", store, opened.spec)
        # The rows are still those that this run learnt, so the snapshot keeps the name of the run.
        with HeatmapStore.open(
            locate(store),
            annotations=data.annotations,
            mode="w",
            run=opened.snapshot.run,
            options=storage.options,
        ) as writer:
            _apply(writer, group, stays)
            facts["bytes_after"] = sum(writer.sizes().values())
            facts["snapshot"] = writer.snapshot.id
    facts["applied"] = apply
    print_result(facts, _text(facts), as_json)
    if facts["holder"] is not None and not apply:
        raise typer.Exit(1)


def _new_group(
    store: HeatmapStore, top: int | None, slots: int | None, codec: Codec | None
) -> GroupSpec | None:
    old = store.group
    if top is None and slots is None and codec is None:
        return None
    if top is None and old.layout != "topk":
        what = "--slots" if slots is not None else "--codec"
        raise UserError(
            f"{what}: a {old.layout} store can be rewritten only with --top K. "
            f"To drop old snapshots only, remove {what}."
        )
    if top is not None and top > store.spec.num_classes:
        raise UserError(
            f"--top: {top}, but there are only {store.spec.num_classes} classes. Expected at most as many."
        )
    new = replace(old, layout="topk", top=top or old.top, slots=slots or old.slots, codec=codec or old.codec)
    if new == old:
        raise UserError(f"nothing to rewrite: the store already has --top {old.top} and --slots {old.slots}")
    if old.top is not None and new.top is not None and new.top > old.top:
        raise UserError(f"--top: {new.top}, but the store keeps only {old.top} classes per image")
    return new


def _forecast(
    store: HeatmapStore, group: GroupSpec | None, stays: set[int], checkpoints: dict[int, list[str]]
) -> dict[str, Any]:
    listing = list(store.backend.sizes(""))
    versions = by_version(listing)
    before = sum(num_bytes for _, num_bytes in listing)
    snapshots = store.snapshots()
    drop = [snapshot.id for snapshot in snapshots if snapshot.id not in stays]
    named = {version for each in snapshots if each.id in stays for version in versions_of(each)}
    written = sum(slot >= 0 for slot in store.snapshot.slots)
    new = 0 if group is None else written * stored_bytes(store.spec, group)
    holder = read_holder(store.backend)
    return {
        "url": store.backend.url,
        "layout": store.group.to_json(),
        "new_layout": None if group is None else group.to_json(),
        "drop": drop,
        "keep": sorted(stays),
        "checkpoints_lost": [name for number in drop for name in checkpoints.get(number, ())],
        "holder": None if holder is None else str(holder),
        "bytes_before": before,
        "bytes_needed_meanwhile": new,
        "bytes_after": before - versions.total() + sum(versions[version] for version in named) + new,
    }


def _apply(store: HeatmapStore, group: GroupSpec | None, stays: set[int]) -> None:
    if group is not None:
        assert group.top is not None
        written = sum(slot >= 0 for slot in store.snapshot.slots)
        with progress("rewriting", written, "shards") as advance:
            shown = lambda done: advance(1, f"shard {done} of {written}")  # noqa: E731
            store.compact(group.top, slots=group.slots, codec=group.codec, progress=shown)
    store.drop_snapshots(keep=stays)
    store.delete_free()


def _text(facts: dict[str, Any]) -> str:
    done = facts["applied"]
    lines = [f"{facts['url']}: {size(facts['bytes_before'])}"]
    if (new := facts["new_layout"]) is not None:
        old = facts["layout"]
        lines.append(f"  {'rewritten' if done else 'rewrite'} from {_layout(old)} to {_layout(new)}")
        if not done:
            lines.append(f"  needs {size(facts['bytes_needed_meanwhile'])} more while it runs")
    if facts["drop"]:
        verb = "dropped" if done else "drop"
        numbers = ", ".join(map(str, facts["drop"]))
        lines.append(f"  {verb} {plural(len(facts['drop']), 'snapshot')}: {numbers}")
    if facts["checkpoints_lost"]:
        lost = ", ".join(facts["checkpoints_lost"])
        lines.append(f"  no longer possible: resuming from {lost}")
    lines.append(f"  {'now' if done else 'then'} {size(facts['bytes_after'])}")
    if not done:
        held = facts["holder"]
        free = "nothing was changed. Add --apply to do it."
        lines.append(f"  {free}" if held is None else f"  not possible now: in use by {held}")
    return "\n".join(lines)


def _layout(group: dict[str, Any]) -> str:
    classes = "all classes" if group["layout"] == "dense" else f"the {group['top']} strongest classes"
    maps = "scores only" if group["layout"] == "scores" else f"heatmaps of {classes}"
    codec = "" if group["codec"] == "none" else f", {group['codec']}"
    return f"{maps} in {group['slots']} slots{codec}"
