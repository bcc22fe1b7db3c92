"""Check every byte of a store."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from bigscl.common.command_line import AsJson
from bigscl.common.digests import METRICS, PROGRESS, fault_of, folder_faults, read_array, read_sealed
from bigscl.common.files import BadFile as BadInput
from bigscl.common.files import find_folder
from bigscl.config import ConfigError
from bigscl.memory.score_history import FOLDER, REMEDY, WHAT
from bigscl.memory.snapshot_state import SnapshotState
from bigscl.store import (
    PASS_THREADS,
    Annotations,
    Answered,
    BadFile,
    ChunkCorrupt,
    HeatmapStore,
    IndexMismatch,
    SnapshotLog,
    StoreError,
    Version,
    history_faults,
    stored_bytes,
    verify,
)
from bigscl.tools.shared.open_store import (
    AtSnapshot,
    Data,
    DataFlags,
    StorageFlags,
    Store,
    open_store,
    run_folder,
)
from bigscl.tools.shared.shard_passes import pass_over
from bigscl.tools.shared.terminal import plural, print_result, size

MAX_LINES = 20


@dataclass(frozen=True, slots=True)
class Finding:
    snapshot: int | None
    where: str
    reason: str
    samples: tuple[int, ...] = ()

    def __str__(self) -> str:
        at = "" if self.snapshot is None else f"snapshot {self.snapshot}, "
        who = f" ({plural(len(self.samples), 'sample')} from {self.samples[0]} on)" if self.samples else ""
        return f"{at}{self.where}{who}: {self.reason}"


def command(
    store: Store,
    snapshot: AtSnapshot = None,
    all_snapshots: Annotated[
        bool, typer.Option("--all", help="Check all snapshots; what they share is read once.")
    ] = False,
    *,
    source: DataFlags,
    threads: Annotated[
        int, typer.Option(min=1, max=1024, help="Number of shards read at the same time.")
    ] = PASS_THREADS,
    storage: StorageFlags,
    as_json: AsJson = False,
) -> None:
    """Check checksums, ranges, visit stamps, class ids, history and index. Exit code 1 if there are problems.

    In the folder of a run also its config, answers, checkpoints, best weights and kept scores.

    Example: bigscl verify runs/quickstart --all
    """
    opened = open_store(store, snapshot, storage)
    findings: list[Finding] = []
    data = None
    try:
        data = source.find(store, opened.spec)
    except IndexMismatch as error:
        findings.append(Finding(None, "index", str(error)))
    except (ConfigError, BadInput) as error:
        findings.append(Finding(None, "data", str(error)))
    started = time.perf_counter()
    numbers = SnapshotLog(opened.backend).ids() if all_snapshots else [opened.snapshot.id]
    checked = _Checked()
    for at_snapshot in _stores(store, numbers, storage, data, findings):
        findings += _check_attributes(at_snapshot)
        findings += _check_shards(at_snapshot, threads, checked)
    findings += [Finding(None, *fault) for fault in history_faults(opened.backend, opened.spec)]
    findings += [Finding(None, "run", fault) for fault in _run_faults(run_folder(store))]
    seconds = time.perf_counter() - started
    facts = {
        "url": opened.backend.url,
        "snapshots": numbers,
        "versions": len(checked.versions),
        "bytes": checked.num_bytes,
        "seconds": seconds,
        "checksums": opened.group.checksum,
        "index": data is not None,
        "problems": [asdict(finding) for finding in findings],
    }
    print_result(facts, _text(facts, findings), as_json)
    if findings:
        raise typer.Exit(1)


def _run_faults(folder: Path | None) -> Iterator[str]:
    """Yield what is wrong with the files of a run that a resume, an evaluation or a review reads."""
    if folder is None:
        return
    copy = "Restore it from a copy."
    for checkpoint in sorted(folder.glob("checkpoints/step-*")):
        yield from folder_faults(checkpoint, PROGRESS, copy)
    if (best := find_folder(folder / "best")).exists():
        yield from folder_faults(best, METRICS, copy)
    for file in sorted(folder.glob(f"{FOLDER}/*/epoch-*.npy")):
        yield from fault_of(partial(read_array, file, WHAT, REMEDY))
    if (identity := folder / "run.json").exists():
        yield from fault_of(partial(read_sealed, identity, "The next start of the run writes it again."))


class _Checked:
    """The versions that have been read: snapshots share the shards that did not change between them."""

    def __init__(self) -> None:
        self.versions: set[tuple[Version, tuple[tuple[str, int], ...]]] = set()
        self.num_bytes = 0

    def new(self, store: HeatmapStore) -> list[int]:
        """Return the shards whose version at this snapshot has not been read yet, and mark them as read."""
        shards = []
        for shard, slot in enumerate(store.snapshot.slots):
            digests = tuple(sorted(store.snapshot.digests_of(shard).items()))
            version = (store.snapshot.group, slot, shard), digests
            if slot >= 0 and version not in self.versions:
                self.versions.add(version)
                shards.append(shard)
        self.num_bytes += len(shards) * stored_bytes(store.spec, store.group)
        return shards


def _stores(
    store: str, numbers: Sequence[int], storage: StorageFlags, data: Data | None, findings: list[Finding]
) -> Iterator[HeatmapStore]:
    """Yield the store at each snapshot, oldest first; a snapshot that cannot be opened is a finding."""
    for number in numbers:
        try:
            opened = open_store(store, number, storage, data)
            Answered.at(opened.snapshot)
            yield opened
        except (BadFile, ChunkCorrupt) as error:
            findings.append(Finding(number, "snapshot file", str(error)))


def _check_attributes(store: HeatmapStore) -> Iterator[Finding]:
    """Check what the memory has written into a snapshot, as a cut for each class."""
    try:
        SnapshotState.of(store.snapshot, store.spec.num_classes)
    except StoreError as error:
        yield Finding(store.snapshot.id, "attributes", str(error))


def _check_shards(store: HeatmapStore, threads: int, checked: _Checked) -> Iterator[Finding]:
    number = store.snapshot.id
    title, work = f"verifying snapshot {number}", partial(_check_shard, store)
    for _, findings in pass_over(title, checked.new(store), work, threads=threads):
        yield from findings
    if not SnapshotLog(store.backend).exists(number):
        reason = "was dropped while it was read; problems may belong to a newer version. Run it again."
        yield Finding(number, "snapshot", reason)


def _check_shard(store: HeatmapStore, shard: int) -> list[Finding]:
    findings = [
        Finding(store.snapshot.id, f"shard {shard}, {problem.array}", problem.reason, problem.samples)
        for _, problems in verify(store, [shard])
        for problem in problems
    ]
    if store.annotations is not None and store.group.layout == "topk" and not findings:
        findings += _lost_positives(store, store.annotations, shard)
    return findings


def _lost_positives(store: HeatmapStore, annotations: Annotations, shard: int) -> Iterator[Finding]:
    """Yield positives, by labels and answers, whose heatmaps are not kept: as in a store of other data."""
    slot = store.snapshot.slots[shard]
    classes = store.arrays.read(shard, slot, ("classes",))["classes"]
    positions, given = np.nonzero(annotations.of_shard(shard))
    lost = ~(classes[positions] == given[:, None]).any(axis=1)
    if lost.any():
        ids = np.unique(shard * store.spec.rows_per_shard + positions[lost])
        reason = "given labels are not among the kept classes"
        yield Finding(store.snapshot.id, f"shard {shard}, classes", reason, tuple(ids.tolist()))


def _text(facts: dict[str, Any], findings: list[Finding]) -> str:
    rate = size(facts["bytes"] / max(facts["seconds"], 1e-9))
    what = f"{plural(facts['versions'], 'shard')} of {plural(len(facts['snapshots']), 'snapshot')}"
    lines = [str(finding) for finding in findings[:MAX_LINES]]
    if len(findings) > MAX_LINES:
        lines.append(f"... and {len(findings) - MAX_LINES} more; --json lists them all")
    lines.append(
        f"{facts['url']}: {plural(len(findings), 'problem') if findings else 'all is well'}; read {what}, "
        f"{size(facts['bytes'])} at {rate}/s"
    )
    if not facts["checksums"]:
        lines.append("  created without checksums: damage that leaves values in range is not noticed")
    if not facts["index"]:
        lines.append("  not compared with its data. Add --shards to do so.")
    return "\n".join(lines)
