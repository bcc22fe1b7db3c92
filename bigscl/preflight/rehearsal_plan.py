"""Plan of a rehearsal: a short epoch of each type that a run has, in folders that are removed in the end."""

import logging
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from bigscl.config import CheckpointConfig, Config
from bigscl.data.epoch_plan import Plan, Stream, batch_lengths
from bigscl.store import open_backend

logger = logging.getLogger(__name__)

NEVER = 10**9
PATIENCE_SECONDS = 10.0
"""How long the removal of the folder is tried while other threads and ranks may still write into it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochType:
    """Epochs of a run that cost the same: the same parameters train, and the store has the same layout."""

    epochs: range
    is_warmup: bool
    is_compacted: bool
    """Whether the heatmaps are those of the top classes only."""


def epoch_types(config: Config) -> list[EpochType]:
    """Return the kinds of epochs of a run, in their order."""
    compact_after = config.compact_after or NEVER
    bounds = {0, config.schedule.warmup.epochs, compact_after, config.schedule.epochs}
    edges = sorted(edge for edge in bounds if edge <= config.schedule.epochs)
    return [
        EpochType(
            epochs=range(first, last),
            is_warmup=config.schedule.is_warmup(first),
            is_compacted=first >= compact_after,
        )
        for first, last in pairwise(edges)
    ]


def rehearsal_config(config: Config, folder: Path, place: str | None) -> Config:
    """Return the config of the rehearsal: an epoch of each kind, saved but neither validated nor tracked.

    `place` is where its store goes, if that is not in the folder.
    """
    kinds = epoch_types(config)
    num_warmup = sum(kind.is_warmup for kind in kinds)
    num_first_layout = sum(not kind.is_compacted for kind in kinds)
    schedule, compacts = config.schedule, config.store.top is not None
    return replace(
        config,
        run=folder,
        schedule=replace(
            schedule,
            warmup=replace(schedule.warmup, epochs=num_warmup),
            main=replace(schedule.main, epochs=len(kinds) - num_warmup),
        ),
        store=replace(
            config.store,
            url=None if place is None else f"{place}/store",
            compact_after=num_first_layout if compacts else None,
        ),
        selection=replace(config.selection, start_epoch=1),
        checkpoint=CheckpointConfig(background=config.checkpoint.background),
        validation=replace(config.validation, every_epochs=NEVER),
        log=replace(config.log, trackers=(), pictures_every=0, ids=False),
    )


def first_batches(plan: Plan, count: int, rows_per_shard: int) -> Plan:
    """Return the plan with at most the first `count` batches of each rank."""

    def cut(stream: Stream, batches: int) -> Stream:
        ids = stream.ids[: sum(batch_lengths(len(stream.ids), plan.batch_size)[: max(0, batches)])]
        return Stream(shards=stream.shards[np.isin(stream.shards, ids // rows_per_shard)], ids=ids)

    def cut_all(streams: tuple[Stream, ...]) -> tuple[Stream, ...]:
        # Streams take turns: the first one may have a batch more than the last.
        return tuple(cut(stream, -(-(count - turn) // len(streams))) for turn, stream in enumerate(streams))

    return replace(plan, streams=tuple(cut_all(streams) for streams in plan.streams))


class ScratchFolders:
    """A folder beside that of the run, on the same storage, and a place beside the run's store."""

    def __init__(self, config: Config, token: str) -> None:
        self._options = config.store.options()
        self.folder = config.run.with_name(f"{config.run.name}.preflight-{token}")
        url = config.store.url if config.store.kind == "disk" else None
        self.store_place = None if url is None else f"{url.rstrip('/')}.preflight-{token}"
        self._missing = [
            parent for place in (str(self.folder), url or "") for parent in _missing_parents(place)
        ]

    @property
    def place(self) -> str:
        """Where the store of the rehearsal is."""
        return self.store_place or str(self.folder)

    def remove(self) -> None:
        """Remove all of it; repeatedly, if something is still being written."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            shutil.rmtree(self.folder, ignore_errors=True)
            if self.store_place is not None:
                with suppress(Exception):  # an error of the storage was reported by the run itself
                    open_backend(self.store_place, self._options).delete_tree("")
            if not self.folder.exists():
                break
            if time.monotonic() > deadline:
                logger.warning("%s: could not be removed. Delete it by hand.", self.folder)
                return
            time.sleep(0.1)
        for parent in self._missing:
            with suppress(OSError):  # not empty: others use it meanwhile
                parent.rmdir()


def _missing_parents(place: str) -> list[Path]:
    """Return the folders that must be created for a local path, the innermost first."""
    return (
        [] if "://" in place else [parent for parent in Path(place).absolute().parents if not parent.exists()]
    )
