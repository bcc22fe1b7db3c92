"""Show a store, or its memory of a sample."""

from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

from bigscl.common.command_line import AsJson
from bigscl.memory.snapshot_state import SnapshotState
from bigscl.selection.thresholds import approximate_text
from bigscl.selection.trust import Trust
from bigscl.store import (
    FORMAT,
    Array,
    HeatmapStore,
    Rows,
    by_version,
    bytes_by_array,
    read_holder,
    snapshot_bytes,
)
from bigscl.tools.shared.find_samples import class_name, find_samples, name_of
from bigscl.tools.shared.open_store import (
    AtSnapshot,
    Data,
    DataFlags,
    StorageFlags,
    Store,
    checkpoints_by_snapshot,
    is_alive,
    open_store,
    run_folder,
    snapshot_facts,
    trust_at,
)
from bigscl.tools.shared.shard_passes import SnapshotThresholds, expected_at, pass_over
from bigscl.tools.shared.terminal import (
    few_visits_note,
    histogram_text,
    plural,
    print_result,
    size,
    table,
    utc_time,
)

BINS = 10
MAX_EPOCHS_SHOWN = 12


def command(
    store: Store,
    snapshot: AtSnapshot = None,
    sample: Annotated[
        list[str] | None, typer.Option(help="Sample whose memory is shown, by key or id; may be repeated.")
    ] = None,
    classes: Annotated[
        int, typer.Option(min=1, help="Number of classes shown of a sample, by falling score.")
    ] = 10,
    histograms: Annotated[
        bool,
        typer.Option("--histograms", help="Show histograms of scores and heatmaps; reads the whole store."),
    ] = False,
    *,
    source: DataFlags,
    storage: StorageFlags,
    as_json: AsJson = False,
) -> None:
    """Show a store: layout, size, snapshots, lease and visited rows; or its memory of a sample.

    Example: bigscl show runs/quickstart/store --sample train_000003
    """
    opened = open_store(store, snapshot, storage)
    if sample:
        wants_keys = not all(name.isdecimal() for name in sample)
        # Ids can be shown without the data, if they were visited.
        data = (
            source.need("--sample KEY", store, opened.spec) if wants_keys else source.find(store, opened.spec)
        )
        opened = open_store(store, opened.snapshot.id, storage, data)
        ids = find_samples(sample, opened.spec, None if data is None else data.index)
        expected = expected_at(opened)
        facts: dict[str, Any] = {
            "samples": [_sample(opened, int(n), data, classes, expected) for n in ids],
            "selection": expected.facts(),
        }
        texts = [_sample_text(shown) for shown in facts["samples"]]
        text = "\n\n".join([*texts, expected.note] if expected.recomputed else texts)
    elif histograms:
        facts = {"url": opened.backend.url, "snapshot": opened.snapshot.id, "histograms": _histograms(opened)}
        text = _histogram_text(facts)
    else:
        facts = _facts(opened, checkpoints_by_snapshot(run_folder(store)))
        data = source.find(store, opened.spec) if facts["snapshots"][-1]["approximate"] else None
        text = "\n".join([_text(facts), *_approximate_text(opened, data)])
    print_result(facts, text, as_json)


# The store as a whole


def _facts(store: HeatmapStore, checkpoints: dict[int, list[str]]) -> dict[str, Any]:
    spec, backend = store.spec, store.backend
    holder = read_holder(backend)
    listing = list(backend.sizes(""))
    versions, snapshots = by_version(listing), store.snapshots()
    named = snapshot_bytes(snapshots, versions)
    return {
        "url": backend.url,
        "format": FORMAT,
        "fingerprint": spec.fingerprint,
        "samples": spec.num_samples,
        "shards": spec.num_shards,
        "rows_per_shard": spec.rows_per_shard,
        "classes": spec.num_classes,
        "top_scores": spec.top_scores,
        "heatmap_size": spec.heatmap_size,
        "tracked": len(spec.history_samples),
        "snapshot": store.snapshot.id,
        "layout": store.group.to_json(),
        "lease": None if holder is None else {**asdict(holder), "alive": is_alive(holder)},
        "bytes": bytes_by_array(listing),
        "visited": _visits(store),
        "trust": None if (trust := trust_at(store)) is None else trust.to_json(),
        "snapshots": [
            {
                **snapshot_facts(snapshot, store.spec.num_classes),
                "bytes": named[snapshot.id].all,
                "bytes_only_here": named[snapshot.id].only_here,
                "checkpoints": checkpoints.get(snapshot.id, []),
            }
            for snapshot in snapshots
        ],
    }


def _visits(store: HeatmapStore) -> dict[str, int]:
    """Return how many samples were last visited in each epoch, or `never`."""
    sizes = np.asarray(store.spec.shard_sizes)
    real = np.arange(store.spec.rows_per_shard) < sizes[:, None]
    epochs, counts = np.unique(store.last_epochs().reshape(real.shape)[real], return_counts=True)
    return {
        "never" if epoch < 0 else str(epoch): int(count) for epoch, count in zip(epochs, counts, strict=True)
    }


def _text(facts: dict[str, Any]) -> str:
    lines = [
        f"{facts['url']}: heatmap store, format {facts['format']}",
        f"  data      {plural(facts['samples'], 'sample')} in {plural(facts['shards'], 'shard')} of up to "
        f"{facts['rows_per_shard']}, {facts['classes']} classes, fingerprint {facts['fingerprint'][:12]}",
        f"  layout    {_layout_text(facts)}",
        f"  lease     {_lease_text(facts['lease'])}",
        f"  visited   {_visits_text(facts['visited'])} (at snapshot {facts['snapshot']})",
        *([] if facts["trust"] is None else [f"  trust     {Trust.from_json(facts['trust'])}"]),
        f"  size      {size(sum(facts['bytes'].values()))}",
        *(f"    {size(count):>9}  {name}" for name, count in sorted(facts["bytes"].items())),
        "  snapshots",
        table(
            ("id", "epoch", "step", "time (UTC)", "run", "arrays", "shards", "size", "only here", "notes"),
            [_snapshot_row(snapshot, facts) for snapshot in facts["snapshots"]],
            indent="    ",
        ),
    ]
    return "\n".join(lines)


def _layout_text(facts: dict[str, Any]) -> str:
    layout = facts["layout"]
    side = facts["heatmap_size"]
    maps = {
        "dense": f"heatmaps {side} x {side} of all classes",
        "topk": f"heatmaps {side} x {side} of the {layout['top']} strongest classes",
        "scores": "scores only",
    }[layout["layout"]]
    parts = [f"{layout['layout']}: {maps}", plural(layout["slots"], "slot")]
    if facts["top_scores"] is not None:
        parts.insert(1, f"the {facts['top_scores']} highest scores")
    parts.append("checksums" if layout["checksum"] else "no checksums")
    parts.append("no compression" if layout["codec"] == "none" else layout["codec"])
    return ", ".join([*parts, f"{facts['tracked']} tracked samples"])


def _approximate_text(store: HeatmapStore, data: Data | None) -> Iterator[str]:
    """Yield which classes of the shown snapshot have expected positives that may not be exact."""
    selection = SnapshotState.of(store.snapshot, store.spec.num_classes).selection
    if classes := selection.approximate_classes():
        index = None if data is None else data.index
        yield "  " + approximate_text(selection, [class_name(number, index) for number in classes])


def _lease_text(lease: dict[str, Any] | None) -> str:
    if lease is None:
        return "free"
    lives = {True: "alive", False: "dead: see `bigscl unlock`", None: "on another host"}[lease["alive"]]
    since = utc_time(lease["since"])
    return f"held by run {lease['run']}, host {lease['host']}, pid {lease['pid']}, since {since} ({lives})"


def _visits_text(visits: dict[str, int]) -> str:
    parts = [f"{visits[epoch]:,} in epoch {int(epoch) + 1}" for epoch in visits if epoch != "never"]
    return ", ".join([*reversed(parts), *([f"{visits['never']:,} never"] if "never" in visits else [])])


def _snapshot_row(one: dict[str, Any], facts: dict[str, Any]) -> list[object]:
    notes = ["shown"] if one["id"] == facts["snapshot"] else []
    notes += ["selection"] if one["selection"] else []
    notes += [f"{len(one['approximate'])} classes approximate"] if one["approximate"] else []
    notes += ["mid-epoch"] if one["mid_epoch"] else []
    notes += [f"{one['skipped']} skipped"] if one["skipped"] else []
    notes += [f"checkpoint {name}" for name in one["checkpoints"]]
    head = [one["id"], one["epoch"] + 1, one["step"], utc_time(one["time"]), one["run"][:12] or "-"]
    return [
        *head,
        one["group"],
        one["shards_written"],
        size(one["bytes"]),
        size(one["bytes_only_here"]),
        ", ".join(notes),
    ]


# One sample


def _sample(
    store: HeatmapStore, sample: int, data: Data | None, count: int, expected_there: SnapshotThresholds
) -> dict[str, Any]:
    ids = np.array([sample])
    rows = store.read_without_initial_value(ids)
    annotated = None if data is None else data.annotated(ids)[0]
    present = None if data is None else data.present(ids)
    expected = expected_there.expected(rows.ranked_by(), ids)[0]
    scores = store.scores_without_initial_value(rows, ids)[0]
    # Annotated ones first, then by falling score.
    later = np.ones(len(scores), bool) if annotated is None else ~annotated
    order = np.lexsort((np.arange(len(scores)), -scores.astype(np.float32), later))[:count]
    index, start = None if data is None else data.index, store.initial_values
    return {
        "id": sample,
        "name": name_of(sample, index),
        "shard": sample // store.spec.rows_per_shard,
        "snapshot": store.snapshot.id,
        "visited": int(rows["last_epoch"][0]),
        "initial_share": 0.0 if start is None else float(start.remaining(rows["sample_visits"])[0]),
        "tracked": sample in store.spec.history_samples,
        "classes": [
            {
                "class": int(number),
                "name": class_name(int(number), index),
                "score": float(scores[number]),
                "annotated": None if annotated is None else bool(annotated[number]),
                "present": None if present is None else bool(present[0, number]),
                "expected": bool(expected[number]),
                "peak": _peak(rows, int(number)),
            }
            for number in order
        ],
        "history": {
            epoch: _seen_after(store, then, ids, epoch)[order].tolist()
            for epoch, then in store.history(sample).items()
        },
    }


def _seen_after(store: HeatmapStore, rows: Rows, ids: NDArray[np.int64], epoch: int) -> NDArray[np.float32]:
    """Return the scores of a sample at the end of an epoch without initial values: one visit per epoch."""
    visits = np.array([min(epoch + 1, 255)], np.uint8)
    return np.asarray(store.scores_without_initial_value(rows.replace(sample_visits=visits), ids)[0])


def _peak(rows: Rows, number: int) -> float | None:
    """Return the largest value of a class's heatmap; None if it is not kept."""
    from bigscl.evaluation.sample_plots import heatmap_of

    heatmap = heatmap_of(rows, number)
    return None if heatmap is None else float(heatmap.max())


def _sample_text(facts: dict[str, Any]) -> str:
    when = "never visited" if facts["visited"] < 0 else f"last visited in epoch {facts['visited'] + 1}"
    epochs = list(facts["history"])[-MAX_EPOCHS_SHOWN:]
    rows = []
    for row, shown in enumerate(facts["classes"]):
        words = [word for word in ("annotated", "expected") if shown[word]]
        words += ["present, not annotated"] if shown["present"] and not shown["annotated"] else []
        peak = "-" if shown["peak"] is None else f"{shown['peak']:.3f}"
        moved = [f"{facts['history'][epoch][row]:.2f}" for epoch in epochs]
        rows.append([shown["name"], f"{shown['score']:.3f}", peak, ", ".join(words), *moved])
    heads = ["class", "score", "peak", "", *(f"e{int(epoch) + 1}" for epoch in epochs)]
    title = f"{facts['name']}: id {facts['id']}, {when} (snapshot {facts['snapshot']})"
    tail = "\n  on the right: scores after each epoch" if epochs else ""
    note = few_visits_note(facts["initial_share"])
    return "\n".join([title, *note, table(heads, rows)]) + tail


# Distributions


def _histograms(store: HeatmapStore) -> dict[str, list[int]]:
    """Return histograms of the values of all visited samples, in ten bins from 0 to 1."""
    written = [shard for shard, slot in enumerate(store.snapshot.slots) if slot >= 0]
    counts: dict[str, NDArray[np.int64]] = {}
    for _, histograms in pass_over("reading", written, partial(_histograms_of_shard, store), [store]):
        for name, histogram in histograms.items():
            counts[name] = counts.get(name, 0) + histogram
    return {name: histogram.tolist() for name, histogram in counts.items() if histogram.any()}


def _histograms_of_shard(store: HeatmapStore, shard: int) -> dict[str, NDArray[np.int64]]:
    rows = store.load_shard(shard)
    seen = rows["last_epoch"] >= 0
    seen[store.spec.shard_sizes[shard] :] = False
    arrays = {"scores": rows.scores, "heatmaps": rows.heatmaps}
    return {
        name: histogram(values if seen.all() else values[seen])
        for name, values in arrays.items()
        if values is not None
    }


def histogram(values: Array) -> NDArray[np.int64]:
    """Return `np.histogram` of float16 values in 0 to 1, computed from their bits: 46 times as fast."""
    edges = np.linspace(0, 1, BINS + 1, dtype=np.float16).view(np.uint16)
    bits = values.reshape(-1).view(np.uint16)
    at_least = [np.count_nonzero(bits >= edge) for edge in edges[1:-1]]
    return -np.diff([bits.size, *at_least, 0])


def _histogram_text(facts: dict[str, Any]) -> str:
    labels = [f"{low / BINS:.1f} - {(low + 1) / BINS:.1f}" for low in range(BINS)]
    parts = [f"{facts['url']}: values of visited samples at snapshot {facts['snapshot']}"]
    for name, counts in facts["histograms"].items():
        parts.append(f"{name}\n{histogram_text(labels, counts)}")
    return "\n".join(parts if facts["histograms"] else [*parts, "  no sample has been visited yet"])
