"""The memory of a training: look up a batch, update it with its prediction, end an epoch.

The trainer and own loops use it in the same way. It does not depend on configs of runs or on models.
"""

# Shapes: B batch, L classes, G side of the score map.

import logging
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bigscl.common.user_error import UserError
from bigscl.config import RankBy, StoreConfig
from bigscl.data.epoch_plan import Plan, training_plan
from bigscl.distributed.ranks import process_group
from bigscl.memory.epoch_io import EpochThreads, EpochVisits, announced, to_host
from bigscl.memory.lookup import (
    Boxes,
    CheckedViews,
    GivenClasses,
    Ids,
    MemoryBatch,
    SampleViews,
    as_rows,
    check_sample_views,
    sample_views_of,
    to_device,
    to_rows,
    updated_averages,
)
from bigscl.memory.open_memory import check_arguments, check_store, checked_settings, open_store
from bigscl.memory.score_history import ScoreLog
from bigscl.memory.snapshot_state import SnapshotState, find_empty, find_snapshot, is_empty
from bigscl.selection.ranking import SelectionRule, counted, selection_rule
from bigscl.selection.thresholds import FloorCounts, Thresholds, approximate_text
from bigscl.selection.trust import Canaries
from bigscl.store import (
    Annotations,
    Answered,
    Ranked,
    Rows,
    StoreError,
    Transport,
    in_order,
    label_counts,
    on_rank_zero,
    with_answers,
)

logger = logging.getLogger(__name__)

ShowWork = Callable[[str, int | None], AbstractContextManager[Callable[[int], None]]]
"""Shows the title of long work and its number of units; what it yields is called with the units done."""
Batch = TypeVar("Batch")


@contextmanager
def show_nothing(title: str, total: int | None) -> Iterator[Callable[[int], None]]:
    yield lambda done: None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MemoryStart:
    """The point of a run from which its memory starts."""

    run: str
    """The id of the run."""
    snapshot: int
    """The snapshot of its checkpoint; 0 for a new run."""
    epoch: int
    answered: Answered
    """Answers of people that the annotations contain; older rows are changed when the memory starts."""


class Memory(AbstractContextManager["Memory"]):
    """Scores and heatmaps of every sample, and the expected positives, on one rank.

    In each epoch `lookup` returns the stored values of a batch, `update` takes its prediction, `end_epoch`
    selects and commits. A sample is updated at most once per epoch; one that is not (never visited, looked up
    only, skipped, or lost with an exception) keeps its row. Each shard's samples are updated by one rank in
    an epoch, unless a plan divides them. All ranks make these calls together: the constructor, `commit`,
    `end_epoch`, `load_state_dict`, `reset` and `drop_snapshots`.
    """

    _canaries: Canaries | None = None

    def __init__(
        self,
        annotations: Annotations,
        settings: StoreConfig,
        *,
        heatmap_size: int,
        positives_per_image: float | None = None,
        selection_start: int = 1,
        rank_by: RankBy = "score",
        k_per_class: bool | NDArray[np.float64] = False,
        pseudo_positive_share: float | None = None,
        device: torch.device | str = "cpu",
        ranks: Transport | None = None,
    ) -> None:
        """Open the store that the settings name, or create it for these annotations.

        `heatmap_size` is W, twice the side of the network's score maps. `positives_per_image` is K: expected
        positives are selected at the end of epochs, for epochs from `selection_start` on; without K never.
        Images are ranked by their scores, or with `rank_by` spatial by scores and heatmaps together. With
        `k_per_class` each class has a K of its own, given or estimated at the end of epochs; their mean is K.
        `pseudo_positive_share` of the expected positives count as positives in the base loss enp.
        The ranks are those of torch.distributed unless given.

        For a store with trained rows, `load_state_dict` or `reset` must say where to start. Each commit drops
        the snapshots that no state dict needs, see `state_dict`.
        """
        check_arguments(annotations, settings, positives_per_image)
        rule = selection_rule(
            positives_per_image,
            start_epoch=selection_start,
            rank_by=rank_by,
            k_per_class=k_per_class,
            pseudo_positive_share=pseudo_positive_share,
        )
        settings = checked_settings(settings, drops_snapshots=True)
        ranks = ranks or process_group()
        self._open(annotations, settings, rule, heatmap_size, rank_by, torch.device(device), ranks)

    def _open(
        self,
        annotations: Annotations,
        settings: StoreConfig,
        rule: SelectionRule | None,
        heatmap_size: int,
        rank_by: RankBy,
        device: torch.device,
        ranks: Transport,
        start: MemoryStart | None = None,
    ) -> None:
        """Open the store, and load what its snapshot says; without `start` the newest one."""
        self._annotations, self._settings, self._rule = annotations, settings, rule
        self._device, self._ranks = device, ranks
        self._threads: EpochThreads | None = None
        name = f"own-loop-{uuid.uuid4().hex[:12]}" if start is None else start.run
        run = on_rank_zero(ranks, name.encode).decode()
        self.store = open_store(
            settings,
            annotations,
            heatmap_size=heatmap_size,
            ranks=ranks,
            run=run,
            snapshot=None if start is None else start.snapshot,
            ranking=rank_by == "spatial",
        )
        self._annotated = GivenClasses(annotations, device)
        self._answered = Answered.of() if start is None else start.answered
        self._start_is_known = start is not None or is_empty(self.store.snapshot)
        # Rank 0's count. A kill after a commit and before its checkpoint leads back to the one named last.
        self._named = self.store.snapshot.id
        try:
            check_store(self.store, settings, heatmap_size, rank_by)
            if self._start_is_known:
                self._answer()
            self._start(None if start is None else start.epoch)
        except BaseException:
            self.store.close()
            raise

    def _answer(self) -> None:
        self._answered = self.store.answer(self._answered)
        started = None
        if self._answered.late.any():
            started = with_answers(self._annotations, self._answered, from_start=True)
        self._annotated = GivenClasses(self._annotations, self._device, started)

    def _start(self, epoch: int | None = None) -> None:
        """Load epoch, selection and visits from the store's snapshot."""
        state = SnapshotState.of(self.store.snapshot, self.store.spec.num_classes)
        self.epoch = state.next_epoch if epoch is None else epoch
        """The epoch that is being trained, or comes next."""
        selection = state.selection
        if self._rule is not None:
            selection = self._rule.completed(selection)
        self.selection = selection.to(self._device)
        """The expected positives of this epoch."""
        self.class_ratios = state.class_ratios
        """K of each class for the next selection; None without `k_per_class`, and before the first one."""
        self.trust = state.trust
        """How far to trust the last selection; None without hidden labels, and before the first one."""
        self._visits = EpochVisits(self.store, self.epoch, state.skipped, self._ranks)
        self._is_dirty = False

    @property
    def keeps_heatmaps(self) -> bool:
        """Whether there are heatmaps to update, not only scores."""
        return self.store.group.layout != "scores"

    @property
    def snapshot(self) -> int:
        return self.store.snapshot.id

    # Which samples

    @property
    def visited(self) -> NDArray[np.bool_]:
        """Rows that this epoch has updated or skipped: on this rank, or before the memory was opened."""
        return self._visits.rows.copy()

    def is_new(self, ids: Ids) -> NDArray[np.bool_]:
        """Return for each sample whether this epoch has not updated or skipped it yet, as `visited`."""
        rows = as_rows(ids)
        self.store.check_ids(rows)
        had: NDArray[np.bool_] = self._visits.rows[rows]
        return ~had

    def plan(self, *, batch_size: int, seed: int = 0, workers: int = 0, shuffle_buffer: int = 1000) -> Plan:
        """Return what is left of this epoch in batches for every rank: each sample once.

        `plan.batches(rank)` yields the ids of each batch: the batch sampler of a dataset by row. Call it
        before the epoch's first batch.
        """
        plan = training_plan(
            self._annotations.shard_sizes,
            self._annotations.rows_per_shard,
            seed=seed,
            epoch=self.epoch,
            batch_size=batch_size,
            world_size=self._ranks.world_size,
            workers=workers,
            shuffle_buffer=shuffle_buffer,
            visited=self._visits.rows if self._visits.rows.any() else None,
        )
        self.follow(plan)
        return plan

    def follow(self, plan: Plan) -> None:
        """Let ranks train parts of one shard as this plan divides it; before the epoch's first batch."""
        self._visits.follow(plan)

    # A step

    def lookup(self, ids: Ids, views: Boxes | None = None, erased: Boxes | None = None) -> MemoryBatch:
        """Return the stored values of some samples, on the device; it waits for their shards to be read.

        `views` [B,5] and `erased` [B,4]: see `SampleViews`.
        """
        sample_views = self._checked(SampleViews(ids, views, erased))
        self._visits.check_new(sample_views.rows)
        threads = self._open_threads()
        return self._to_batch(threads.read(sample_views.rows), sample_views, threads)

    def prefetch(
        self, batches: Iterable[Batch], sample_views: Callable[[Batch], SampleViews] = sample_views_of
    ) -> Iterator[tuple[Batch, MemoryBatch]]:
        """Yield each batch with its stored values; a thread reads both ahead of the step.

        Batches have `ids` and `views` as attributes or keys; for others, `sample_views` says where they are.
        """
        threads = self._open_threads()
        # Here, not in the thread: loader workers are forked by the thread that asks for the iterator.
        iterator = iter(batches)
        for found, rows in threads.read_ahead(
            announced(iterator, lambda each: self._checked(sample_views(each)))
        ):
            if isinstance(found, Exception):
                raise found
            batch, seen = found
            self._visits.check_new(seen.rows)
            yield batch, self._to_batch(rows, seen, threads)

    def _to_batch(self, rows: Rows, sample_views: CheckedViews, threads: EpochThreads) -> MemoryBatch:
        return to_device(
            rows,
            sample_views,
            self.selection,
            self._annotated,
            device=self._device,
            momentum=self._settings.momentum,
            source=threads,
        )

    def update(self, stored: MemoryBatch, *, logits: Tensor, maps: Tensor | None = None) -> None:
        """Update the averages of samples that were looked up in this epoch, behind the step.

        `logits` [B,L] are those of the pooled prediction; `maps` [B,L,G,G] are the sigmoid of the logit maps,
        in the frame of the view. Maps are not needed while only scores are kept.
        """
        if self._threads is None or stored.source is not self._threads:
            raise UserError(
                "update: these samples were looked up before the epoch ended or the state was loaded. Look "
                "them up again."
            )
        self._visits.check_new(stored.rows)
        self._check_prediction(stored, logits, maps)
        arrays, ready = to_host(updated_averages(stored, logits, maps, self._settings))
        rows = to_rows(arrays, self.store.spec.num_classes)
        self._threads.writeback.put(stored.rows, rows, ready=ready)
        self._visits.note(stored.rows)
        self._is_dirty = True

    def skip(self, ids: Ids) -> None:
        """Let samples keep their rows in this epoch, such as images that cannot be read.

        Those that are neither updated nor skipped keep them too, but are new again after a resume.
        """
        rows = as_rows(ids)
        if len(rows):
            self._visits.check_new(self._checked(SampleViews(rows)).rows)
            self._open_threads().writeback.skip(rows)
            self._visits.note(rows, skipped=True)
            self._is_dirty = True

    def flush(self) -> None:
        """Return when all updates are written, but for those of shards that another rank writes."""
        if self._threads is not None:
            self._threads.writeback.drain()

    def _flush_all(self) -> None:
        """Write all updates; collective."""
        self.flush()
        if self._ranks.world_size == 1:
            return
        unsent = [] if self._threads is None else self._threads.take_unsent()
        for ids, rows in self._visits.exchange(unsent):
            self._visits.check_new(ids)
            self._open_threads().writeback.put(ids, rows)
            self._visits.note(ids)
        self.flush()

    @property
    def waits(self) -> dict[str, float]:
        """Seconds that the step waited in this epoch, by what it waited for."""
        return {} if self._threads is None else self._threads.waits

    def _checked(self, sample_views: SampleViews) -> CheckedViews:
        found = check_sample_views(sample_views)
        self.store.check_ids(found.rows)
        return found

    def _check_prediction(self, stored: MemoryBatch, logits: Tensor, maps: Tensor | None) -> None:
        size, num_classes = len(stored), self.store.spec.num_classes
        if logits.shape != (size, num_classes):
            raise UserError(f"logits: found {list(logits.shape)}, expected {[size, num_classes]}")
        if maps is None and self.keeps_heatmaps:
            raise UserError("maps: missing, and the store keeps heatmaps. Pass the score maps [B,L,G,G].")
        if maps is not None and (maps.ndim != 4 or maps.shape[:2] != logits.shape):
            raise UserError(f"maps: found {list(maps.shape)}, expected {[size, num_classes, 'G', 'G']}")

    def _open_threads(self) -> EpochThreads:
        self._check_start()
        if self._threads is None:
            borrowed = self._visits.borrowed
            self._threads = EpochThreads(self.store, self.epoch, self._settings, self._device, borrowed)
        return self._threads

    def _check_start(self) -> None:
        if not self._start_is_known:
            raise StoreError(
                f"{self.store.backend.url}: has trained rows up to epoch {self.epoch}. Call load_state_dict "
                f"with the memory's state in your checkpoint, or reset() to start from the beginning."
            )

    # The end of an epoch

    def end_epoch(self, *, step: int = 0, score_log: ScoreLog | None = None) -> None:
        """Select the expected positives of the next epoch, commit this one, and compact the heatmaps if due.

        The rows of the tracked samples are added to the store's history. `step`, the optimizer steps so far,
        is recorded in the snapshot. A `score_log` keeps the highest scores of every sample.
        """
        self._check_start()
        self._flush_all()
        self._close_threads()
        self._select(self._visits.divide_shards(), score_log)
        if score_log is not None:
            self.check_lease()
            score_log.write(self.epoch)
        self._commit(step, next_epoch=self.epoch + 1)
        if self.epoch + 1 == self._settings.compact_after and self.store.group.layout != "topk":
            self._compact()
        if self._ranks.rank == 0:
            self.store.record_history(self.epoch)
        self._drop_unneeded()
        self._start(self.epoch + 1)

    def commit(self, *, step: int = 0) -> None:
        """Commit the updates so far, within the epoch."""
        self._check_start()
        self._flush_all()
        self._visits.divide_shards()
        self._commit(step, next_epoch=self.epoch)
        self._drop_unneeded()

    def _commit(self, step: int, *, next_epoch: int) -> None:
        state = SnapshotState(
            selection=self.selection,
            epoch=self.epoch,
            next_epoch=next_epoch,
            skipped=[] if next_epoch != self.epoch else self._visits.all_skipped(),
            momentum=self._settings.momentum,
            class_ratios=self.class_ratios,
            trust=self.trust,
        )
        attributes = state.attributes() | self._answered.attribute()
        self.store.commit(epoch=self.epoch, step=step, attributes=attributes)
        self._is_dirty = False

    def _select(self, shards: list[int], score_log: ScoreLog | None) -> None:
        """Select the expected positives of the next epoch, and note the scores of this one on the way."""
        rule = None if self._rule is None or self.epoch + 1 < self._rule.start_epoch else self._rule
        if rule is None and score_log is None:
            return
        floors = None if rule is None or self.store.spec.top_scores is None else FloorCounts()
        notes = [each.note for each in (score_log, floors) if each is not None]

        def note(ids: NDArray[np.int64], scores: Ranked) -> None:
            for each in notes:
                each(ids, scores)

        what = "keeping the highest scores" if rule is None else "selecting the expected positives"
        with self._show_work(what, len(shards)) as show:
            # Before they are committed, a rank sees the rows of its own shards, and only of those.
            read = self.store.ranked_by_shard
            chunks = counted(in_order(lambda shard: next(read([shard], note)), shards), show)
            if rule is None:
                for _ in chunks:
                    pass
                return
            if self._canaries is not None:
                chunks = self._canaries.noted(chunks)
            selection, self.class_ratios = rule.select(
                chunks, self._annotations, self._labels, self.class_ratios, self._ranks
            )
            if floors is not None:
                selection = floors.marked(selection, self._ranks)
                self._report_approximate(selection)
        self.selection = selection.to(self._device)
        if self._canaries is not None:
            self.trust = self._canaries.trust(selection, self.epoch + 1, self._ranks)

    def _report_approximate(self, selection: Thresholds) -> None:
        """Log the classes whose expected positives may not be exact."""
        if self._ranks.rank == 0 and (classes := selection.approximate_classes()):
            names = [self._class_name(number) for number in classes]
            logger.warning("selection after epoch %d: %s", self.epoch, approximate_text(selection, names))

    def _class_name(self, number: int) -> str:
        return f"class {number}"

    @property
    def _labels(self) -> NDArray[np.int64]:
        return label_counts(self._annotations, self._answered)

    def _compact(self) -> None:
        """From now on keep only the heatmaps of each image's top classes."""
        store, ranks = self.store, self._ranks
        top = min(self._settings.top or 0, store.spec.num_classes)
        num_shards = sum(slot >= 0 for slot in store.snapshot.slots)
        share = len(range(ranks.rank, num_shards, ranks.world_size))
        with self._show_work(f"keeping heatmaps of {top} classes per image", share) as show:
            store.compact(top, progress=show)

    # Saving and resuming

    def state_dict(self) -> dict[str, Any]:
        """Return a few plain values that name the store's snapshot, for your checkpoint.

        The store keeps the snapshot of the newest state dict and the newest commit: save a checkpoint after
        each commit, and it can be resumed from whenever the process is killed. Updates after the
        last commit is in no snapshot, so commit first.
        """
        if self._is_dirty:
            raise StoreError(
                f"{self.store.backend.url}: has updates since its last commit, and no snapshot holds them. "
                f"Call commit() or end_epoch() before state_dict()."
            )
        self._named = self.snapshot
        return {"snapshot": self.snapshot, "epoch": self.epoch, "run": self.store.snapshot.run}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Return to the snapshot that a state dict names; later updates are lost."""
        self._return_to(lambda: find_snapshot(self.store, state))

    def reset(self) -> None:
        """Return to the beginning, before any update."""
        self._return_to(lambda: find_empty(self.store))

    def _return_to(self, find: Callable[[], int]) -> None:
        number = int(on_rank_zero(self._ranks, lambda: str(find()).encode()))
        self._close_threads()
        self.store.rollback(number)
        self._answer()
        self._start()
        self._start_is_known = True
        self._named = number

    def _drop_unneeded(self) -> None:
        self.drop_snapshots({self._named})

    def _show_work(self, title: str, total: int | None) -> AbstractContextManager[Callable[[int], None]]:
        return show_nothing(title, total)

    def drop_snapshots(self, keep: set[int]) -> None:
        """Delete all snapshots but these and the current one."""
        with self._show_work("deleting snapshots that no checkpoint needs", None):
            self.store.drop_snapshots(keep=keep)

    def check_lease(self) -> None:
        """Raise StoreError if another process has taken the store meanwhile."""
        self.store.check_lease()

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the threads and close the store: what was not committed is lost.

        A store in memory is deleted.
        """
        self._close_threads()
        self.store.close()
        if self._settings.kind == "ram" and self._ranks.rank == 0:
            self.store.backend.delete_tree("")

    def _close_threads(self) -> None:
        if self._threads is not None:
            self._threads.close()
            self._threads = None
