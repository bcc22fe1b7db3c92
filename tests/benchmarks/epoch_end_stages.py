"""The stages of the end of an epoch, before and after, measured on one rank: see `epoch_end`."""

import json
import math
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from bigscl.evaluation.metrics import average_precision, best_classes, top_k_accuracy
from bigscl.memory.epoch_io import divide_shards
from bigscl.memory.score_history import ScoreLog, in_order_of_ids
from bigscl.memory.snapshot_state import SnapshotState
from bigscl.models.spatial import build_model
from bigscl.selection.ranking import THREADS, select
from bigscl.selection.thresholds import expected_counts
from bigscl.store import Annotations, GroupSpec, HeatmapStore, Ragged, SingleProcess
from bigscl.store.snapshots import Written, report
from bigscl.training.checkpoint_folder import write_state, write_tensors
from bigscl.training.run_progress import EpochProgress
from tests.benchmarks.gathered_selection import Contenders, merge
from tests.benchmarks.selection import CHUNK, Scores

SHARDS_ON_DISK = 8
READ_THREADS = 4
"""PASS_THREADS of a machine with as many cores."""
TRACKED = 64
LOGGED_CLASSES = 10
MOST_LOGGED = 2_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A run, and the machine that stands for all of its machines."""

    images: int
    classes: int
    ranks: int
    positives_per_image: float
    val_images: int
    backbone: str
    heatmap_size: int
    cores: int
    bytes_per_second: float
    most_scores: int
    """Scores that this process ranks at most."""

    @property
    def shards(self) -> int:
        """Shards of all ranks."""
        return math.ceil(self.images / CHUNK)

    @property
    def shards_of_rank(self) -> int:
        """Shards of the rank that has most."""
        return math.ceil(self.shards / self.ranks)

    @property
    def ranked_shards(self) -> int:
        """Shards that this process ranks."""
        return min(self.shards_of_rank, max(1, self.most_scores // (CHUNK * self.classes)))

    @property
    def share(self) -> float:
        """The share of a rank's shards that this process ranks."""
        return self.ranked_shards / self.shards_of_rank

    def expected(self) -> np.ndarray:
        """Expected positives of each class, for the share of each rank's samples."""
        counts = np.full(self.classes, round(self.share * self.images / self.classes))
        return expected_counts(counts, self.positives_per_image)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Cost of a stage on the rank that takes longest."""

    cpu: float
    threads: int = 1
    received: int = 0
    """Bytes that rank 0 receives or, in sums, sends and receives."""
    is_scaled: bool = False

    def stall(self, run: Size) -> float:
        """Seconds that all ranks wait."""
        return self.cpu / min(self.threads, run.cores) + self.received / run.bytes_per_second


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A stage of the end of an epoch."""

    name: str
    before: Cost
    after: Cost


class Others(SingleProcess):
    """Rank 0's group: the other ranks send what `other` makes of rank 0's payload, outside of the clock."""

    def __init__(self, world_size: int, other: Callable[[bytes, int], bytes] = lambda payload, rank: payload):
        self.world_size, self._other = world_size, other
        self.seconds, self.received = 0.0, 0
        self.moments: list[float] = []

    def gather(self, payload: bytes) -> list[bytes]:
        """Return everyone's payload."""
        began = time.process_time()
        payloads = [payload, *(self._other(payload, rank) for rank in range(1, self.world_size))]
        self.received += sum(map(len, payloads[1:]))
        self.seconds += time.process_time() - began
        return payloads

    def sum_counts(self, counts: np.ndarray) -> np.ndarray:
        """Return the sum: the other ranks have the same counts."""
        self.moments.append(time.process_time())
        # In a ring each rank sends and receives the table about twice, and adds to it once.
        self.received += 2 * counts.nbytes
        return counts + (self.world_size - 1) * counts


class Clock:
    """CPU seconds of this process, its threads included, without those of a transport."""

    def __init__(self, transport: Others | None = None) -> None:
        self._transport = transport
        self._began = self._now()

    def _now(self) -> float:
        return time.process_time() - (0 if self._transport is None else self._transport.seconds)

    def seconds(self) -> float:
        """CPU seconds since the start."""
        return self._now() - self._began


# Stages


def rank_and_merge(run: Size) -> list[Stage]:
    """Rank one rank's scores, and merge those of all ranks."""
    ranking, merging = before_merge(run)
    floor, passing, cuts, received = after_merge(run)
    scaled = run.share < 1

    def cost(cpu: float, threads: int = 1, received: int = 0) -> Cost:
        return Cost(cpu=cpu, threads=threads, received=received, is_scaled=scaled)

    return [
        Stage(
            name="selection: a rank's scores",
            before=cost(ranking / run.share),
            # The floor is found once, whatever the number of shards.
            after=cost(floor + passing / run.share, THREADS),
        ),
        Stage(
            name="selection: all ranks",
            before=cost(merging.cpu / run.share, 1, round(merging.received / run.share)),
            after=cost(cuts / run.share, 1, received),
        ),
    ]


def before_merge(run: Size) -> tuple[float, Cost]:
    """Return the CPU seconds to rank a rank's scores, and what the merge on rank 0 costs."""
    contenders = Contenders(run.expected())
    ranking = 0.0
    for ids, scores in Scores(run.ranked_shards * CHUNK, run.classes, "any"):
        clock = Clock()
        contenders.add(ids, scores)
        ranking += clock.seconds()
    clock = Clock()
    contenders.compact()
    ranking += clock.seconds()
    step = run.ranked_shards * CHUNK

    def of_rank(payload: bytes, rank: int) -> bytes:
        # Ids are inverted in keys: a lower key has a higher id.
        return (np.frombuffer(payload, np.uint64) - np.uint64(rank * step)).tobytes()

    others = Others(run.ranks, of_rank)
    clock = Clock(others)
    assert merge(contenders, others, 2**26) is not None
    return ranking, Cost(cpu=clock.seconds(), received=others.received)


def after_merge(run: Size) -> tuple[float, float, float, int]:
    """Return CPU seconds for the floor, the pass and the cuts, and the bytes through rank 0."""
    drawing = [0.0]

    def chunks():
        scores = iter(Scores(run.ranked_shards * CHUNK, run.classes, "any"))
        while True:
            began = time.thread_time()
            chunk = next(scores, None)
            drawing[0] += time.thread_time() - began
            if chunk is None:
                return
            drawn.append(drawing[0])
            yield chunk

    drawn: list[float] = []
    others = Others(run.ranks)
    began = time.process_time()
    select(chunks(), run.expected(), others)
    ended = time.process_time()
    # Sums: of the first chunks, then of the keys, once or more.
    first, second = others.moments[:2]
    sampled = min(len(drawn), math.ceil(2**24 / (CHUNK * run.classes)))
    floor = first - began - drawn[sampled - 1]
    return floor, second - first - (drawn[-1] - drawn[sampled - 1]), ended - second, others.received


def store_stages(run: Size, folder: Path) -> list[Stage]:
    """Read scores, keep the highest, commit, and record the history, with a few shards on disk."""
    on_disk = min(SHARDS_ON_DISK, run.shards_of_rank)
    annotations = one_label_each(run)
    tracked = np.linspace(0, min(run.images, on_disk * CHUNK) - 1, TRACKED).astype(int)
    group = GroupSpec(layout="topk", top=min(LOGGED_CLASSES, run.classes))
    HeatmapStore.create(
        folder / "store",
        annotations,
        heatmap_size=run.heatmap_size,
        group=group,
        history_samples=set(tracked.tolist()),
    )
    others = Others(run.ranks)
    with HeatmapStore.open(folder / "store", annotations=annotations, mode="w", transport=others) as store:
        scores = Scores(on_disk * CHUNK, run.classes, "any")
        for shard, (ids, values) in enumerate(scores):
            rows = store.load_shard(shard)
            filled = rows.scores.copy()
            filled[: len(ids)] = values
            store.save_shard(shard, rows.replace(scores=filled))
        factor = run.shards_of_rank / on_disk
        log = ScoreLog(folder, annotations, SingleProcess(), LOGGED_CLASSES)
        clock = Clock()
        for _ in store.ranked_by_shard(range(on_disk)):
            pass
        reading = factor * clock.seconds()
        clock = Clock()
        for _ in store.ranked_by_shard(range(on_disk), log.note):
            pass
        noting = max(0.0, factor * clock.seconds() - reading)
        commit = commit_cost(run, store, others, annotations)
        clock = Clock()
        store.record_history(0)
        recorded = clock.seconds() * min(TRACKED, run.shards) / on_disk
    threads, scaled = {"threads": READ_THREADS}, {"is_scaled": factor > 1}
    return [
        Stage(
            name="read scores",
            before=Cost(cpu=reading, **scaled),
            after=Cost(cpu=reading, **threads, **scaled),
        ),
        Stage(
            name="score log: a rank's highest",
            before=Cost(cpu=noting, **scaled),
            after=Cost(cpu=noting, **threads, **scaled),
        ),
        score_log_stage(run, folder, annotations),
        same("commit", commit),
        Stage(
            name="history of 64 images",
            before=Cost(cpu=recorded, is_scaled=True),
            after=Cost(cpu=recorded, **threads, is_scaled=True),
        ),
    ]


def one_label_each(run: Size) -> Annotations:
    """Annotations of a dataset with one label for each image."""
    sizes = np.full(run.shards, CHUNK)
    sizes[-1] = run.images - (run.shards - 1) * CHUNK
    rows = np.minimum(np.arange(run.shards * CHUNK + 1), run.images)
    labels = np.random.default_rng(0).integers(0, run.classes, run.images)
    return Annotations(
        fingerprint="f" * 64,
        num_classes=run.classes,
        rows_per_shard=CHUNK,
        shard_sizes=sizes,
        given=Ragged(rows, labels),
    )


def same(name: str, cost: Cost) -> Stage:
    """Return a stage that has not changed."""
    return Stage(name=name, before=cost, after=cost)


def shards_of(run: Size, rank: int) -> list[int]:
    """The shards of a rank; rank 0 has those on disk."""
    return list(range(rank * run.shards_of_rank, min(run.shards, (rank + 1) * run.shards_of_rank)))


def commit_cost(run: Size, store: HeatmapStore, others: Others, annotations: Annotations) -> Cost:
    """Divide the shards, merge the reports of all ranks, and publish the snapshot."""
    names = ("scores", "heatmaps", "classes", "cell_visits", "samples")

    def of_rank(payload: bytes, rank: int) -> bytes:
        digests = dict.fromkeys(names, 2**31 + rank)
        return report({shard: Written(0, digests) for shard in shards_of(run, rank)}, None)

    others._other, others.received = of_rank, 0
    thresholds = select(
        [(np.arange(2), np.eye(2, run.classes, dtype=np.float16))], run.expected(), SingleProcess()
    )
    parts = [json.dumps(shards_of(run, rank)).encode() for rank in range(run.ranks)]
    clock = Clock(others)
    json.dumps(divide_shards([set(json.loads(part)) for part in parts], run.shards))
    state = SnapshotState(selection=thresholds, epoch=0, next_epoch=1, skipped=[], momentum=0.8)
    store.commit(epoch=0, step=1, attributes=state.attributes())
    return Cost(cpu=clock.seconds(), received=others.received + sum(map(len, parts)))


def score_log_stage(run: Size, folder: Path, annotations: Annotations) -> Stage:
    """Gather the highest scores of all images on rank 0, order them by image, and write the file."""
    images = min(run.images, MOST_LOGGED)
    per_rank = math.ceil(images / run.ranks)

    def of_rank(payload: bytes, rank: int) -> bytes:
        if len(payload) == 8 * per_rank:
            return (np.frombuffer(payload, np.int64) + rank * per_rank).tobytes()
        return payload

    others = Others(run.ranks, of_rank)
    log = ScoreLog(folder, annotations, others, LOGGED_CLASSES)
    for ids, scores in Scores(min(per_rank, 4 * CHUNK), run.classes, "any"):
        log.note(ids, scores)
    # The pairs of the first images stand for the others: only their bytes count here.
    (pairs, *_) = [pairs for _, pairs in log._parts]
    log._parts = [(np.arange(per_rank), np.resize(pairs, (per_rank, pairs.shape[1])))]
    clock = Clock(others)
    log.write(0)
    written = clock.seconds()
    # As before: sorted with one value after the other.
    ids = np.concatenate([np.arange(per_rank) + rank * per_rank for rank in range(run.ranks)])
    all_pairs = np.resize(pairs, (len(ids), pairs.shape[1]))
    seconds = []
    for order in (lambda ids, pairs: pairs[np.argsort(ids)], in_order_of_ids):
        clock = Clock()
        order(ids, all_pairs)
        seconds.append(clock.seconds())
    factor = run.images / images

    def cost(cpu: float) -> Cost:
        return Cost(cpu=factor * cpu, received=round(factor * others.received), is_scaled=factor > 1)

    name = "score log: write"
    return Stage(name=name, before=cost(written + seconds[0] - seconds[1]), after=cost(written))


def metrics_stage(run: Size) -> Stage:
    """Compute mAP and top-1 of the validation images twice: for the plain and for the map pooling."""
    # The classes of one rank, or a few if these are many: average precision is a figure of a class.
    few = min(run.classes, max(1, math.ceil(run.classes / run.ranks)), max(1, 2**25 // run.val_images))
    whole = min(run.classes, max(1, 2**26 // run.val_images))
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(run.val_images, whole, generator=generator)
    labels = torch.zeros(run.val_images, whole, dtype=torch.int8)
    labels[torch.arange(run.val_images), torch.arange(run.val_images) % whole] = 1
    seconds = {}
    for classes in {few, whole}:
        clock = Clock()
        for _ in range(2):
            average_precision(logits[:, :classes], labels[:, :classes])
        seconds[classes] = clock.seconds()
    clock = Clock()
    for _ in range(2):
        top_k_accuracy(best_classes(logits, 1), labels, 1)
    top1 = clock.seconds() * run.classes / whole
    sent = 2 * 4 * run.val_images * run.classes
    share = math.ceil(run.classes / run.ranks)
    all_classes = seconds[whole] * run.classes / whole + top1
    own_classes = seconds[few] * share / few + top1 / run.ranks
    return Stage(
        name="validation: metrics",
        before=Cost(cpu=all_classes, threads=run.cores, received=sent, is_scaled=whole < run.classes),
        after=Cost(cpu=own_classes, threads=run.cores, received=sent // run.ranks, is_scaled=few < share),
    )


def checkpoint_stage(run: Size) -> Stage:
    """Copy what a checkpoint has: weights, momentum of the optimizer, and the visited rows of all ranks."""
    others = Others(run.ranks)
    progress = EpochProgress(run.shards * CHUNK, others)
    weights = build_model(run.backbone, run.classes).network.state_dict()
    clock = Clock(others)
    progress.files()
    write_tensors(weights)
    write_state({"momentum_buffer": list(weights.values())})
    return same("checkpoint: copies", Cost(cpu=clock.seconds(), received=others.received))


def measure(run: Size) -> list[Stage]:
    """Return the costs of all stages of one size."""
    with tempfile.TemporaryDirectory() as folder:
        return [
            *store_stages(run, Path(folder)),
            *rank_and_merge(run),
            metrics_stage(run),
            checkpoint_stage(run),
        ]
