"""Compare two snapshots, two stores of the same data, or a store with a file of labels."""

from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

from bigscl.common.command_line import AsJson
from bigscl.data.labels.label_files import SUFFIXES, read_labels
from bigscl.store import Array, HeatmapStore, IndexMismatch, Rows
from bigscl.tools.shared.find_samples import class_name, name_of
from bigscl.tools.shared.open_store import Data, DataFlags, StorageFlags, open_store, with_snapshot
from bigscl.tools.shared.shard_passes import (
    SnapshotThresholds,
    count_by_class,
    expected_at,
    pass_over,
    to_float32,
)
from bigscl.tools.shared.terminal import print_result, table

Place = Annotated[str, typer.Argument(help="A store or the folder of a run; STORE@ID is snapshot ID of it.")]
PlaceOrLabels = Annotated[
    str, typer.Argument(help="Another one, or a file of labels, in the formats of data.labels_file.")
]

Both = tuple[SnapshotThresholds, SnapshotThresholds]
"""The expected positives of A and of B."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardChanges:
    """The differences in one shard: by sample, by array and by class."""

    ids: NDArray[np.int64]
    differs: dict[str, NDArray[np.bool_]]
    """Which rows differ, by array."""
    change: NDArray[np.float32]
    """Largest change of a score in each row."""
    total_change: float
    only_a: NDArray[np.int64]
    """Number of expected positives of A that are not expected by B, by class."""
    only_b: NDArray[np.int64]
    both: NDArray[np.int64]


def command(
    a: Place,
    b: PlaceOrLabels,
    count: Annotated[int, typer.Option(min=0, help="Number of changed samples and classes to list.")] = 10,
    *,
    source: DataFlags,
    storage: StorageFlags,
    as_json: AsJson = False,
) -> None:
    """Compare rows, scores and expected positives. Exit code 0 if nothing differs, 1 otherwise.

    With a file of labels, such as those of MultiLabel-ImageNet: how many of the mined labels does it
    confirm, and how many of its labels were mined, in total and by class? Given labels do not count.

    Example: bigscl diff runs/quickstart@3 runs/quickstart
    """
    if Path(b).suffix in (*SUFFIXES, ".json"):
        facts = _agreement(a, Path(b), storage, source, count)
        print_result(facts, _agreement_text(facts), as_json)
        raise typer.Exit(1 if facts["only_a"] or facts["only_b"] else 0)
    one, other, data = _open_both(a, b, storage, source)
    expected = expected_at(one), expected_at(other)
    results = _compare(one, other, expected)
    facts = _facts(one, other, results, data, count)
    for side, thresholds in zip("ab", expected, strict=True):
        facts[side]["selection"] = thresholds.facts()
    print_result(facts, _text(facts), as_json)
    if facts["rows_differing"] or facts["expected"]["only_a"] or facts["expected"]["only_b"]:
        raise typer.Exit(1)


def _open_both(
    a: str, b: str, storage: StorageFlags, source: DataFlags
) -> tuple[HeatmapStore, HeatmapStore, Data | None]:
    (url_a, at_a), (url_b, at_b) = with_snapshot(a), with_snapshot(b)
    one, other = open_store(url_a, at_a, storage), open_store(url_b, at_b, storage)
    if one.spec.fingerprint != other.spec.fingerprint:
        raise IndexMismatch(
            f"{one.backend.url} was created for data {one.spec.fingerprint[:12]}, {other.backend.url} for "
            f"{other.spec.fingerprint[:12]}: their rows "
            f"are of different images. Compare stores of the same dataset."
        )
    data = source.find(url_a, one.spec)
    if data is not None:
        one = open_store(url_a, one.snapshot.id, storage, data)
        other = open_store(url_b, other.snapshot.id, storage, data)
    return one, other, data


def _compare(one: HeatmapStore, other: HeatmapStore, expected: Both) -> list[ShardChanges]:
    """Compare row by row the shards that are not the same version on both sides."""
    same_store = one.backend.url == other.backend.url and one.snapshot.group == other.snapshot.group
    same = [
        slot == its and (same_store or slot == -1)
        for slot, its in zip(one.snapshot.slots, other.snapshot.slots, strict=True)
    ]
    # With different cuts, the same rows give different expected positives.
    same_cuts = expected[0].same_as(expected[1])
    wanted = [shard for shard in range(one.spec.num_shards) if not (same_cuts and same[shard])]
    work = partial(_compare_shard, one, other, expected)
    return [changes for _, changes in pass_over("comparing", wanted, work, [one, other])]


def _compare_shard(one: HeatmapStore, other: HeatmapStore, expected: Both, shard: int) -> ShardChanges:
    ids = one.spec.sample_ids(shard)
    mine, its = (store.load_shard(shard).take(slice(0, len(ids))) for store in (one, other))
    change = np.abs(to_float32(mine.scores) - to_float32(its.scores))
    of_a, of_b = (
        each.expected(rows.ranked_by(), ids) for each, rows in zip(expected, (mine, its), strict=True)
    )
    return ShardChanges(
        ids=ids,
        differs=_differing(mine, its),
        change=change.max(axis=1, initial=0),
        total_change=float(change.sum(dtype=np.float64)),
        only_a=count_by_class(of_a & ~of_b),
        only_b=count_by_class(of_b & ~of_a),
        both=count_by_class(of_a & of_b),
    )


def _differing(mine: Rows, its: Rows) -> dict[str, NDArray[np.bool_]]:
    """Return which rows differ, by array; heatmaps of classes that only one side keeps are left out."""
    differs = {
        "scores": _unequal(mine.scores, its.scores),
        "last_epoch": mine["last_epoch"] != its["last_epoch"],
    }
    if mine.heatmaps is not None and its.heatmaps is not None:
        if mine.classes is not None and its.classes is not None and mine.classes.shape == its.classes.shape:
            differs["classes"] = _unequal(mine.classes, its.classes)
        differs["heatmaps"] = _heatmaps_differ(mine, its)
    return differs


def _unequal(mine: Array, its: Array) -> NDArray[np.bool_]:
    """Return which rows have different bits: numpy compares float16 39 times slower than integers."""
    bits = [np.ascontiguousarray(array).view(np.uint16) for array in (mine, its)]
    return np.asarray((bits[0] != bits[1]).any(axis=tuple(range(1, mine.ndim))))


def _heatmaps_differ(mine: Rows, its: Rows) -> NDArray[np.bool_]:
    """Return which rows have different heatmaps of a class that both sides keep."""
    assert mine.heatmaps is not None
    assert its.heatmaps is not None
    kept = [mine.kept_classes(), its.kept_classes()]
    if np.array_equal(kept[0], kept[1]):
        return _unequal(mine.heatmaps, its.heatmaps)
    differs = np.zeros(len(mine), bool)
    for column in range(kept[0].shape[1]):
        classes = kept[0][:, column]
        rows = np.flatnonzero((kept[1] == classes[:, None]).any(axis=1))
        differs[rows] |= _unequal(mine.heatmaps[rows, column], its.heatmaps_of(rows, classes[rows]))
    return differs


def _facts(
    one: HeatmapStore, other: HeatmapStore, results: list[ShardChanges], data: Data | None, count: int
) -> dict[str, Any]:
    rows: Counter[str] = Counter()
    any_row = 0
    for changes in results:
        rows.update({name: int(mask.sum()) for name, mask in changes.differs.items()})
        any_row += int(np.any(list(changes.differs.values()), axis=0).sum())
    index = None if data is None else data.index
    values = one.spec.num_samples * one.spec.num_classes
    return {
        "a": _side(one),
        "b": _side(other),
        "samples": one.spec.num_samples,
        "shards_compared": len(results),
        "rows_differing": any_row,
        "rows_differing_by_array": dict(rows),
        "largest_score_change": max(
            (float(changes.change.max(initial=0)) for changes in results), default=0.0
        ),
        "mean_score_change": sum(changes.total_change for changes in results) / max(1, values),
        "most_changed": [
            {"id": sample, "name": name_of(sample, index), "change": change}
            for sample, change in _most_changed(results, count)
        ],
        "expected": _expected(results, index, count),
    }


def _side(store: HeatmapStore) -> dict[str, Any]:
    at = store.snapshot
    return {"url": store.backend.url, "snapshot": at.id, "epoch": at.epoch, "layout": store.group.layout}


def _most_changed(results: list[ShardChanges], count: int) -> list[tuple[int, float]]:
    if not results:
        return []
    ids = np.concatenate([changes.ids for changes in results])
    change = np.concatenate([changes.change for changes in results])
    order = np.lexsort((ids, -change))[:count]
    return [(int(ids[n]), float(change[n])) for n in order if change[n] > 0]


def _expected(results: list[ShardChanges], index: Any, count: int) -> dict[str, Any]:
    """Return how the expected positives of the compared shards differ, in total and by class."""
    if not results:
        return {"only_a": 0, "only_b": 0, "both": 0, "classes": []}
    totals = {
        name: sum(getattr(changes, name) for changes in results) for name in ("only_a", "only_b", "both")
    }
    return _totals(totals, index, count)


def _totals(totals: dict[str, NDArray[np.int64]], index: Any, count: int) -> dict[str, Any]:
    """Return the sums of counts by class, and the classes that differ most."""
    moved = totals["only_a"] + totals["only_b"]
    order = [int(number) for number in np.argsort(-moved, kind="stable")[:count] if moved[number]]
    return {
        **{name: int(values.sum()) for name, values in totals.items()},
        "classes": [
            {
                "class": number,
                "name": class_name(number, index),
                **{name: int(values[number]) for name, values in totals.items()},
            }
            for number in order
        ],
    }


def _text(facts: dict[str, Any]) -> str:
    lines = [
        f"{side.upper()}  {facts[side]['url']}: snapshot {facts[side]['snapshot']}, "
        f"epoch {facts[side]['epoch'] + 1}, {facts[side]['layout']}"
        for side in ("a", "b")
    ]
    arrays = ", ".join(f"{name} {rows:,}" for name, rows in facts["rows_differing_by_array"].items() if rows)
    lines.append(
        f"rows that differ: {facts['rows_differing']:,} of {facts['samples']:,}"
        f"{f' ({arrays})' if arrays else ''}"
    )
    lines.append(
        f"scores: largest change {facts['largest_score_change']:.3f}, mean {facts['mean_score_change']:.4f}"
    )
    if facts["most_changed"]:
        rows = [[sample["id"], sample["name"], f"{sample['change']:.3f}"] for sample in facts["most_changed"]]
        lines.append(table(("id", "most changed", "by"), rows))
    expected = facts["expected"]
    lines.append(
        f"expected positives in the shards that differ: {expected['both']:,} of both, "
        f"{expected['only_a']:,} of A only, {expected['only_b']:,} of B only"
    )
    lines += [
        f"  {side.upper()}: {facts[side]['selection']['note']}"
        for side in ("a", "b")
        if facts[side]["selection"]["recomputed"]
    ]
    return "\n".join([*lines, *_class_table(expected["classes"])])


# A file of labels


def _agreement(
    store: str, path: Path, storage: StorageFlags, source: DataFlags, count: int
) -> dict[str, Any]:
    """Count the pairs of image and class that are mined, in the file, or both, and are not annotated."""
    url, snapshot = with_snapshot(store)
    mined, data = source.open("diff", url, snapshot, storage)
    labels, thresholds = read_labels(path, data.index), expected_at(mined)

    def compare(shard: int) -> NDArray[np.int64]:
        """Return `[3,L]`: how many pairs of each class are both, A's only, B's only."""
        ids = mined.spec.sample_ids(shard)
        not_given = ~data.annotated(ids)
        ours = thresholds.expected(mined.load_shard(shard).take(slice(0, len(ids))).ranked_by(), ids)
        theirs = np.zeros_like(ours)
        for row, sample_id in enumerate(ids.tolist()):
            theirs[row, labels.positives.get(sample_id, [])] = True
            not_given[row] &= sample_id in labels.positives
        pairs = np.stack([ours & theirs, ours & ~theirs, theirs & ~ours]) & not_given
        return np.stack([count_by_class(each) for each in pairs])

    shards = range(mined.spec.num_shards)
    counts = np.sum([found for _, found in pass_over("comparing", shards, compare, [mined])], axis=0)
    totals = dict(zip(("both", "only_a", "only_b"), counts, strict=True))
    return {
        "a": _side(mined) | {"selection": thresholds.facts()},
        "labels": str(path),
        "images": len(labels.positives),
        **_totals(totals, data.index, count),
    }


def _agreement_text(facts: dict[str, Any]) -> str:
    both, only_a, only_b = (facts[name] for name in ("both", "only_a", "only_b"))
    lines = [
        f"A  {facts['a']['url']}: snapshot {facts['a']['snapshot']}, epoch {facts['a']['epoch'] + 1}",
        f"B  {facts['labels']}: labels of {facts['images']:,} images",
        f"mined labels of these images: {both + only_a:,}; B has {_share(both, both + only_a)} of them",
        f"further labels of B: {both + only_b:,}; {_share(both, both + only_b)} of them were mined",
    ]
    return "\n".join([*lines, *_class_table(facts["classes"])])


def _class_table(classes: list[dict[str, Any]]) -> list[str]:
    rows = [[row["name"], row["only_a"], row["only_b"], row["both"]] for row in classes]
    return [table(("class", "A only", "B only", "both"), rows)] if rows else []


def _share(part: int, whole: int) -> str:
    return f"{part:,} ({100 * part / whole:.0f}%)" if whole else "none"
